"""HuggingFace folders: a source of initial weights, and the format in which a trained model
leaves."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_llama.checkpoint.checksums import SUMS
from megatron_llama.checkpoint.failures import writing
from megatron_llama.checkpoint.folders import (
    commit,
    fresh_staging,
    recover,
    staging,
    sync,
    write_synced,
)
from megatron_llama.checkpoint.storage import refuse
from megatron_llama.config.hf import hf_config_from_model, read_hf_config
from megatron_llama.config.schema import ModelConfig
from megatron_llama.convert.jobs import WriteTask
from megatron_llama.convert.pickled import PickledFile
from megatron_llama.convert.pickled_weights import PickledWeights
from megatron_llama.convert.safetensors_file import DTYPES, write_safetensors
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.errors import CheckpointError, describe
from megatron_llama.plans.params import Rectangle, hf_shapes
from megatron_llama.tokenizer.base import Tokenizer

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OLD_SINGLE = "pytorch_model.bin"
OLD_INDEX = "pytorch_model.bin.index.json"
DOWNLOAD = "copy the file again from where the model came from"
WRITTEN = (
    *("config.json", "generation_config.json", "*.safetensors", INDEX),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", SUMS),
)
"""What an export may hold, or a conversion to this format, and what an export may therefore
replace."""


class HFWeights:
    """The weights of a HuggingFace folder: a source of rectangles, memory-mapped, that reads only
    what is asked for."""

    def __init__(
        self,
        folder: str | Path,
        model: ModelConfig | None = None,
        *,
        own: ModelConfig | None = None,
    ) -> None:
        """``model``: the one to fill, derived fields filled in, where it is not that of the
        folder's ``config.json``, in whose place ``own`` stands when it is given.

        Raises CheckpointError with every tensor that is missing, unknown, of another shape or not a
        float."""
        self.folder = Path(folder)
        own = own or read_hf_config(self.folder)
        self.model = model or own
        if self.model.tie_word_embeddings and not own.tie_word_embeddings:
            do = "leave tie_word_embeddings to the folder"
            where = f"{self.folder / 'config.json'} tie_word_embeddings"
            raise CheckpointError(
                where, got="false", expected="true, as in the run: its head would be lost", do=do
            )
        self._home: dict[str, Any] = {}
        for path in _files(self.folder):
            file = _open(path)
            self._home.update(dict.fromkeys(file.keys(), file))
        refuse(f"{self.folder} does not hold the model:", list(self._problems()))

    @property
    def dtype(self) -> str:
        """Of the stored weights; where there are several, the one that holds the values of all."""
        found = {self._home[name].get_slice(name).get_dtype() for name in hf_shapes(self.model)}
        names = {short: str(dtype).removeprefix("torch.") for dtype, short in DTYPES.items()}
        return names[found.pop()] if len(found) == 1 else "float32"

    def _problems(self) -> Iterator[str]:
        shapes = hf_shapes(self.model)
        for name, shape in shapes.items():
            if name not in self._home:
                yield describe(
                    f"{self.folder} {name}",
                    got="no such tensor",
                    expected=f"shape {shape}",
                    do=DOWNLOAD,
                )
                continue
            part = self._home[name].get_slice(name)
            if tuple(part.get_shape()) != shape:
                do = "take the model fields from the folder that belongs to the weights"
                yield describe(
                    f"{self.folder} {name}",
                    got=f"shape {tuple(part.get_shape())}",
                    expected=shape,
                    do=do,
                )
            if part.get_dtype() not in DTYPES.values():
                do = "quantized models cannot be trained: take the original"
                yield describe(
                    f"{self.folder} {name}",
                    got=part.get_dtype(),
                    expected=" or ".join(DTYPES.values()),
                    do=do,
                )
        for name in sorted(self._home.keys() - shapes.keys()):
            # A tied head that is stored all the same is a copy of the embedding; inv_freq is a
            # buffer of old versions.
            if name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq"):
                do = "only plain LLaMA models can be read"
                yield describe(
                    f"{self.folder} {name}", got="a tensor", expected="none of this name", do=do
                )

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        """Write the rectangle's values into ``out``, a tensor of its size (any float dtype)."""
        window = tuple(
            slice(start, start + size)
            for start, size in zip(rectangle.offset, rectangle.size, strict=True)
        )
        try:
            out.copy_(self._home[rectangle.name].get_slice(rectangle.name)[window])
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self.folder} {rectangle.name}", got=error, expected="its values", do=DOWNLOAD
            ) from error


def _files(folder: Path) -> list[Path]:
    """The weight files, safetensors preferred. Raises CheckpointError with all that are missing."""
    found = next(
        (
            folder / name
            for name in (INDEX, SINGLE, OLD_INDEX, OLD_SINGLE)
            if (folder / name).is_file()
        ),
        None,
    )
    if found is None:
        do = "save the model with transformers' save_pretrained, which writes one of them"
        raise CheckpointError(folder, got="no weights", expected=f"{SINGLE} or {INDEX}", do=do)
    return _indexed(found) if found.name in (INDEX, OLD_INDEX) else [found]


