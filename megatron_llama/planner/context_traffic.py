"""The messages of attention between context-parallel ranks, counted as a run sends them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from megatron_llama.config.schema import Config, ModelConfig
from megatron_llama.engine.plan.head_exchange import exchanged_heads, sent_key_heads
from megatron_llama.model.plan.itemsize import compute_itemsize
from megatron_llama.model.plan.params import kv_copies
from megatron_llama.model.plan.zigzag import tails
from megatron_llama.model.windows import layer_windows, window_of


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


def context_tokens(window: int, length: int, size: int, rank: int) -> tuple[int, int]:
    """Return the numbers of tokens whose keys and values a context-parallel rank sends in one
    layer, counted once for each receiving rank, and receives. ``window`` 0: all of a sequence of
    ``length``. Gradients go the other way."""
    if not 0 < window < length:
        others = (size - 1) * (length // size)
        return others, others
    chunk = length // (2 * size)
    peers = [peer for peer in range(size) if peer != rank]
    sent = [tail.tokens for peer in peers for tail in tails(rank, peer, size, chunk, window)]
    received = [tail.tokens for peer in peers for tail in tails(peer, rank, size, chunk, window)]
    return sum(sent), sum(received)


@cache
def _most_tokens(window: int, length: int, size: int) -> tuple[int, int]:
    """Return both numbers of ``context_tokens``, each the largest of all ranks."""
    sent, received = zip(
        *(context_tokens(window, length, size, rank) for rank in range(size)), strict=True
    )
    return max(sent), max(received)


def context_shares(model: ModelConfig, length: int, size: int) -> tuple[float, float]:
    """Return the keys and values that leave a context-parallel rank in all layers, and their
    gradients, each as a share of the same without windows, the largest of all ranks."""
    if size == 1 or not model.sliding_window:
        return 1.0, 1.0
    most = [_most_tokens(window, length, size) for window in layer_windows(model)]
    whole = len(most) * (size - 1) * (length // size)
    return sum(sent for sent, _ in most) / whole, sum(back for _, back in most) / whole


def window_messages(rank: int, size: int, length: int, window: int) -> tuple[int, int]:
    """Return how many messages of keys and values a rank sends in one layer, and how many tokens
    they have together. Their gradients come back in as many."""
    messages = [
        tails(rank, target, size, length, window) for target in range(size) if target != rank
    ]
    sent = [tail.tokens for message in messages for tail in message]
    return sum(bool(message) for message in messages), sum(sent)
