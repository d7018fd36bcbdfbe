"""The losses of routers by their names, and what they cost."""

from __future__ import annotations

from megatron_llama.config.schema import Config

NONE = "none"
SEQUENCE = "seq_aux_loss"
HUGGINGFACE = "hf_aux_loss"
"""Values of --moe-router-load-balancing-type with a rule of their own."""
COUNT_BYTES = 4
"""The number of tokens of an expert in a message."""


def count_messages(config: Config) -> dict[str, int]:
    """Return the bytes of the message by which the ranks along an axis count the tokens of each
    sequence, by the name of the axis. A block with experts sends it in each forward pass of a
    microbatch, and once more where it is computed again; backward passes have none. ``config`` is
    resolved."""
    training = config.training
    parallel = config.parallel
    if training.moe_router_load_balancing_type != SEQUENCE:
        return {}
    size = training.micro_batch_size * config.model.num_experts * COUNT_BYTES
    sizes = {"tp": parallel.tensor_model_parallel_size, "cp": parallel.context_parallel_size}
    return {axis: size for axis, ranks in sizes.items() if ranks > 1}
