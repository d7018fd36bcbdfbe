"""Names and tensors in checkpoints of Megatron-LM and Megatron-LLaMA:
``mp_rank_TT[_PPP]/model_optim_rng.pt`` in ``iter_NNNNNNN`` or ``release``.

Both hold tensor-parallel pieces with fused q, k, v and fused gate and up projections. They differ
in the order of q, k, v: Megatron-LM interleaves by key/value head (its queries, its key, its
value), Megatron-LLaMA stacks all queries, keys, values of a rank. If neither the names nor the
arguments in a file tell the program, the user has to name it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any

from torch import Tensor

from megatron_llama.config.schema import ModelConfig
from megatron_llama.converter.tensor_map import TensorMap
from megatron_llama.engine.plan.specs import HFSlice, ParamSpec
from megatron_llama.model.plan.params import Partition, padded_vocab_size, stage_units

FILE = "model_optim_rng.pt"
CHECKPOINT_VERSION = 3.0
TE = "transformer_engine"
LOCAL = "local"
LEGACY = "legacy"
LAYOUTS = (TE, LOCAL, LEGACY)
TP_SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
"""Sizes that have to be divisible by the number of tensor ranks."""
EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"

_OWN = (
    "input_layernorm.weight",
    "self_attn.qkv_proj.weight",
    "self_attn.o_proj.weight",
    "post_attention_layernorm.weight",
    "mlp.gate_up_proj.weight",
    "mlp.down_proj.weight",
)
_THEIRS = (
    (
        TE,
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight",
        "mlp.linear_fc1.layer_norm_weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    ),
    (
        LOCAL,
        "input_layernorm.weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight",
        "pre_mlp_layernorm.weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    ),
    (
        LEGACY,
        "input_layernorm.weight",
        "self_attention.query_key_value.weight",
        "self_attention.dense.weight",
        "post_attention_layernorm.weight",
        "mlp.dense_h_to_4h.weight",
        "mlp.dense_4h_to_h.weight",
    ),
)
_CORE_ALONE: Mapping[str, str] = MappingProxyType(
    {
        "self_attn.qkv_proj.bias": "self_attention.linear_qkv.bias",
        "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
        "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
        "self_attn.o_proj.bias": "self_attention.linear_proj.bias",
        "mlp.gate_up_proj.bias": "mlp.linear_fc1.bias",
        "mlp.down_proj.bias": "mlp.linear_fc2.bias",
    }
)
"""Weights that LLaMA does not have, and Megatron-LM's present models may: ours -> theirs."""
BLOCKS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        layout: MappingProxyType(
            {**dict(zip(_OWN, names, strict=True)), **({} if layout == LEGACY else _CORE_ALONE)}
        )
        for layout, *names in _THEIRS
    }
)
"""Names of a block's weights, for each layout: ours -> theirs."""
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
"""Megatron-LLaMA's name (with --causal-lm) of a head that is whole on every tensor rank."""
IGNORED = re.compile(r".*(_extra_state\d{0,9}|inv_freq)$")
"""Buffers that are computed, and states of fp8 scaling."""
_READ = MappingProxyType(
    {**EARLIER, **{theirs: own for names in BLOCKS.values() for own, theirs in names.items()}}
)
_LAYER = re.compile(r"(?:language_model\.(?:encoder|transformer)|decoder)\.layers\.(\d{1,9})\.(.+)")
_FINAL = re.compile(
    r"(?:language_model\.(?:encoder|transformer)|decoder)\.final_(?:layer)?norm\.weight"
)
_EMBEDDING = re.compile(r"(?:language_model\.)?embedding\.word_embeddings\.weight")
_HEAD = re.compile(
    r"(?:(?:language_model\.)?output_layer|lm_head|word_embeddings_for_head)\.weight"
)


def own_name(theirs: str) -> str | None:
    """Return our name of a tensor, whatever the layout: ``decoder.layers.0.mlp.linear_fc2.weight``
    is ``model.layers.0.mlp.down_proj.weight``. None for an unknown name."""
    for pattern, name in ((_EMBEDDING, EMBEDDING), (_FINAL, NORM), (_HEAD, HEAD)):
        if pattern.fullmatch(theirs):
            return name
    match = _LAYER.fullmatch(theirs)
    return f"model.layers.{match[1]}.{_READ[match[2]]}" if match and match[2] in _READ else None


def their_name(own: str, layout: str, family: str, *, tied: bool) -> str:
    """Return the name in the family's files. A tied head on another stage than the embedding has a
    name of its own under the legacy layout."""
    old = layout == LEGACY
    if own == HEAD and tied and old:
        return "word_embeddings_for_head.weight"
    if own == EMBEDDING:
        return ("language_model." if old else "") + "embedding.word_embeddings.weight"
    root = "language_model.encoder" if old else "decoder"
    if own == NORM:
        return f"{root}.final_layernorm.weight"
    if own == HEAD and family == "megatron-llama":
        return WHOLE_HEAD
    if own == HEAD:
        return ("language_model." if old else "") + "output_layer.weight"
    _, _, layer, name = own.split(".", 3)
    return f"{root}.layers.{layer}.{BLOCKS[layout][name]}"


def file_tensors(
    model: ModelConfig,
    family: str,
    partition: Partition,
    stage: int,
    *,
    tp: int,
    tp_rank: int,
    whole_head: bool,
) -> dict[str, TensorMap]:
    """Return the tensors of one file by our names, blocks counted from 0 within the stage.

    A tied head on another stage than the embedding is included as a copy. With ``whole_head`` every
    rank has the whole head, as in Megatron-LLaMA."""
    first = partition.layers[stage].start
    maps = {}
    for unit in stage_units(model, partition, stage, tp=tp, tp_rank=tp_rank):
        for spec in unit.params:
            name = spec.name
            if name.startswith("model.layers."):
                _, _, layer, leaf = name.split(".", 3)
                name = f"model.layers.{int(layer) - first}.{leaf}"
            if ".qkv_proj." in name and family == "megatron":
                maps[name] = _by_group(spec, model)
            elif name == HEAD and whole_head:
                # Not split, but padded as if it were.
                size = (model.vocab_size, model.hidden_size)
                stored = (padded_vocab_size(model, tp), model.hidden_size)
                maps[name] = TensorMap(stored, (HFSlice(HEAD, size, 0, model.vocab_size),))
            else:
                maps[name] = TensorMap.of(spec)
    return maps


def _by_group(spec: ParamSpec, model: ModelConfig) -> TensorMap:
    """Return Megatron-LM's order: for each key/value head its queries, its key, its value."""
    groups = spec.slices[1].rows // model.head_dim
    row = 0
    slices = []
    for group in range(groups):
        for piece in spec.slices:
            rows = piece.rows // groups
            slices.append(replace(piece, row=row, rows=rows, hf_row=piece.hf_row + group * rows))
            row += rows
    return TensorMap(spec.shape, tuple(slices))


def partition_of(counts: Sequence[int], pp: int) -> Partition:
    """Return stages with these numbers of blocks, which the ``pp`` ranks hold in turn."""
    stops = list(accumulate(counts))
    layers = tuple(range(stop - count, stop) for stop, count in zip(stops, counts, strict=True))
    return Partition(layers, tuple(index % pp for index in range(len(counts))))


def flat(content: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors of nested dicts by dotted names."""
    for name, value in content.items() if isinstance(content, dict) else ():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        elif isinstance(value, Tensor):
            yield f"{prefix}{name}", value
