"""Initial weights are a function of seed, tensor name and position: no layout changes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron_llama.config.schema import Config
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.model.init import BLOCK_ELEMENTS, InitialWeights, WithAdapters
from megatron_llama.model.plan.lora import LORA_A, LORA_B

from tests.parallel.cases import MODEL
from tests.torch_twin import drawn


def test_low_rank_additions_of_a_shard_are_a_cut_of_the_whole() -> None:
    source = WithAdapters(InitialWeights(1, 0.02), seed=7)
    half_a, half_b = (f"model.layers.0.mlp.down_proj.{half}.weight" for half in (LORA_A, LORA_B))
    whole = drawn(source, half_a, (4, 160))
    for first, count in ((0, 80), (80, 80), (33, 1)):
        out = torch.empty(4, count)
        source(Rectangle(half_a, (4, 160), (0, first), (4, count), 0), out)
        assert torch.equal(out, whole[:, first : first + count])
    assert whole.any() and not drawn(source, half_b, (64, 4)).any()
    assert torch.equal(drawn(source, "w", (8, 8)), drawn(InitialWeights(1, 0.02), "w", (8, 8)))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_any_rectangle_is_a_cut_of_the_whole(device: str) -> None:
    """Also across the blocks in which the numbers are drawn, the last of which is short. The CPU draws where nothing else is named."""
    source, columns = InitialWeights(7, 0.02, torch.device(device)), 3000
    rows = 2 * (BLOCK_ELEMENTS // columns) + 11
    full = drawn(source, "w", (rows, columns))
    assert abs(float(full.std()) / 0.02 - 1) < 5e-3 and abs(float(full.mean())) < 1e-4 and float(full.abs().max()) > 4 * 0.02
    assert torch.equal(full, drawn(InitialWeights(7, 0.02), "w", (rows, columns))) is (device == "cpu")
    edge = BLOCK_ELEMENTS // columns
    assert not torch.equal(full[:50], full[edge : edge + 50]), "neighbouring blocks are drawn from generators of their own"
    for offset, size in (((0, 0), (1, 5)), ((edge - 1, 17), (2, 900)), ((edge, 0), (edge + 11, columns)), ((3, 2999), (rows - 3, 1))):
        out = torch.empty(size)
        source(Rectangle("w", (rows, columns), offset, size, 0), out)
        assert torch.equal(out, full[offset[0] : offset[0] + size[0], offset[1] : offset[1] + size[1]])


def test_seed_name_and_norms() -> None:
    one = drawn(InitialWeights(1, 0.02), "a", (8, 8))
    assert torch.equal(one, drawn(InitialWeights(1, 0.02), "a", (8, 8)))
    assert not torch.equal(one, drawn(InitialWeights(2, 0.02), "a", (8, 8)))
    assert not torch.equal(one, drawn(InitialWeights(1, 0.02), "b", (8, 8)))
    wide = torch.empty(8, 8, dtype=torch.float64)
    InitialWeights(1, 0.02)(Rectangle("a", (8, 8), (0, 0), (8, 8), 0), wide)
    assert torch.equal(wide, one.double())
    ones = torch.ones(MODEL.hidden_size)
    assert torch.equal(drawn(InitialWeights(1, 0.02), "norm.weight", (MODEL.hidden_size,)), ones)
    assert torch.equal(drawn(InitialWeights(1, 0.02), "q_proj.bias", (MODEL.hidden_size,)), 0 * ones)
    one_plus = InitialWeights.of(Config(model=replace(MODEL, apply_layernorm_1p=True)))
    assert torch.equal(drawn(one_plus, "norm.weight", (MODEL.hidden_size,)), 0 * ones)
    assert torch.equal(drawn(InitialWeights.of(Config(model=MODEL)), "norm.weight", (MODEL.hidden_size,)), ones)
