"""Meta's own checkpoints: ``consolidated.NN.pth`` for each tensor-parallel rank of their code, and
``params.json``.

Rows of q and k are ordered for rotary pairs that are neighbours. The embedding is cut by columns in
the code of LLaMA 1 and 2 and by rows in that of LLaMA 3. What params.json has no word for stands in
a ``config.json`` beside it, which their code ignores.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from megatron_llama.checkpoint.folders import write_synced
from megatron_llama.checkpoint.storage import refuse
from megatron_llama.config.hf import hf_config_from_model, model_config_from_hf, read_config_json
from megatron_llama.config.schema import ModelConfig
from megatron_llama.convert.jobs import WriteTask
from megatron_llama.convert.parts import FOREIGN_MODEL, Outgoing, Part, PartReader, elements_of
from megatron_llama.convert.pickled import PickledFile, write_pickled
from megatron_llama.convert.pickled_weights import PickledWeights
from megatron_llama.convert.safetensors_file import row_blocks
from megatron_llama.convert.tokenizer_files import (
    read_config,
    tokenizer_files_of,
    tokens_in,
    vocabulary,
)
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.errors import CheckpointError, describe, listing
from megatron_llama.plans.params import HFSlice, Rectangle, stage_units, whole_model

PARAMS = "params.json"
EMBEDDING = "tok_embeddings.weight"
OUTPUT = "output.weight"
ROW_CUT_VOCABULARY = 128_000
"""From this size on a model is a LLaMA 3, whose code cuts the embedding by rows."""
LLAMA3_NUMBERS: Mapping[str, float] = MappingProxyType(
    {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
)
BLOCK: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "input_layernorm.weight": ("attention_norm.weight",),
        "self_attn.qkv_proj.weight": (
            "attention.wq.weight",
            "attention.wk.weight",
            "attention.wv.weight",
        ),
        "self_attn.o_proj.weight": ("attention.wo.weight",),
        "post_attention_layernorm.weight": ("ffn_norm.weight",),
        "mlp.gate_up_proj.weight": ("feed_forward.w1.weight", "feed_forward.w3.weight"),
        "mlp.down_proj.weight": ("feed_forward.w2.weight",),
    }
)
"""Ours -> theirs, one for each slice of a fused weight."""
ASK = "give the model's HuggingFace config.json (--hf-config)"


def file_parts(model: ModelConfig, files: int, rank: int, *, by_rows: bool) -> dict[str, Part]:
    """The tensors of one file by their names. ``by_rows``: how the embedding is cut. There always
    is a head, if tied as a copy."""
    # Their code pads nothing: the vocabulary is a multiple of the number of files.
    plain = replace(model, make_vocab_size_divisible_by=1, tie_word_embeddings=False)
    [*units] = stage_units(plain, whole_model(plain), 0, tp=files, tp_rank=rank)
    found = {}
    for spec in (spec for unit in units for spec in unit.params):
        part = Part.of(spec)
        if spec.name.startswith("model.layers."):
            _, _, layer, own = spec.name.split(".", 3)
            for index, name in enumerate(BLOCK[own]):
                rotary = name in ("attention.wq.weight", "attention.wk.weight")
                found[f"layers.{layer}.{name}"] = part.alone(index, model.head_dim if rotary else 0)
        else:
            found[
                {
                    "model.embed_tokens.weight": EMBEDDING,
                    "model.norm.weight": "norm.weight",
                    "lm_head.weight": OUTPUT,
                }[spec.name]
            ] = part
    if not by_rows:
        cols = model.hidden_size // files
        shape = (model.vocab_size, model.hidden_size)
        piece = HFSlice("model.embed_tokens.weight", shape, 0, model.vocab_size, hf_col=rank * cols)
        found[EMBEDDING] = Part((model.vocab_size, cols), (piece,))
    return found


class MetaSource:
    """The weights of a folder as HuggingFace rectangles, memory-mapped."""

    def __init__(self, folder: Path, config: str | Path | None, vocab_size: int) -> None:
        """Raises CheckpointError with everything that is missing, unknown, contradictory or of
        another shape."""
        self.format = "meta"
        self.folder = folder
        self.notes = ()
        paths = sorted(folder.glob("consolidated.*.pth"))
        expected = [folder / f"consolidated.{rank:02d}.pth" for rank in range(len(paths))]
        if paths != expected or not paths:
            got = ", ".join(path.name for path in paths) or "none"
            names = ", ".join(path.name for path in expected) or "consolidated.00.pth"
            raise CheckpointError(folder, got=got, expected=names, do="copy the missing files too")
        self._files = [PickledWeights(PickledFile(path)) for path in paths]
        self.tokenizer_files = tokenizer_files_of(folder)
        shared = folder.parent / "tokenizer.model"
        if shared.is_file() and not any(path.name == shared.name for path in self.tokenizer_files):
            self.tokenizer_files += (shared,)
        beside = folder / "config.json"
        user, self.extra = read_config(config or (beside if beside.is_file() else None))
        params = read_config_json(folder / PARAMS)
        self.model = self._model(params, user, vocab_size)
        self.dtype = str(self._tensor(0, EMBEDDING).dtype).removeprefix("torch.")
        self._reader = PartReader()
        self._take()
        if self.model.tie_word_embeddings and not self._head_is_embedding():
            where = str(config or beside)
            do = "give the config of this model"
            raise CheckpointError(
                where,
                got="tie_word_embeddings",
                expected=f"none: {OUTPUT} is not the embedding",
                do=do,
            )

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        """See Source."""
        self._reader(rectangle, out)

    def _tensor(self, rank: int, name: str) -> Tensor:
        found = self._files[rank].tensors.get(name)
        if found is None:
            where = f"{self._files[rank].file.path} {name}"
            raise CheckpointError(where, got="no such tensor", expected="a LLaMA", do=FOREIGN_MODEL)
        return found

    def _model(
        self, params: Mapping[str, Any], user: ModelConfig | None, given: int
    ) -> ModelConfig:
        where = f"{self.folder / PARAMS}"
        fields, problems = _hf_fields(params, where)
        output = self._tensor(0, OUTPUT).shape[0] * len(self._files)
        known = params.get("vocab_size", 0)
        known = (user.vocab_size if user else 0) or (
            known if isinstance(known, int) and known > 0 else 0
        )
        if known not in (0, output):
            got = f"{output} rows in {len(self._files)} files"
            raise CheckpointError(
                f"{self.folder} {OUTPUT}",
                got=got,
                expected=f"{known}",
                do="copy the missing files too",
            )
        # Meta's files hold no padding: what is stored is the vocabulary.
        size = vocabulary(
            str(self.folder),
            output,
            given=given,
            known=known or output,
            tokens=tokens_in(self.tokenizer_files),
        )
        fields |= {
            "vocab_size": size,
            "intermediate_size": self._tensor(0, "layers.0.feed_forward.w1.weight").shape[0]
            * len(self._files),
        }
        if size != output:
            problems.append(
                describe(
                    f"{self.folder} {OUTPUT}", got=f"{output} rows", expected=size, do=FOREIGN_MODEL
                )
            )
        if user is not None:
            for name, value in fields.items():
                if value is not None and (found := getattr(user, name)) != value:
                    problems.append(
                        describe(
                            f"{where} {name}",
                            got=value,
                            expected=f"{found}, by the config",
                            do=FOREIGN_MODEL,
                        )
                    )
            scaled = (user.rope_scaling or {}).get("rope_type") == "llama3"
            if scaled != bool(params.get("use_scaled_rope", False)):
                expected = f"{str(scaled).lower()}, by the config"
                problems.append(
                    describe(
                        f"{where} use_scaled_rope",
                        got=not scaled,
                        expected=expected,
                        do=FOREIGN_MODEL,
                    )
                )
            fields = hf_config_from_model(user, dtype="float32")
        else:
            problems += [
                describe(f"{where} {name}", got="no word on it", expected="a value", do=ASK)
                for name in _unknown(params)
            ]
        if problems:
            raise CheckpointError(listing(f"{self.folder} cannot be used:", problems))
        return model_config_from_hf(fields, where=where)

    def _take(self) -> None:
        by_rows = self._tensor(0, EMBEDDING).shape[1] == self.model.hidden_size
        problems = list(self._sizes())
        refuse(f"{self.folder} does not hold the model:", problems)
        for rank, file in enumerate(self._files):
            parts = file_parts(self.model, len(self._files), rank, by_rows=by_rows)
            for name, part in parts.items():
                if name in file.tensors:
                    problems += self._reader.add(name, part, file.tensors[name], file.file)
                else:
                    problems.append(
                        describe(
                            f"{file.file.path} {name}",
                            got="no such tensor",
                            expected=part.shape,
                            do=FOREIGN_MODEL,
                        )
                    )
            for name in sorted(file.tensors.keys() - parts.keys() - {"rope.freqs"}):
                do = "only plain LLaMA models can be converted"
                problems.append(
                    describe(
                        f"{file.file.path} {name}",
                        got="a tensor",
                        expected="none of this name",
                        do=do,
                    )
                )
        refuse(f"{self.folder} does not hold the model:", problems)

    def _sizes(self) -> Iterator[str]:
        yield from MetaTarget(len(self._files)).problems(self.model)

    def _head_is_embedding(self) -> bool:
        """Whether the two hold the same values: what a config says of tying must not lose a
        head."""
        names = ("model.embed_tokens.weight", "lm_head.weight")
        for block in row_blocks(names[0], (self.model.vocab_size, self.model.hidden_size)):
            values = [torch.empty(block.size, dtype=getattr(torch, self.dtype)) for _ in names]
            for name, out in zip(names, values, strict=True):
                self._reader(replace(block, name=name), out)
            if not torch.equal(*values):
                return False
        return True


def _hf_fields(params: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """What params.json says, in the words of a config.json."""
    names = {
        "dim": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "norm_eps": "rms_norm_eps",
    }
    do = "copy the file again"
    problems = [
        describe(f"{where} {name}", got="nothing", expected="a number", do=do)
        for name in names
        if name not in params
    ]
    fields: dict[str, Any] = {field: params.get(name) for name, field in names.items()}
    fields["num_key_value_heads"] = params.get("n_kv_heads") or params.get("n_heads")
    fields["rope_theta"] = float(params.get("rope_theta", 10000.0))
    return fields, problems


def _unknown(params: Mapping[str, Any]) -> Iterator[str]:
    """What no params.json says and their code has as constants that changed over time."""
    yield "max_position_embeddings"
    if params.get("use_scaled_rope"):
        yield "rope_scaling"


@dataclass(frozen=True)
class MetaTarget:
    """How a model is laid out in files."""

    files: int

    def problems(self, model: ModelConfig) -> Iterator[str]:
        """Why the model cannot be laid out so."""
        for name in (
            "num_attention_heads",
            "num_key_value_heads",
            "intermediate_size",
            "vocab_size",
            "hidden_size",
        ):
            if getattr(model, name) % self.files:
                got = f"{name} {getattr(model, name)}"
                do = "give another number of files (--tensor-model-parallel-size)"
                yield describe(
                    f"{self.files} files", got=got, expected=f"a multiple of {self.files}", do=do
                )

    def jobs(
        self,
        folder: Path,
        model: ModelConfig,
        source: WeightSource,
        dtype: torch.dtype,
        extra: Mapping[str, Any],
    ) -> Iterator[WriteTask]:
        """One for each file under ``folder``, which has the small files at once. They may run side
        by side."""
        config = hf_config_from_model(model, dtype=str(dtype).removeprefix("torch.")) | dict(extra)
        for name, content in ((PARAMS, make_params(model)), ("config.json", config)):
            write_synced(folder / name, (json.dumps(content, indent=2) + "\n").encode())
        by_rows = model.vocab_size >= ROW_CUT_VOCABULARY
        for rank in range(self.files):
            parts = file_parts(model, self.files, rank, by_rows=by_rows)
            if model.tie_word_embeddings:
                head = parts[OUTPUT]
                pieces = tuple(
                    replace(piece, name="model.embed_tokens.weight") for piece in head.slices
                )
                parts[OUTPUT] = replace(head, slices=pieces)
            tensors = {name: Outgoing(part, source) for name, part in parts.items()}
            yield WriteTask(
                elements_of(tensors),
                partial(write_pickled, folder / f"consolidated.{rank:02d}.pth", tensors, dtype),
            )


def make_params(model: ModelConfig) -> dict[str, Any]:
    """A params.json that their code reads: it takes no other fields than its own."""
    multiple, factor = _width_rule(model.hidden_size, model.intermediate_size)
    params = {
        "dim": model.hidden_size,
        "n_layers": model.num_hidden_layers,
        "n_heads": model.num_attention_heads,
        "n_kv_heads": model.num_key_value_heads,
        "vocab_size": model.vocab_size,
        "multiple_of": multiple,
        "ffn_dim_multiplier": factor,
        "norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope_theta,
        "use_scaled_rope": True
        if (model.rope_scaling or {}).get("rope_type") == "llama3"
        else None,
    }
    # The code of LLaMA 1 knows neither shared heads nor a base.
    usual = {"n_kv_heads": model.num_attention_heads, "rope_theta": 10000.0}
    return {
        name: value
        for name, value in params.items()
        if value is not None and usual.get(name) != value
    }


def mlp_width(dim: int, multiple: int, factor: float | None) -> int:
    """The width of the MLP by the rule of their code."""
    width = int(2 * 4 * dim / 3)
    if factor is not None:
        width = int(factor * width)
    return -(-width // multiple) * multiple


def _width_rule(dim: int, width: int) -> tuple[int, float | None]:
    """(multiple_of, ffn_dim_multiplier) that give ``width``: the usual ones where they do."""
    for multiple, factor in (
        (256, None),
        (4096, 1.3),
        (1024, 1.3),
        (1024, 1.4),
        (256, 1.5),
        (1024, 1.5),
    ):
        if mlp_width(dim, multiple, factor) == width:
            return multiple, factor
    return 1, (width + 0.5) / int(2 * 4 * dim / 3)


def lost_fields(model: ModelConfig) -> Iterator[str]:
    """What Meta's code cannot express: kept in config.json for the way back, but not used there."""
    scaling = model.rope_scaling or {}
    if model.head_dim * model.num_attention_heads != model.hidden_size:
        yield "head_dim"
    if scaling and not (
        scaling["rope_type"] == "llama3"
        and all(scaling[name] == value for name, value in LLAMA3_NUMBERS.items())
    ):
        yield "rope_scaling"
