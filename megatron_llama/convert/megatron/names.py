"""Checkpoints of Megatron-LM and Megatron-LLaMA: ``mp_rank_TT[_PPP]/model_optim_rng.pt`` in
``iter_NNNNNNN`` or ``release``.

Both hold tensor-parallel pieces with fused q, k, v and fused gate and up projections. They differ
in the order of the first: Megatron-LM interleaves by key/value head (its queries, its key, its
value), Megatron-LLaMA stacks all queries, keys, values of a rank. Where neither the names nor the
arguments in a file tell which it is, the user has to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from megatron_llama.config.schema import ModelConfig
from megatron_llama.convert.parts import Part
from megatron_llama.errors import CheckpointError
from megatron_llama.plans.params import (
    HFSlice,
    ParamSpec,
    Partition,
    padded_vocab_size,
    stage_units,
)

TRACKER = "latest_checkpointed_iteration.txt"
FILE = "model_optim_rng.pt"
CHECKPOINT_VERSION = 3.0
TE = "transformer_engine"
LOCAL = "local"
LEGACY = "legacy"
LAYOUTS = (TE, LOCAL, LEGACY)
EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"

_OWN = (
    "input_layernorm",
    "self_attn.qkv_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_up_proj",
    "mlp.down_proj",
)
_CORE = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
_OLD = (
    "self_attention.query_key_value",
    "self_attention.dense",
    "mlp.dense_h_to_4h",
    "mlp.dense_4h_to_h",
)


def _block(first: str, qkv: str, out: str, second: str, up: str, down: str) -> Mapping[str, str]:
    return MappingProxyType(
        {
            f"{own}.weight": name
            for own, name in zip(_OWN, (first, qkv, out, second, up, down), strict=True)
        }
    )


_QKV, _OUT, _UP, _DOWN = (f"{name}.weight" for name in _CORE)
_OLD_QKV, _OLD_OUT, _OLD_UP, _OLD_DOWN = (f"{name}.weight" for name in _OLD)
BLOCKS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        TE: _block(
            "self_attention.linear_qkv.layer_norm_weight",
            _QKV,
            _OUT,
            "mlp.linear_fc1.layer_norm_weight",
            _UP,
            _DOWN,
        ),
        LOCAL: _block("input_layernorm.weight", _QKV, _OUT, "pre_mlp_layernorm.weight", _UP, _DOWN),
        LEGACY: _block(
            "input_layernorm.weight",
            _OLD_QKV,
            _OLD_OUT,
            "post_attention_layernorm.weight",
            _OLD_UP,
            _OLD_DOWN,
        ),
    }
)
"""Names of a block's weights: ours -> theirs, for each layout."""
EARLIER: Mapping[str, str] = MappingProxyType(
    {
        "input_norm.weight": "input_layernorm.weight",
        "post_attention_norm.weight": "post_attention_layernorm.weight",
        "attention.query_key_value.weight": "self_attn.qkv_proj.weight",
        "attention.dense.weight": "self_attn.o_proj.weight",
    }
)
"""Names of some versions -> ours."""
WHOLE_HEAD = "lm_head.weight"
"""Megatron-LLaMA's name (with --causal-lm) of a head that every tensor rank has all of."""
IGNORED = re.compile(r".*(_extra_state\d*|inv_freq)$")
"""Buffers that are computed, and states of fp8 scaling."""
_READ = MappingProxyType(
    {**EARLIER, **{theirs: own for names in BLOCKS.values() for own, theirs in names.items()}}
)
_LAYER = re.compile(r"(?:language_model\.(?:encoder|transformer)|decoder)\.layers\.(\d+)\.(.+)")
_FINAL = re.compile(
    r"(?:language_model\.(?:encoder|transformer)|decoder)\.final_(?:layer)?norm\.weight"
)
_EMBEDDING = re.compile(r"(?:language_model\.)?embedding\.word_embeddings\.weight")
_HEAD = re.compile(
    r"(?:(?:language_model\.)?output_layer|lm_head|word_embeddings_for_head)\.weight"
)


