"""Codes and scales, to the bit, against the definition in fp64 and against what is independent of the rest of a tensor."""

from __future__ import annotations

import pytest
import torch
from megatron_llama.model.nn.fp8.codes import Blocks, Tiles, blocks, both_orders, decoded, tiles, transposed
from torch import Tensor

from tests.model.nn.fp8 import published
from tests.model.nn.fp8.numbers import hard_tiles, normal

EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def bits(codes: Tensor) -> Tensor:
    """Bytes of codes; of NaN without its sign, which nothing reads."""
    found = codes.view(torch.uint8)
    return torch.where(found == 255, 127, found)


def same(left: Tiles | Blocks, right: Tiles | Blocks) -> bool:
    """To the bit."""
    return torch.equal(bits(left.codes), bits(right.codes)) and torch.equal(left.scales, right.scales)


def by_definition(tile: Tensor) -> tuple[Tensor, float]:
    """Bytes and the scale of numbers that have one."""
    scale = published.scale(float(tile.abs().max()))
    return torch.tensor([published.code(value, scale) for value in tile.tolist()], dtype=torch.uint8), scale


@EACH_DTYPE
def test_tiles_are_those_of_the_definition(dtype: torch.dtype) -> None:
    given = torch.cat([hard_tiles(dtype), normal(300, 128, seed=2, dtype=dtype)])
    found = tiles(given)
    for row, tile in enumerate(given.double()):
        codes, scale = by_definition(tile)
        assert float(found.scales[row]) == scale, row
        assert torch.equal(bits(found.codes[row]), codes), row


@EACH_DTYPE
def test_blocks_are_those_of_the_definition(dtype: torch.dtype) -> None:
    hard = hard_tiles(dtype)
    columns = [normal(128, 128, seed=seed, dtype=dtype) for seed in range(len(hard))]
    for seed, (block, tile) in enumerate(zip(columns, hard, strict=True)):
        block[:] = (tile.float() * normal(128, 1, seed=seed, dtype=torch.float32).sign()).to(dtype)
    weight = torch.cat([torch.cat(columns[:30], 1), torch.cat(columns[-30:], 1)])
    found = blocks(weight)
    assert found.scales.shape == (2, 30)
    for row in range(2):
        for column in range(30):
            place = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            codes, scale = by_definition(weight[place].double().flatten())
            assert float(found.scales[row, column]) == scale
            assert torch.equal(bits(found.codes[place]).flatten(), codes)


def test_shapes() -> None:
    """Leading dims stay; what is no multiple of 128 is refused, as no GPU multiplies it."""
    found = tiles(normal(3, 2, 384, seed=1))
    assert found.codes.shape == (3, 2, 384) and found.codes.dtype is torch.float8_e4m3fn and found.codes.is_contiguous()
    assert found.scales.shape == (3, 2, 3) and found.scales.dtype is torch.float32
    assert decoded(found).shape == (3, 2, 384) and decoded(found).dtype is torch.float32
    assert tiles(normal(0, 2, 256, seed=1)).scales.shape == (0, 2, 2)
    weight = blocks(normal(256, 384, seed=1))
    assert weight.codes.shape == (256, 384) and weight.scales.shape == (2, 3) and decoded(weight).shape == (256, 384)
    for refused in (lambda: tiles(torch.zeros(3, 130)), lambda: blocks(torch.zeros(130, 128)), lambda: blocks(torch.zeros(128, 130))):
        with pytest.raises(RuntimeError, match="unflatten"):
            refused()


def test_a_layout_that_cuts_between_tiles_changes_nothing() -> None:
    """Parts of the sequence, of the columns and of the rows of a weight."""
    x, weight = normal(8, 2, 512, seed=1), normal(384, 512, seed=2)
    whole, parts = tiles(x), [tiles(x[start : start + 4, :, column : column + 256]) for start in (0, 4) for column in (0, 256)]
    assert torch.equal(bits(whole.codes[4:, :, :256]), bits(parts[2].codes)) and torch.equal(whole.scales[4:, :, :2], parts[2].scales)
    assert torch.equal(bits(whole.codes[:4, :, 256:]), bits(parts[1].codes)) and torch.equal(whole.scales[:4, :, 2:], parts[1].scales)
    block = blocks(weight[128:, 256:])
    assert torch.equal(bits(blocks(weight).codes[128:, 256:]), bits(block.codes)) and torch.equal(blocks(weight).scales[1:, 2:], block.scales)
    assert same(tiles(x.transpose(0, 1)), Tiles(whole.codes.transpose(0, 1), whole.scales.transpose(0, 1)))


def test_decoded_numbers_are_near_and_have_codes() -> None:
    """Off by at most half a step of e4m3, of its subnormals where a number is far below the largest; their own codes lose nothing."""
    for made, given, per_tile in ((tiles, normal(64, 256, seed=3), True), (blocks, normal(256, 384, seed=4), False)):
        numbers = decoded(made(given))
        assert torch.equal(decoded(made(numbers)), numbers)
        wide = given.double().abs()
        largest = torch.unflatten(wide, -1, (-1, 128)).amax(-1).repeat_interleave(128, -1) if per_tile else wide.max()
        assert ((numbers.double() - given.double()).abs() <= torch.maximum(wide / 16, largest * 2.0**-17)).all()


def test_both_orders_of_a_weight_are_those_of_its_transposed() -> None:
    """Quantized from the weight for each direction: blocks are square."""
    weight = normal(256, 384, seed=5)
    forward, backward = both_orders(weight)
    assert same(forward, blocks(weight)) and same(backward, blocks(weight.t())) and same(backward, transposed(forward))
    assert backward.codes.is_contiguous() and backward.scales.is_contiguous()
