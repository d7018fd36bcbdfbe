"""Reads HuggingFace folders: safetensors, or the older ``pytorch_model*.bin``, memory-mapped."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_llama.checkpoint.model_folders.formats import Reading
from megatron_llama.checkpoint.model_folders.hf.files import (
    DOWNLOAD,
    files_named_by,
    present_weight_files,
)
from megatron_llama.checkpoint.model_folders.model_fields import read_config
from megatron_llama.checkpoint.model_folders.safetensors_file import DTYPES, row_blocks
from megatron_llama.checkpoint.model_folders.tokenizer_files import tokenizer_files_of
from megatron_llama.checkpoint.model_folders.torch_file import TorchWeights
from megatron_llama.checkpoint.storage import refuse
from megatron_llama.checkpoint.torch_file import TorchFile
from megatron_llama.config.model_files import SUMS, read_sums, require_model_file
from megatron_llama.config.schema import ModelConfig
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.errors import CheckpointError, counted, describe
from megatron_llama.model.hf import read_hf_config
from megatron_llama.model.plan.params import VOCABULARY_TENSORS, hf_shapes

WRAPPERS: Mapping[str, str] = MappingProxyType(
    {
        "_orig_mod.": "a module of torch.compile",
        "_fsdp_wrapped_module.": "FullyShardedDataParallel",
        "base_model.": "a model of PEFT",
        "module.": "DistributedDataParallel",
    }
)
"""Prefixes of the names of tensors that were saved from a wrapped model."""
EMBEDDING, HEAD = VOCABULARY_TENSORS
LEFT_OUT = "the text model is read, without what sees pictures"


class HFWeights:
    """The weights of a HuggingFace folder as a WeightSource that reads only requested values."""

    def __init__(
        self,
        folder: str | Path,
        model: ModelConfig | None = None,
        *,
        own: ModelConfig | None = None,
        ignored: Collection[str] = (),
    ) -> None:
        """``model`` is the one to fill, with derived fields; by default it is that of the folder.
        ``own`` takes the place of the folder's ``config.json``, whose ``ignored`` fields are not
        refused.

        Raises CheckpointError with every tensor that is missing, unknown, of another shape or not a
        float."""
        self.folder = Path(folder)
        own = own or read_hf_config(self.folder, ignored=ignored)
        self.model = model or own
        if self.model.tie_word_embeddings and not own.tie_word_embeddings:
            raise CheckpointError(
                f"{self.folder / 'config.json'} tie_word_embeddings",
                got="false",
                expected="true, as in the run: its head would be lost",
                do="leave tie_word_embeddings to the folder",
            )
        self._file_of: dict[str, Any] = {}
        self._places: Mapping[str, Any] = {}
        if self.model.num_experts:
            from megatron_llama.checkpoint.model_folders.hf.stacked_experts import stacked_places

            self._places = stacked_places(self.model)
        self._read = {"config.json", SUMS}
        named, *others = present_weight_files(self.folder)
        self.notes: tuple[str, ...] = ()
        """Notes on other files in the folder with weights."""
        if others:
            names = ", ".join(path.name for path in others)
            note = f"{named}: the weights are read from it, not from {names} beside it"
            self.notes = (f"{note}, as in transformers",)
        _, unread = read_sums(self.folder)
        if unread:
            lines = counted(unread, "line")
            note = f"{self.folder / SUMS}: {lines} not as sha256sum writes them: nothing is checked"
            self.notes += (f"{note} by those",)
        refuse(f"{self.folder} stores tensors twice:", list(self._open_files(named)))
        refuse(f"{self.folder} does not hold the model:", list(self._problems()))

    def files_left_out(self, kept: Collection[str]) -> list[str]:
        """Return the names of other files in the folder, apart from ``kept``: they do not go into
        another folder of the model."""
        names = {path.name for path in self.folder.iterdir()}
        return sorted(names - self._read - {*kept})

    @property
    def dtype(self) -> str:
        """Return the dtype of the stored weights. If there are several it is ``float32``, which
        holds the values of all."""
        stored = {self._stored(name).get_dtype() for name in hf_shapes(self.model)}
        names = {short: str(dtype).removeprefix("torch.") for dtype, short in DTYPES.items()}
        return names[stored.pop()] if len(stored) == 1 else "float32"

    def _open_files(self, named: Path) -> Iterator[str]:
        """Open the weight files and note the file of each tensor. Yield the tensors that have
        different values in two files: transformers takes the value of either."""
        self._read.add(named.name)
        for path in files_named_by(named):
            self._read.add(path.name)
            file = self._text_part(_open(path))
            for name in list(file.keys()):
                known = self._file_of.setdefault(name, file)
                if known is file or _is_equal(known.get_slice(name), file.get_slice(name), name):
                    continue
                got = f"other values in {path.name} than in another file of {named.name}"
                do = "remove the tensor from the file that does not belong to the model"
                yield describe(f"{self.folder} {name}", got=got, expected="one tensor", do=do)

    def _text_part(self, file: Any) -> Any:
        """Return a file of weights, of a LLaMA 4 that also sees pictures with the tensors of its
        text model alone."""
        if self.model.model_type != "llama4_text":
            return file
        from megatron_llama.checkpoint.model_folders.hf.text_part import TextPart  # of few models

        part = TextPart(file)
        if part.left_out and not any(LEFT_OUT in note for note in self.notes):
            self.notes += (f"{self.folder}: {LEFT_OUT}",)
        return part

    def _problems(self) -> Iterator[str]:
        shapes = hf_shapes(self.model)
        embeddings = (name for name in self._file_of if name.endswith(EMBEDDING))
        prefix = min((name.removesuffix(EMBEDDING) for name in embeddings), key=len, default="")
        if prefix:
            wrapper = next((why for start, why in WRAPPERS.items() if start in prefix), "another")
            count = sum(name.startswith(prefix) for name in self._file_of)
            got = f"{counted(count, 'tensor')} whose names begin with {prefix!r}"
            expected = f"the names of the model, such as {EMBEDDING}"
            do = f"this is a model within {wrapper}: save the inner model alone"
            yield describe(self.folder, got=got, expected=expected, do=do)
            return
        for name, shape in shapes.items():
            where = f"{self.folder} {name}"
            stored = self._stored(name)
            if stored is None:
                yield describe(where, got="no such tensor", expected=f"shape {shape}", do=DOWNLOAD)
                continue
            if tuple(stored.get_shape()) != shape:
                do = "take the model fields from the folder that belongs to the weights"
                got = f"shape {tuple(stored.get_shape())}"
                yield describe(where, got=got, expected=shape, do=do)
            if stored.get_dtype() not in DTYPES.values():
                do = "quantized models cannot be trained: take the original"
                expected = " or ".join(DTYPES.values())
                yield describe(where, got=stored.get_dtype(), expected=expected, do=do)
        places = self._places.items()
        stacked = {place.tensor for name, place in places if name not in self._file_of}
        # One that has a matrix which is also stored by itself is another model's.
        stacked -= {
            place.tensor for name, place in places if name in self._file_of and name != place.tensor
        }
        for name in sorted(self._file_of.keys() - shapes.keys() - stacked):
            # A tied head may be stored all the same; inv_freq is a buffer that old versions of
            # transformers stored.
            if name == HEAD and not self.model.num_labels:
                yield from self._head_problems()
            elif not name.endswith("rotary_emb.inv_freq"):
                do = "only what config.json says of the model can be read"
                where = f"{self.folder} {name}"
                yield describe(where, got="a tensor", expected="none of this name", do=do)

    def _stored(self, name: str) -> Any:
        """Return a tensor as a slice of its file, or of a file's tensor that stacks several; None
        if there is none. A file may hold only the head of a tied pair: as in transformers it is the
        embedding, too."""
        tied = self.model.tie_word_embeddings and EMBEDDING not in self._file_of
        name = HEAD if name == EMBEDDING and tied else name
        if name in self._file_of:
            return self._file_of[name].get_slice(name)
        place = self._places.get(name)
        if place is None or place.tensor not in self._file_of:
            return None
        from megatron_llama.checkpoint.model_folders.hf.stacked_experts import MatrixSlice

        return MatrixSlice(self._file_of[place.tensor].get_slice(place.tensor), place)

    def _head_problems(self) -> Iterator[str]:
        """Yield a problem if the stored head differs from the embedding to which config.json ties
        it: transformers computes with the stored head."""
        if EMBEDDING not in self._file_of:
            return
        head = self._file_of[HEAD].get_slice(HEAD)
        embedding = self._file_of[EMBEDDING].get_slice(EMBEDDING)
        if not _is_equal(head, embedding, HEAD):
            yield describe(
                f"{self.folder} {HEAD}",
                got="other values than in the embedding",
                expected="a copy of it, since tie_word_embeddings is true",
                do='write "tie_word_embeddings": false into config.json, or remove the tensor',
            )

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        """Write the rectangle's values into ``out``, a tensor of its size (any float dtype)."""
        window = tuple(
            slice(start, start + size)
            for start, size in zip(rectangle.offset, rectangle.size, strict=True)
        )
        try:
            out.copy_(self._stored(rectangle.name)[window])
        except (SafetensorError, OSError) as error:
            where = f"{self.folder} {rectangle.name}"
            raise CheckpointError(where, got=error, expected="its values", do=DOWNLOAD) from error