def own_name(theirs: str) -> str | None:
    """``decoder.layers.0.mlp.linear_fc2.weight`` -> ``model.layers.0.mlp.down_proj.weight``, for
    every layout; None: unknown."""
    for pattern, name in ((_EMBEDDING, EMBEDDING), (_FINAL, NORM), (_HEAD, HEAD)):
        if pattern.fullmatch(theirs):
            return name
    match = _LAYER.fullmatch(theirs)
    return f"model.layers.{match[1]}.{_READ[match[2]]}" if match and match[2] in _READ else None


def their_name(own: str, layout: str, family: str, *, tied: bool) -> str:
    """The other way round. A tied head on a stage of its own has a name of its own under the legacy
    layout."""
    old = layout == LEGACY
    if own == HEAD and tied and old:
        return "word_embeddings_for_head.weight"
    if own == EMBEDDING:
        return ("language_model." if old else "") + "embedding.word_embeddings.weight"
    root = "language_model.encoder" if old else "decoder"
    if own == NORM:
        return f"{root}.final_layernorm.weight"
    if own == HEAD:
        return (
            WHOLE_HEAD
            if family == "megatron-llama"
            else ("language_model." if old else "") + "output_layer.weight"
        )
    _, _, layer, name = own.split(".", 3)
    return f"{root}.layers.{layer}.{BLOCKS[layout][name]}"


def local_parts(
    model: ModelConfig,
    family: str,
    partition: Partition,
    stage: int,
    *,
    tp: int,
    tp_rank: int,
    whole_head: bool,
) -> dict[str, Part]:
    """The tensors of one file by their own names, blocks counted from 0 within the stage.

    A tied head on another stage than the embedding is there as a copy. ``whole_head``: every rank
    has all of the head."""
    first = partition.layers[stage].start
    found = {}
    for unit in stage_units(model, partition, stage, tp=tp, tp_rank=tp_rank):
        for spec in unit.params:
            name = re.sub(
                r"^model\.layers\.(\d+)",
                lambda match: f"model.layers.{int(match[1]) - first}",
                spec.name,
            )
            if spec.name.endswith("qkv_proj.weight") and family == "megatron":
                found[name] = _by_group(spec, model)
            else:
                found[name] = _whole(model, tp) if whole_head and name == HEAD else Part.of(spec)
    return found


def _whole(model: ModelConfig, tp: int) -> Part:
    """The head of Megatron-LLaMA: not split, but padded as if it were."""
    shape = (model.vocab_size, model.hidden_size)
    return Part(
        (padded_vocab_size(model, tp), model.hidden_size),
        (HFSlice(HEAD, shape, 0, model.vocab_size),),
    )


def _by_group(spec: ParamSpec, model: ModelConfig) -> Part:
    """q, k, v stacked -> for each key/value head its queries, its key, its value."""
    groups = spec.slices[1].rows // model.head_dim
    row = 0
    slices = []
    for group in range(groups):
        for each in spec.slices:
            rows = each.rows // groups
            slices.append(replace(each, row=row, rows=rows, hf_row=each.hf_row + group * rows))
            row += rows
    return Part(spec.shape, tuple(slices))


def flat(content: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested dicts as dotted names."""
    for name, value in content.items() if isinstance(content, dict) else ():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        elif isinstance(value, Tensor):
            yield f"{prefix}{name}", value


def find_folder(path: Path) -> Path:
    """``release`` or ``iter_NNNNNNN``: itself, or the one that the tracker beside it names. Raises
    CheckpointError."""
    if any(path.glob("mp_rank_*")):
        return path
    tracker = path / TRACKER
    do = f"give the folder itself: {path}/iter_NNNNNNN or {path}/release"
    try:
        named = tracker.read_text().strip()
    except (OSError, ValueError) as error:
        raise CheckpointError(
            tracker, got=f"no readable file ({error})", expected="an iteration", do=do
        ) from error
    folder = path / (f"iter_{int(named):07d}" if named.isdecimal() else named)
    if not re.fullmatch(r"release|\d+", named) or not any(folder.glob("mp_rank_*")):
        raise CheckpointError(
            tracker, got=named[:40], expected="an iteration with an mp_rank_* folder", do=do
        )
    return folder
