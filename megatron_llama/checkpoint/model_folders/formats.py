"""Model folders of every format behind two interfaces: ``open_model`` detects the format of a
folder and reads its weights as HuggingFace tensors; a ``ModelWriter`` writes them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_llama.checkpoint.folders import INCOMPLETE
from megatron_llama.checkpoint.model_folders.hf.files import (
    WEIGHT_FILES,
    files_named_by,
    present_weight_files,
)
from megatron_llama.checkpoint.model_folders.optimizer_state import OptimizerState
from megatron_llama.checkpoint.model_folders.torch_dist.files import is_torch_dist
from megatron_llama.config.schema import Config, ModelConfig
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.errors import CheckpointError
from megatron_llama.hooks import formats
from megatron_llama.registry import Registry, imported

if TYPE_CHECKING:
    from megatron_llama.checkpoint.model_folders.hf.reader import HFWeights
    from megatron_llama.checkpoint.model_folders.write_tasks import WriteTask

FORMATS = ("hf", "native", "megatron", "megatron-llama", "meta", "torch_dist")


class ModelReader(Protocol):
    """An opened model folder: a WeightSource of its weights, and its other properties."""

    @property
    def format(self) -> str:
        """One of FORMATS."""
        ...

    @property
    def folder(self) -> Path:
        """Folder of the weights; in a folder of checkpoints, the checkpoint that was chosen."""
        ...

    @property
    def model(self) -> ModelConfig:
        """The model, derived fields filled in, its vocabulary without padding."""
        ...

    @property
    def dtype(self) -> str:
        """``float32``, ``bfloat16`` or ``float16``: the dtype of the stored weights. For a native
        checkpoint, whose masters are always fp32, the dtype in which the run computed."""
        ...

    @property
    def tokenizer_files(self) -> Sequence[Path]:
        """Files that go with the model: tokenizer, chat template, generation config."""
        ...

    @property
    def extra(self) -> Mapping[str, Any]:
        """The ``config.json`` that the model came with; empty if there is none. A written one keeps
        its fields that are no numbers of the model."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Notes for the user, such as on optimizer state that is there and is not read."""
        ...

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        """Write the rectangle's values into ``out``, a tensor of its size (any float dtype). Raises
        CheckpointError."""
        ...


class SavedRun(Protocol):
    """A run of another program, with which a run here can go on."""

    @property
    def args(self) -> Mapping[str, Any]:
        """Its options, by the names that they have in that program."""
        ...

    def position(self) -> tuple[int, int]:
        """Return the iteration after which it was saved, and the samples consumed until then.
        Raises CheckpointError."""
        ...

    def optimizer(self, model: ModelConfig, ignored: Collection[str]) -> OptimizerState:
        """Open the state of its optimizer. ``model`` is its model; fields of a ``config.json``
        whose names are ``ignored`` are not refused. Raises CheckpointError."""
        ...

    def sample_lines(self, consumed: int, config: Config) -> Iterator[str]:
        """Yield lines that tell the next sample of that run, and that of the run here."""
        ...


class ModelWriter(Protocol):
    """A format to write, with its choices made."""

    def problems(self, model: ModelConfig) -> Iterator[str]:
        """Yield the reasons why the model cannot be written in this format."""
        ...

    def tasks(
        self,
        folder: Path,
        model: ModelConfig,
        source: WeightSource,
        dtype: torch.dtype,
        extra: Mapping[str, Any],
    ) -> Iterator[WriteTask]:
        """Yield the work, by files under ``folder``, which is there and empty. ``extra`` is
        the ``config.json`` that the model came with. The tasks may run side by side."""
        ...


class Reading(NamedTuple):
    """The arguments of ``open_model`` about how a folder is read."""

    config: str | Path | None
    vocab_size: int
    tokens: int
    ignored: Collection[str]


class OpenFolder(Protocol):
    """Opens a folder of the format ``kind``. Raises CheckpointError."""

    def __call__(self, folder: Path, kind: str, reading: Reading, /) -> ModelReader: ...


OWN: Registry[OpenFolder] = Registry(
    {
        "hf": "checkpoint.model_folders.hf.reader:open_folder",
        "native": "checkpoint.model_folders.native.reader:open_folder",
    }
)
"""Functions that open the formats which runs write themselves."""


