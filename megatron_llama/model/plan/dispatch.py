"""The messages by which tokens travel to their experts and back, counted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from megatron_llama.config.schema import Config
from megatron_llama.model.plan.itemsize import compute_itemsize
from megatron_llama.model.plan.tensor_messages import BlockMessages

COUNT_BYTES = 8
"""A number of tokens."""


@dataclass(frozen=True)
class Load:
    """What one rank of those that divide experts exchanges in a block, of one microbatch."""

    sent: int
    """Rows of tokens that it sends: one for each rank that has experts of a token, itself too."""
    received: int
    """Rows of tokens that come to it."""
    rows: int
    """Rows of its experts: one for each expert of each of these tokens."""


def tokens_of_a_rank(config: Config) -> int:
    """Return the tokens of a microbatch that one rank sends to experts."""
    parallel = config.parallel
    training = config.training
    spread = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    length = training.seq_length // parallel.context_parallel_size // spread
    return length * training.micro_batch_size


def equal_load(tokens: int, chosen: int, *, experts: int, ep: int) -> Load:
    """Return the load where each token is sent to ``chosen`` of the experts by chance, all alike:
    as many to each rank as are expected, in whole numbers."""
    # The chance that all experts of a token are elsewhere.
    none = math.comb(experts - experts // ep, chosen) / math.comb(experts, chosen)
    rows = ep * round(tokens * (1.0 - none))
    return Load(rows, rows, tokens * chosen)


def largest_load(tokens: int, chosen: int, *, experts: int, ep: int) -> Load:
    """Return the largest numbers that a rank may have: a token is sent to as many ranks as it has
    experts, and the tokens of all ranks come to this one, for all of its experts."""
    received = ep * tokens
    return Load(tokens * min(chosen, ep), received, received * min(chosen, experts // ep))


def load_of(config: Config, kind: Callable[..., Load] = equal_load) -> Load:
    """Return the load of a rank in a block of a resolved configuration: an equal one, or of another
    ``kind``."""
    model = config.model
    ep = config.parallel.expert_model_parallel_size
    tokens = tokens_of_a_rank(config)
    return kind(tokens, model.num_experts_per_tok, experts=model.num_experts, ep=ep)


def dispatch_messages(
    config: Config, load: Load | None = None, *, recomputed: bool = False
) -> BlockMessages:
    """Count the messages over ep of one block with experts and one microbatch, without
    recomputation of whole blocks, all of whose weights are trained. ``config`` is resolved.

    Where tokens are gathered: forward tokens, the table of their experts with weights, and outputs;
    backward gradients of outputs, tokens again, gradients of tokens and of weights. Where they are
    exchanged: forward counts of tokens and of rows, then the same; backward the same with
    ``recomputed``, else no tokens again. The bytes are then those that a rank with this ``load``
    sends, its rows to itself included; None: an equal load."""
    parallel = config.parallel
    ep = parallel.expert_model_parallel_size
    if ep == 1:
        return BlockMessages(0, 0, 0, 0, 0)
    itemsize = compute_itemsize(config)
    token = config.model.hidden_size * itemsize
    # An expert travels as a number of the width of its weight.
    weights = config.model.num_experts_per_tok * max(itemsize, 4)
    if not parallel.exchanges_tokens:
        tokens = ep * tokens_of_a_rank(config)
        return BlockMessages(
            3, tokens * (2 * token + 2 * weights), 4, tokens * (3 * token + weights), 0
        )
    load = load or load_of(config)
    counts = ep * 2 * COUNT_BYTES
    again = load.sent * token if recomputed else 0
    return BlockMessages(
        forward=4,
        forward_bytes=counts + load.sent * (token + 2 * weights) + load.received * token,
        backward=4 if recomputed else 3,
        backward_bytes=load.sent * token + again + load.received * (token + weights),
        piece_bytes=0,
    )
