"""The place of experts in a block."""

from __future__ import annotations

from dataclasses import replace

import pytest
from megatron_llama.errors import ConfigError
from megatron_llama.model.llama import MLP, Attention, Block
from megatron_llama.model.nn.moe.block import MoE, blocks_of
from megatron_llama.model.presets import PRESETS

MODEL = replace(PRESETS["qwen3-30b-a3b"], mlp_only_layers=(1,))


class OwnAttention(Attention):
    pass


class ChangedAttention(Block):
    attention_class = OwnAttention


class OwnMLP(MLP):
    pass


class ChangedMLP(Block):
    mlp_class = OwnMLP


def test_a_changed_block_gets_experts_and_keeps_its_change() -> None:
    blocks = blocks_of(MODEL, range(3), ChangedAttention)
    assert [block.mlp_class for block in blocks] == [MoE, MLP, MoE]
    assert all(block.attention_class is OwnAttention for block in blocks)


def test_experts_do_not_replace_an_mlp_of_ones_own() -> None:
    with pytest.raises(ConfigError, match="--num-experts: got 128 with a block whose MLP is OwnMLP"):
        blocks_of(MODEL, range(3), ChangedMLP)
