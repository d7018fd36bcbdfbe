"""The messages of attention between context-parallel ranks, counted as a run sends them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_llama.config.schema import Config
from megatron_llama.engine.plan.head_exchange import exchanged_heads, sent_key_heads
from megatron_llama.model.plan.itemsize import compute_itemsize
from megatron_llama.model.plan.params import kv_copies
from megatron_llama.model.plan.windows import context_tokens
from megatron_llama.model.windows import window_of


@dataclass(frozen=True)
class ContextTraffic:
    """Bytes that leave a context-parallel rank for one microbatch and some blocks."""

    passes: int
    """In each forward pass, and as many again in backward: keys and values; with an exchange of the
    sequence for heads also queries and outputs, or all their gradients."""
    gradients: int
    """In backward besides: gradients of keys and values that travel, in at least fp32."""


def context_traffic(config: Config, layers: Sequence[int], *, rank: int) -> ContextTraffic:
    """Count the bytes that ``rank`` of the context-parallel ranks sends in these layers, with
    windows or without. A recomputed block sends those of a forward pass once more."""
    model = config.model
    training = config.training
    size = config.parallel.context_parallel_size
    tp = config.parallel.tensor_model_parallel_size
    queries = model.num_attention_heads // tp
    keys = model.num_key_value_heads * kv_copies(model, tp) // tp
    itemsize = compute_itemsize(config)
    width = training.micro_batch_size * model.head_dim
    exchanged = 0
    if heads := config.parallel.head_ranks:
        # Queries, keys and values one way, outputs the other.
        sent = exchanged_heads(queries, keys, heads) + queries
        exchanged = training.seq_length // size * sent // heads * (heads - 1) * width * itemsize
        keys = len(sent_key_heads(queries, keys, heads)) // heads
        size, rank = size // heads, rank // heads
    elements = 2 * keys * width
    counts = [
        context_tokens(window_of(model, layer), training.seq_length, size, rank) for layer in layers
    ]
    return ContextTraffic(
        passes=len(layers) * exchanged + elements * itemsize * sum(sent for sent, _ in counts),
        gradients=elements * max(4, itemsize) * sum(received for _, received in counts),
    )