def open_model(
    path: str | Path,
    *,
    format: str | None = None,
    config: str | Path | None = None,
    vocab_size: int = 0,
    tokens: int = 0,
    ignored: Collection[str] = (),
) -> ModelReader:
    """Open a model folder of any format.

    ``format`` is one of FORMATS, by default detected from the content. ``config`` names a
    HuggingFace ``config.json`` with what the folder leaves open. ``vocab_size`` is the number of
    token ids, for a format that stores only a padded vocabulary; if neither it nor the folder gives
    the number, the ``tokens`` of the weights' tokenizer count. Unknown fields of ``config.json``
    whose names are ``ignored`` are not refused. Raises CheckpointError with all problems, or with
    the options to pass when the folder leaves something open.
    """
    folder = Path(path)
    if format is not None and format not in FORMATS:
        raise CheckpointError(
            "format", got=format, expected=f"one of {', '.join(FORMATS)}", do="correct it"
        )
    kind = format or detect(folder)
    opened: OpenFolder = OWN[kind] if kind in OWN else imported(formats()[kind].opened)
    return opened(folder, kind, Reading(config, vocab_size, tokens, ignored))


def hf_weights(folder: str | Path, *, ignored: Collection[str]) -> HFWeights:
    """Open the weights of a HuggingFace folder. The ``ignored`` fields of its ``config.json`` are
    not refused. Raises CheckpointError."""
    # Only a run that begins there loads the readers of HuggingFace, safetensors and torch's files.
    from megatron_llama.checkpoint.model_folders.hf.reader import HFWeights

    return HFWeights(folder, ignored=ignored)


def detect(folder: Path) -> str:
    """Return the format of a folder, one of FORMATS. Raises CheckpointError when it has no known
    format, or several."""
    if not folder.is_dir():
        got = "a file" if folder.exists() else "no such folder"
        raise CheckpointError(folder, got=got, expected="a model folder", do="check the path")
    kinds = list(candidates(folder))
    if len(kinds) > 1:
        do = "say which one is meant (--from)"
        raise CheckpointError(
            folder,
            got=f"weights of {len(kinds)} formats: {', '.join(kinds)}",
            expected="one",
            do=do,
        )
    if not kinds:
        expected = (
            "model.safetensors, pytorch_model.bin, consolidated.00.pth, mp_rank_00/,"
            " a torch_dist or a native checkpoint in it"
        )
        raise CheckpointError(
            folder, got="a folder without weights", expected=expected, do="check the path"
        )
    kind = kinds[0]
    if kind in formats() and (named := formats()[kind].kind):
        kind = imported(named)(folder)
    return kind


def saved_run(folder: Path) -> SavedRun | None:
    """Return the run of another program that a folder holds; None if it holds weights alone. Raises
    CheckpointError."""
    kinds = list(candidates(folder))
    if len(kinds) != 1 or kinds[0] not in formats() or not (run := formats()[kinds[0]].run):
        return None
    opened: SavedRun | None = imported(run)(folder)
    return opened


def weight_files(folder: Path) -> list[Path]:
    """Return the files from which ``open_model`` or ``HFWeights`` reads the weights of a folder;
    many downloads have more. A native checkpoint has none: it is compared where it is read. Raises
    CheckpointError."""
    kinds = list(candidates(folder))
    if "hf" in kinds:  # alone, or named as such
        return files_named_by(present_weight_files(folder)[0])
    foreign = [kind for kind in kinds if kind in formats()]
    files: list[Path] = imported(formats()[foreign[0]].files)(folder) if foreign else []
    return files


def candidates(folder: Path) -> Iterator[str]:
    """Yield the formats whose files are in the folder. ``megatron`` stands for both families, which
    only their content tells apart."""
    written = (path for path in sorted(folder.glob("iter_*")) if not path.name.endswith(INCOMPLETE))
    inner = [folder, *written, folder / "release"]
    if any((folder / name).is_file() for name in WEIGHT_FILES):
        yield "hf"
    indices = (".metadata", "index.json")
    indexed = (path for path in inner if any((path / name).is_file() for name in indices))
    if any((path / "meta.json").is_file() for path in indexed):
        yield "native"
    if any(next(path.glob("mp_rank_*"), None) is not None for path in inner):
        yield "megatron"
    if any(is_torch_dist(path) for path in inner):
        yield "torch_dist"
    if next(folder.glob("consolidated.*.pth"), None) is not None:
        yield "meta"


def weight_folders(options: Mapping[str, Any]) -> list[str]:
    """Return the folders from which a run with these checkpoint options takes its weights."""
    return [folder for name in ("init_from_hf", "load") if (folder := options.get(name))]
