"""Model folders of every format, opened the same way: which format a folder has, and its weights as
HuggingFace tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from megatron_llama.checkpoint.folders import INCOMPLETE
from megatron_llama.config.schema import ModelConfig
from megatron_llama.errors import CheckpointError
from megatron_llama.plans.params import Rectangle

FORMATS = ("hf", "native", "megatron", "megatron-llama", "meta")
_HF_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


class Source(Protocol):
    """The weights of a folder and what is known of them: a WeightSource that knows what it is."""

    @property
    def format(self) -> str:
        """One of FORMATS."""
        ...

    @property
    def folder(self) -> Path:
        """Where the weights lie: of a folder of checkpoints the one that was chosen."""
        ...

    @property
    def model(self) -> ModelConfig:
        """Derived fields filled in; the vocabulary without padding."""
        ...

    @property
    def dtype(self) -> str:
        """``float32``, ``bfloat16`` or ``float16``: of the stored weights; of a native checkpoint,
        whose masters are always fp32, what the run computed in."""
        ...

    @property
    def tokenizer_files(self) -> Sequence[Path]:
        """Files that travel along: tokenizer, chat template, generation config."""
        ...

    @property
    def extra(self) -> Mapping[str, Any]:
        """Fields of a config.json beside the model's that are to be written as they are: token ids,
        of which there may be lists."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What the user should know: optimizer state that is there and not read, for one."""
        ...

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        """Write the rectangle's values into ``out``, a tensor of its size (any float dtype). Raises
        CheckpointError."""
        ...


def open_source(
    path: str | Path,
    *,
    format: str | None = None,
    config: str | Path | None = None,
    vocab_size: int = 0,
    tokens: int = 0,
) -> Source:
    """Open a model folder of any format.

    ``format``: one of FORMATS; found from the content unless given. ``config``: a HuggingFace
    ``config.json`` that says what the folder does not. ``vocab_size``: the number of token ids, for
    a format that stores only a padded vocabulary; where neither it nor the folder says, ``tokens``
    does: those of the tokenizer that belongs to the weights. Raises CheckpointError with all that
    is wrong, or with what to pass when the folder leaves something open.
    """
    folder = Path(path)
    if format is not None and format not in FORMATS:
        raise CheckpointError(
            "format", got=format, expected=f"one of {', '.join(FORMATS)}", do="correct it"
        )
    kind = format or detect(folder)
    if kind == "hf":
        from megatron_llama.convert.hf.source import HFSource

        return HFSource(folder, config, vocab_size)
    if kind == "native":
        from megatron_llama.convert.native.source import NativeSource

        return NativeSource(folder, config, vocab_size)
    if kind == "meta":
        from megatron_llama.convert.meta.format import MetaSource

        return MetaSource(folder, config, vocab_size)
    from megatron_llama.convert.megatron.source import MegatronSource

    return MegatronSource(folder, kind, config, vocab_size, tokens)


def detect(folder: Path) -> str:
    """The format of a folder, one of FORMATS. Raises CheckpointError when it has none of them, or
    several."""
    if not folder.is_dir():
        got = "a file" if folder.exists() else "no such folder"
        raise CheckpointError(folder, got=got, expected="a model folder", do="check the path")
    found = list(candidates(folder))
    if len(found) > 1:
        do = "say which one is meant (--from)"
        raise CheckpointError(
            folder,
            got=f"weights of {len(found)} formats: {', '.join(found)}",
            expected="one",
            do=do,
        )
    if not found:
        expected = "model.safetensors, pytorch_model.bin, consolidated.00.pth, mp_rank_00/ or a native checkpoint in it"
        raise CheckpointError(
            folder, got="a folder without weights", expected=expected, do="check the path"
        )
    if found[0] == "megatron":
        from megatron_llama.convert.megatron.source import family

        return family(folder)
    return found[0]


def candidates(folder: Path) -> Iterator[str]:
    """Formats whose files lie there. ``megatron`` stands for both families, which only their
    content tells apart."""
    written = (each for each in sorted(folder.glob("iter_*")) if not each.name.endswith(INCOMPLETE))
    inner = [folder, *written, folder / "release"]
    if any((folder / name).is_file() for name in _HF_FILES):
        yield "hf"
    if any((each / "meta.json").is_file() and (each / ".metadata").is_file() for each in inner):
        yield "native"
    if any(next(each.glob("mp_rank_*"), None) is not None for each in inner):
        yield "megatron"
    if next(folder.glob("consolidated.*.pth"), None) is not None:
        yield "meta"