def open_folder(folder: Path, kind: str, reading: Reading) -> HFReader:
    """Open a HuggingFace folder, as an ``OpenFolder``."""
    return HFReader(folder, reading.config, reading.vocab_size, reading.ignored)


class HFReader:
    """A HuggingFace folder as a ModelReader."""

    def __init__(
        self,
        folder: Path,
        config: str | Path | None,
        vocab_size: int,
        ignored: Collection[str] = (),
    ) -> None:
        """``config`` takes the place of the folder's own; its ``ignored`` fields are not refused.
        Raises CheckpointError."""
        self.format = "hf"
        self.folder = folder
        model, self.extra = read_config(config or folder / "config.json", ignored=ignored)
        assert model is not None
        if vocab_size not in (0, model.vocab_size):
            expected = f"{model.vocab_size}, by config.json"
            do = "leave it out: this format stores no padding"
            raise CheckpointError("--vocab-size", got=vocab_size, expected=expected, do=do)
        self._weights = HFWeights(folder, model, own=model)
        self.model = model
        self.notes = self._weights.notes
        self.dtype = self._weights.dtype
        self.tokenizer_files = tokenizer_files_of(folder)

    def files_left_out(self) -> list[str]:
        """Return the names of the files in the folder that do not go into a conversion."""
        kept = {path.relative_to(self.folder).parts[0] for path in self.tokenizer_files}
        return self._weights.files_left_out(kept)

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        self._weights(rectangle, out)


def _is_equal(first: Any, second: Any, name: str) -> bool:
    """Whether two stored tensors, as slices of their files, have the same values."""
    shape = tuple(first.get_shape())
    if tuple(second.get_shape()) != shape:
        return False
    rows = [slice(b.offset[0], b.offset[0] + b.size[0]) for b in row_blocks(name, shape)]
    return all(torch.equal(first[block].float(), second[block].float()) for block in rows)


def _open(path: Path) -> Any:
    require_model_file(path, do=DOWNLOAD)
    if path.suffix == ".bin":
        return TorchWeights(TorchFile(path))
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            path, got=error, expected="a safetensors file", do=DOWNLOAD
        ) from error
