"""Reads Meta's own checkpoints, memory-mapped; ``names`` has the places of their tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_llama.checkpoint.model_folders.formats import Reading
from megatron_llama.checkpoint.model_folders.model_fields import (
    GIVE_CONFIG,
    MATCHING_FILES,
    PLAIN_MODELS,
    kind_problems,
    read_config,
    true_vocab_size,
)
from megatron_llama.checkpoint.model_folders.safetensors_file import row_blocks
from megatron_llama.checkpoint.model_folders.tokenizer_files import tokenizer_files_of, tokenizer_in
from megatron_llama.checkpoint.model_folders.torch_file import TorchWeights
from megatron_llama.checkpoint.storage import refuse
from megatron_llama.checkpoint.torch_file import TorchFile
from megatron_llama.config.fields import read_fields
from megatron_llama.config.limits import LARGEST_REAL, SMALLEST_REAL
from megatron_llama.config.schema import ModelConfig
from megatron_llama.converter.meta.names import (
    EMBEDDING,
    HF_EMBEDDING,
    HF_HEAD,
    OUTPUT,
    PARAMS,
    PARAMS_READ,
    file_tensors,
    split_problems,
)
from megatron_llama.converter.tensor_map import TensorReader
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.errors import CheckpointError, describe, listing
from megatron_llama.model.families.reader import LARGEST
from megatron_llama.model.hf import hf_config_from_model, model_config_from_hf, read_config_json


def weight_files_of(folder: Path) -> list[Path]:
    """Return the files of the weights by rank."""
    return sorted(folder.glob("consolidated.*.pth"))


class MetaReader:
    """A folder of Meta's files as a ModelReader."""

    def __init__(
        self,
        folder: Path,
        config: str | Path | None,
        vocab_size: int,
        ignored: Collection[str] = (),
    ) -> None:
        """Open the files; the arguments are those of ``open_model``. Raises CheckpointError with
        everything that is missing, unknown, contradictory or of another shape."""
        self.format = "meta"
        self.folder = folder
        self.notes = ()
        paths = weight_files_of(folder)
        expected = [folder / f"consolidated.{rank:02d}.pth" for rank in range(len(paths))]
        if paths != expected or not paths:
            got = ", ".join(path.name for path in paths) or "none"
            names = ", ".join(path.name for path in expected) or "consolidated.00.pth"
            do = "copy the missing files too"
            raise CheckpointError(folder, got=got, expected=names, do=do)
        self._files = [TorchWeights(TorchFile(path)) for path in paths]
        self.tokenizer_files = tokenizer_files_of(folder)
        # Downloads of several sizes share one tokenizer, in the folder above.
        shared = folder.parent / "tokenizer.model"
        if shared.is_file() and not any(path.name == shared.name for path in self.tokenizer_files):
            self.tokenizer_files += (shared,)
        beside = folder / "config.json"
        user, self.extra = read_config(
            config or (beside if beside.is_file() else None), ignored=ignored
        )
        params = read_config_json(folder / PARAMS)
        self.model = self._model(params, user, vocab_size)
        self.dtype = str(self._tensor(0, EMBEDDING).dtype).removeprefix("torch.")
        self._reader = TensorReader()
        self._add_tensors()
        if self.model.tie_word_embeddings and not self._head_is_embedding():
            raise CheckpointError(
                str(config or beside),
                got="tie_word_embeddings",
                expected=f"none: {OUTPUT} is not the embedding",
                do="give the config of this model",
            )

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        self._reader(rectangle, out)

    def _tensor(self, rank: int, name: str) -> Tensor:
        tensor = self._files[rank].tensors.get(name)
        if tensor is None:
            where = f"{self._files[rank].file.path} {name}"
            do = MATCHING_FILES
            raise CheckpointError(where, got="no such tensor", expected="a LLaMA", do=do)
        if tensor.dim() != 2:
            where = f"{self._files[rank].file.path} {name}"
            got = f"shape {tuple(tensor.shape)}"
            raise CheckpointError(where, got=got, expected="a matrix", do=MATCHING_FILES)
        return tensor

    def _model(
        self, params: Mapping[str, Any], user: ModelConfig | None, given: int
    ) -> ModelConfig:
        """Return the model. The arguments, the user's config and the shapes must not contradict
        each other."""
        where = f"{self.folder / PARAMS}"
        names = {
            "dim": "hidden_size",
            "n_layers": "num_hidden_layers",
            "n_heads": "num_attention_heads",
            "norm_eps": "rms_norm_eps",
        }
        problems = [
            describe(
                f"{where} {name}", got="nothing", expected="a number", do="copy the file again"
            )
            for name in names
            if name not in params
        ]
        problems += [
            describe(
                f"{where} {name}",
                got=value,
                expected="no field of this name",
                do=f"{PLAIN_MODELS}; if it changes nothing, remove it from the file",
            )
            for name, value in params.items()
            if name not in PARAMS_READ and value not in (None, False)
        ]
        with read_fields(params, where) as known_fields:
            for name in ("dim", "n_layers", "n_heads", "n_kv_heads"):
                known_fields.integer(name, low=1, high=LARGEST, default=None, null=True)
            for name in ("norm_eps", "rope_theta"):
                low = SMALLEST_REAL
                known_fields.number(name, low=low, high=LARGEST_REAL, default=None, null=True)
            # Their own files have -1 if the tokenizer knows the size.
            known_fields.integer("vocab_size", low=-1, high=LARGEST, default=None, null=True)
            if params.get("use_scaled_rope") is not None:
                known_fields.switch("use_scaled_rope")
        output = self._tensor(0, OUTPUT).shape[0] * len(self._files)
        known = (user.vocab_size if user else 0) or max(params.get("vocab_size") or 0, 0)
        if known not in (0, output):
            got = f"{output} rows in {len(self._files)} files"
            do = "copy the missing files too"
            raise CheckpointError(f"{self.folder} {OUTPUT}", got=got, expected=f"{known}", do=do)
        # Meta's files hold no padding: the stored rows are the vocabulary.
        tokenizer = tokenizer_in(self.tokenizer_files)
        least = tokenizer.base_vocab_size if tokenizer is not None else 0
        size = true_vocab_size(
            str(self.folder), output, given=given, known=known or output, least=least
        )
        mlp_rows = self._tensor(0, "layers.0.feed_forward.w1.weight").shape[0]
        fields: dict[str, Any] = {
            **{field: params.get(name) for name, field in names.items()},
            "num_key_value_heads": params.get("n_kv_heads") or params.get("n_heads"),
            "rope_theta": float(params.get("rope_theta") or 10000.0),
            "vocab_size": size,
            "intermediate_size": mlp_rows * len(self._files),
        }
        if user is None:
            # No params.json has these: in their code they are constants that changed over time.
            unknown = ["max_position_embeddings"]
            if params.get("use_scaled_rope"):
                unknown.append("rope_scaling")
            problems += [
                describe(f"{where} {name}", got="no word on it", expected="a value", do=GIVE_CONFIG)
                for name in unknown
            ]
        else:
            do = MATCHING_FILES
            problems += kind_problems("the config's", user)
            for name, value in fields.items():
                if value is not None and value != getattr(user, name):
                    expected = f"{getattr(user, name)}, by the config"
                    problems.append(
                        describe(f"{where} {name}", got=value, expected=expected, do=do)
                    )
            scaled = (user.rope_scaling or {}).get("rope_type") == "llama3"
            if scaled != bool(params.get("use_scaled_rope", False)):
                expected = f"{str(scaled).lower()}, by the config"
                problems.append(
                    describe(f"{where} use_scaled_rope", got=not scaled, expected=expected, do=do)
                )
            fields = hf_config_from_model(user, dtype="float32")
        if problems:
            raise CheckpointError(listing(f"{self.folder} cannot be used:", problems))
        return model_config_from_hf(fields, where=where)

    def _add_tensors(self) -> None:
        by_rows = self._tensor(0, EMBEDDING).shape[1] == self.model.hidden_size
        problems = list(split_problems(self.model, len(self._files)))
        refuse(f"{self.folder} does not hold the model:", problems)
        for rank, file in enumerate(self._files):
            path = file.file.path
            maps = file_tensors(self.model, len(self._files), rank, by_rows=by_rows)
            for name, map in maps.items():
                if name in file.tensors:
                    problems += self._reader.add(name, map, file.tensors[name], file.file)
                    continue
                got = "no such tensor"
                problems.append(
                    describe(f"{path} {name}", got=got, expected=map.shape, do=MATCHING_FILES)
                )
            for name in sorted(file.tensors.keys() - maps.keys() - {"rope.freqs"}):
                expected = "none of this name"
                problems.append(
                    describe(f"{path} {name}", got="a tensor", expected=expected, do=PLAIN_MODELS)
                )
        refuse(f"{self.folder} does not hold the model:", problems)

    def _head_is_embedding(self) -> bool:
        """Whether both tensors hold the same values: a config that ties them must not lose a
        head."""
        for block in row_blocks(HF_EMBEDDING, (self.model.vocab_size, self.model.hidden_size)):
            embedding = torch.empty(block.size, dtype=getattr(torch, self.dtype))
            head = torch.empty_like(embedding)
            self._reader(block, embedding)
            self._reader(replace(block, name=HF_HEAD), head)
            if not torch.equal(embedding, head):
                return False
        return True


def opened(folder: Path, kind: str, reading: Reading) -> MetaReader:
    """Open a folder of Meta's files (an ``OpenFolder``)."""
    return MetaReader(folder, reading.config, reading.vocab_size, reading.ignored)
