"""The losses of routers by their names, and what they cost."""

from __future__ import annotations

from megatron_llama.config.schema import Config

NONE = "none"
SEQUENCE = "seq_aux_loss"
HUGGINGFACE = "hf_aux_loss"
"""Values of --moe-router-load-balancing-type with a rule of their own."""
COUNT_BYTES = 4
"""The number of tokens of an expert in a message."""


def count_bytes(config: Config) -> int:
    """Return the bytes of the message of a block that counts the tokens of each sequence, for each
    microbatch and each axis that splits sequences; 0 without such messages."""
    training = config.training
    if training.moe_router_load_balancing_type != SEQUENCE:
        return 0
    return training.micro_batch_size * config.model.num_experts * COUNT_BYTES
