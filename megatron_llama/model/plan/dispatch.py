"""The messages by which tokens travel to their experts and back, counted."""

from __future__ import annotations

from megatron_llama.config.schema import Config
from megatron_llama.model.plan.itemsize import compute_itemsize
from megatron_llama.model.plan.tensor_messages import BlockMessages


def dispatch_messages(config: Config) -> BlockMessages:
    """Count the messages over ep of one block with experts and one microbatch, without
    recomputation of whole blocks, all of whose weights are trained: forward tokens, the table of
    their experts with weights, and outputs; backward gradients of outputs, tokens again, gradients
    of tokens and of weights. ``config`` is resolved."""
    parallel = config.parallel
    training = config.training
    ep = parallel.expert_model_parallel_size
    if ep == 1:
        return BlockMessages(0, 0, 0, 0, 0)
    itemsize = compute_itemsize(config)
    spread = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    length = training.seq_length // parallel.context_parallel_size // spread
    tokens = ep * length * training.micro_batch_size
    stream = tokens * config.model.hidden_size * itemsize
    weights = tokens * config.model.num_experts_per_tok * max(itemsize, 4)
    # An expert travels as a number of the width of its weight.
    return BlockMessages(3, 2 * stream + 2 * weights, 4, 3 * stream + weights, 0)