def _indexed(path: Path) -> list[Path]:
    """The files that an index names."""
    folder = path.parent
    try:
        names = sorted(set(json.loads(path.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        got = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            path, got=got, expected="JSON with a weight_map", do=DOWNLOAD
        ) from error
    missing = [
        describe(folder / name, got="no such file", expected=f"it, by {path.name}", do=DOWNLOAD)
        for name in names
    ]
    refuse(
        f"{folder} is incomplete:",
        [text for text, name in zip(missing, names, strict=True) if not (folder / name).is_file()],
    )
    return [folder / name for name in names]


def _open(path: Path) -> Any:
    if path.suffix == ".bin":
        return PickledWeights(PickledFile(path))
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            path, got=error, expected="a safetensors file", do=DOWNLOAD
        ) from error


def export_hf(
    folder: str | Path,
    model: ModelConfig,
    source: WeightSource,
    dtype: str,
    tokenizer: Tokenizer | None = None,
    *,
    max_shard_bytes: int = 5_000_000_000,
) -> Path:
    """Write a folder for ``LlamaForCausalLM.from_pretrained``. The folder appears whole or not at
    all.

    ``model``: derived fields filled in. ``dtype``: ``float32`` (bit-exact), ``bfloat16`` or
    ``float16``. Holds at most 64 MiB of weights at a time. An earlier export is replaced; anything
    else is refused. Raises CheckpointError.
    """
    target = Path(folder).resolve()
    require_free(target)
    model = _with_tokens(model, tokenizer)
    try:
        with writing(target):
            recover(target)
            _write(
                fresh_staging(target),
                model,
                source,
                getattr(torch, dtype),
                tokenizer,
                max_shard_bytes,
            )
            commit(target)
    finally:
        shutil.rmtree(staging(target), ignore_errors=True)
    return target


def require_free(target: Path) -> None:
    """Raise CheckpointError if there is anything but an earlier export."""
    names = [entry.name for entry in target.iterdir()] if target.exists() else []
    strange = sorted(
        name for name in names if not any(fnmatch(name, pattern) for pattern in WRITTEN)
    )
    if strange or (names and "config.json" not in names):
        got = f"a folder with {', '.join((strange or names)[:3])}"
        expected = "no folder, an empty one or an earlier export"
        raise CheckpointError(target, got=got, expected=expected, do="give another path")


def _with_tokens(model: ModelConfig, tokenizer: Tokenizer | None) -> ModelConfig:
    if tokenizer is None:
        return model
    if tokenizer.vocab_size > model.vocab_size:
        got = f"{tokenizer.vocab_size} tokens"
        expected = f"at most the model's vocab_size {model.vocab_size}"
        raise CheckpointError(
            "tokenizer", got=got, expected=expected, do="give the tokenizer of the training data"
        )
    bos = tokenizer.bos_id if model.bos_token_id is None else model.bos_token_id
    eos = tokenizer.eos_id if model.eos_token_id is None else model.eos_token_id
    return dataclasses.replace(model, bos_token_id=bos, eos_token_id=eos)


def _write(
    folder: Path,
    model: ModelConfig,
    source: WeightSource,
    dtype: torch.dtype,
    tokenizer: Tokenizer | None,
    max_shard_bytes: int,
) -> None:
    for job in hf_jobs(folder, model, source, dtype, max_shard_bytes=max_shard_bytes):
        job.run()
    if tokenizer is not None:
        tokenizer.save_hf(folder)
        for path in folder.iterdir():
            sync(path)


def hf_jobs(
    folder: Path,
    model: ModelConfig,
    source: WeightSource,
    dtype: torch.dtype,
    *,
    max_shard_bytes: int,
    extra: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[WriteTask]:
    """One for each weight file under ``folder``, which has the small files at once. They may run
    side by side.

    ``extra``: fields of config.json beside the model's."""
    files = _plan_files(hf_shapes(model), dtype, max_shard_bytes)
    if len(files) > 1:
        total = sum(
            math.prod(shape) * dtype.itemsize
            for shapes in files.values()
            for shape in shapes.values()
        )
        home = {tensor: name for name, shapes in files.items() for tensor in shapes}
        write_synced(folder / INDEX, _json({"metadata": {"total_size": total}, "weight_map": home}))
    config = hf_config_from_model(model, dtype=str(dtype).removeprefix("torch.")) | dict(extra)
    ids = {
        name: config[name] for name in ("bos_token_id", "eos_token_id") if config[name] is not None
    }
    write_synced(folder / "config.json", _json(config))
    write_synced(folder / "generation_config.json", _json({"_from_model_config": True, **ids}))
    for name, shapes in files.items():
        elements = sum(math.prod(shape) for shape in shapes.values())
        yield WriteTask(elements, partial(write_safetensors, folder / name, shapes, dtype, source))


def _plan_files(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, max_bytes: int
) -> dict[str, dict[str, tuple[int, ...]]]:
    """File names with the tensors of each, at most ``max_bytes`` per file unless a single tensor is
    larger."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    room = max_bytes
    for name, shape in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        if size > room and shards[-1]:
            shards.append({})
            room = max_bytes
        shards[-1][name] = shape
        room -= size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {
        f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard
        for number, shard in enumerate(shards, 1)
    }


def _json(content: object) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
