"""Experts in the spellings of HuggingFace's families."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron_llama.config.fields import shown
from megatron_llama.config.limits import LARGEST_EXPERTS, LARGEST_LAYERS
from megatron_llama.config.schema import ModelConfig
from megatron_llama.model.families.family import OwnFields
from megatron_llama.model.families.reader import COPY, ConfigReader

OLDER, NEWER = "num_experts", "num_local_experts"
"""The number of Qwen's experts: transformers 4 writes the first, transformers 5 the second."""
BALANCING: Mapping[str, tuple[Any, ...]] = MappingProxyType({"output_router_logits": (False,)})
"""transformers adds a loss that balances experts only where this is true. Then what trains such a
model is another sum, so it is refused. Its coefficient alone trains nothing."""
COEFFICIENT = "router_aux_loss_coef"


def _chosen(reader: ConfigReader, experts: int) -> int:
    """Return the experts of a token, at most as many as there are."""
    chosen = reader.size("num_experts_per_tok")
    if experts and chosen > experts:
        reader.problem("num_experts_per_tok", chosen, f"at most the {experts} experts", COPY)
    return chosen


def _read_mixtral(reader: ConfigReader, model: ModelConfig) -> dict[str, Any]:
    experts = reader.size(NEWER, high=LARGEST_EXPERTS)
    reader.number(COEFFICIENT, default=0.0)
    return {"num_experts": experts, "num_experts_per_tok": _chosen(reader, experts)}


def _write_mixtral(model: ModelConfig) -> Mapping[str, Any]:
    return {NEWER: model.num_experts, "num_experts_per_tok": model.num_experts_per_tok}


def _read_qwen(reader: ConfigReader, model: ModelConfig) -> dict[str, Any]:
    counts = [
        reader.size(name, high=LARGEST_EXPERTS) for name in (OLDER, NEWER) if name in reader.content
    ] or [reader.size(OLDER, high=LARGEST_EXPERTS)]
    if len({*counts}) > 1:
        expected = f"{OLDER} {counts[0]}, as in the same file"
        reader.problem(NEWER, counts[1], expected, "remove the wrong one")
    reader.number(COEFFICIENT, default=0.0)
    listed = reader.value("mlp_only_layers", None) or []
    layers = model.num_hidden_layers
    known = isinstance(listed, list) and len(listed) <= LARGEST_LAYERS
    if not known or not all(type(layer) is int and 0 <= layer < layers for layer in listed):
        expected = f"numbers of layers, from 0 to {layers - 1}"
        reader.problem("mlp_only_layers", shown(listed), expected, COPY)
        listed = []
    return {
        "num_experts": counts[0],
        "num_experts_per_tok": _chosen(reader, counts[0]),
        "moe_intermediate_size": reader.size("moe_intermediate_size"),
        "norm_topk_prob": reader.switch("norm_topk_prob"),
        "decoder_sparse_step": reader.size("decoder_sparse_step", default=1),
        "mlp_only_layers": tuple(listed),
    }


def _write_qwen(model: ModelConfig) -> Mapping[str, Any]:
    return {
        OLDER: model.num_experts,
        "num_experts_per_tok": model.num_experts_per_tok,
        "moe_intermediate_size": model.moe_intermediate_size,
        "norm_topk_prob": model.norm_topk_prob,
        "decoder_sparse_step": model.decoder_sparse_step,
        "mlp_only_layers": list(model.mlp_only_layers),
    }


_COUNTS = ("num_experts", "num_experts_per_tok")
EVERY_BLOCK = OwnFields(_COUNTS, _read_mixtral, _write_mixtral)
"""As in Mixtral: every block has experts, as wide as intermediate_size."""
SOME_BLOCKS = OwnFields((*_COUNTS, "moe_intermediate_size"), _read_qwen, _write_qwen)
"""As in Qwen3-MoE: experts have a width of their own, and blocks may be dense."""
