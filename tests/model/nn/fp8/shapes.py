"""The sizes of what a block multiplies by."""

from __future__ import annotations

from megatron_llama.config.schema import ModelConfig


def weights_of(model: ModelConfig, tp: int) -> list[tuple[int, int]]:
    """A rank's weights [n, k] of a block: qkv, o, gate and up, down."""
    hidden, inner, head = model.hidden_size, model.intermediate_size // tp, model.head_dim
    heads, pairs = model.num_attention_heads // tp, model.num_key_value_heads // tp
    return [((heads + 2 * pairs) * head, hidden), (hidden, heads * head), (2 * inner, hidden), (hidden, inner)]
