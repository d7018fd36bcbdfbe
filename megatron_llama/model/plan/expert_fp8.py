"""What ``--fp8`` means for blocks with experts: bytes of a rank, messages, and widths.

An expert's rows and its matrices are tensors of their own. With one scale a tensor the ranks along
tp and cp, each of which has rows of its own, agree on the largest magnitudes of the rows of all
experts in one message.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megatron_llama.config.schema import Config, ModelConfig
from megatron_llama.model.plan.activation_memory import Activations
from megatron_llama.model.plan.chunks import Granularity
from megatron_llama.model.plan.expert_memory import ExpertActivations
from megatron_llama.model.plan.experts import is_sparse
from megatron_llama.model.plan.fp8 import (
    SCALE_BYTES,
    TENSORWISE,
    ScaleMessages,
    dense_tile_bytes,
    fp8_layers,
    gathers_codes,
    tile_bytes,
)


def gradients_with_experts(
    config: Config, shape: Activations, recomputed: Granularity, layers: Iterable[int]
) -> int:
    """Return the most bytes of gradients in the backward pass of one of these blocks, all in FP8,
    codes and scales included. Those of attention, which are fewer, exist when what experts have
    kept is gone."""
    assert isinstance(shape, ExpertActivations)
    model = config.model
    sparse = [is_sparse(model, layer) for layer in layers]
    most = shape.sparse_gradients(recomputed, config.training.fp8) if any(sparse) else 0
    if all(sparse):
        return most
    codes = dense_tile_bytes(config, shape.tokens, model.intermediate_size)
    return max(most, shape.dense_gradients(recomputed) + codes)


def row_code_bytes(recipe: str, rows: int, columns: int) -> int:
    """Return the bytes of the codes and scales of experts' rows. With one scale a tensor each row
    has a copy of its own."""
    if recipe == TENSORWISE:
        return rows * (columns + SCALE_BYTES)
    return tile_bytes(rows, columns)


class SparseScales(NamedTuple):
    """The messages along an axis by which ranks agree on largest magnitudes, in a block with
    experts in FP8."""

    single: ScaleMessages
    """Each of ``SCALE_BYTES``: of attention and the shared expert."""
    experts: ScaleMessages
    """Each of ``SCALE_BYTES`` for each expert of the block. With selective recomputation backward
    has one more: the first product is computed again."""


def sparse_scale_messages(config: Config) -> dict[str, SparseScales]:
    """Count the messages over tp and over cp, by the name of the axis. All inputs have
    gradients."""
    parallel = config.parallel
    found: dict[str, SparseScales] = {}
    if config.training.fp8 != TENSORWISE:
        return found
    shared = 2 * bool(config.model.moe_shared_expert_intermediate_size)
    experts = ScaleMessages(2, 2 + (parallel.recompute_granularity == "selective"), 0)
    if parallel.tensor_model_parallel_size > 1:
        # Of attention the input of one layer is cut, the gradient of the other, and both weights;
        # of what is behind it all inputs and gradients, and no weight.
        attention = ScaleMessages(1 + gathers_codes(config), 1, 2)
        single = ScaleMessages(attention.forward + shared, attention.backward + shared, 2)
        found["tp"] = SparseScales(single, experts)
    if parallel.context_parallel_size > 1:
        found["cp"] = SparseScales(ScaleMessages(2 + shared, 2 + shared, 0), experts)
    return found


def widths_of_experts(model: ModelConfig) -> dict[str, int]:
    """Return the widths of the matrices of experts that are to be multiples, in words. They do not
    depend on the layout."""
    widths = {
        "intermediate size of an expert": model.moe_intermediate_size,
        "intermediate size of the shared expert": model.moe_shared_expert_intermediate_size,
    }
    return {name: width for name, width in widths.items() if width}


def active_elements(config: Config) -> int:
    """Return the elements of the matrices in FP8 that a token meets: of blocks with experts those
    of attention, of its experts and of the shared one."""
    model = config.model
    heads = 2 * model.num_attention_heads + 2 * model.num_key_value_heads
    of_experts = model.num_experts_per_tok * model.moe_intermediate_size
    of_experts += model.moe_shared_expert_intermediate_size
    return sum(
        model.hidden_size
        * (
            heads * model.head_dim
            + 3 * (of_experts if is_sparse(model, layer) else model.intermediate_size)
        )
        for layer in fp8_layers(config)
    )
