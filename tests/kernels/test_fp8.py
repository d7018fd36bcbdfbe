"""Codes and scales by Triton, to the bit those of torch's operators on a CPU."""

from __future__ import annotations

import pytest
import torch
from megatron_llama.model.nn.fp8 import codes, ops, tensorwise
from torch import Tensor

from tests.model.nn.fp8.numbers import hard_tiles, normal

pytestmark = pytest.mark.kernels
EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    """NaN has no sign that anybody reads."""
    left, right = (values[0].cpu().view(torch.uint8) for values in (found, expected))
    numbers = torch.equal(left.where(left != 255, 127), right.where(right != 255, 127))
    return numbers and torch.equal(found[1].cpu(), expected[1].cpu())


@EACH_DTYPE
def test_tiles_of_hard_numbers(dtype: torch.dtype, device: torch.device) -> None:
    from megatron_llama.model.nn.fp8 import kernels

    assert same(kernels.tiles(hard_tiles(dtype).to(device)), ops.tiles(hard_tiles(dtype)))


@EACH_DTYPE
@pytest.mark.parametrize("shape", [(1, 1, 128), (33, 1, 256), (7, 5, 640)], ids=str)
def test_tiles(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Rows, parts of rows, and rows in another order; scales lie as products take them."""
    x = normal(*shape, seed=1, dtype=dtype)
    for given in (x, torch.cat([x, x], -1)[..., : x.shape[-1]], x.transpose(0, 1), x.movedim(-1, 0).contiguous().movedim(0, -1)):
        found = codes.tiles(given.to(device))
        assert same(found, ops.tiles(given)) and found.codes.is_contiguous()
        scales = found.scales.flatten(0, -2)
        assert scales.data_ptr() == found.scales.data_ptr() and scales.t().is_contiguous()


def test_tiles_of_nothing(device: torch.device) -> None:
    found = codes.tiles(torch.empty(0, 2, 256, dtype=torch.bfloat16, device=device))
    assert found.codes.shape == (0, 2, 256) and found.scales.shape == (0, 2, 2)


def test_parts_of_tiles_are_refused(device: torch.device) -> None:
    for made, shape in ((codes.tiles, (3, 130)), (codes.blocks, (128, 130)), (codes.both_orders, (130, 128))):
        with pytest.raises(RuntimeError, match="unflatten"):
            made(torch.zeros(shape, device=device))


@EACH_DTYPE
@pytest.mark.parametrize("shape", [(128, 128), (384, 256)], ids=str)
def test_blocks(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    """In both orders, and of a weight that is a view."""
    weight = normal(*shape, seed=1, dtype=dtype)
    weight[5, :64] = hard_tiles(dtype)[-1, :64]
    for given in (weight, weight.roll(1, 0), weight.t().contiguous().t()):
        forward, backward = codes.both_orders(given.to(device))
        assert same(forward, ops.blocks(given)) and same(backward, ops.blocks(given.t())) and same(codes.blocks(given.to(device)), forward)
        assert backward.codes.is_contiguous() and backward.scales.is_contiguous()


@EACH_DTYPE
def test_blocks_of_hard_numbers(dtype: torch.dtype, device: torch.device) -> None:
    """Each of these tiles decides the scale of a block, from its last row; in both orders."""
    weight = normal(128, 128, seed=1, dtype=torch.float32).mul(1e-9).to(dtype)
    for tile in hard_tiles(dtype):
        weight[-1] = tile
        forward, backward = codes.both_orders(weight.to(device))
        assert same(forward, ops.blocks(weight)) and same(backward, ops.blocks(weight.t()))


@EACH_DTYPE
@pytest.mark.parametrize("code", [tensorwise.NUMBERS, tensorwise.GRADIENTS], ids=str)
def test_codes_of_a_whole_tensor(dtype: torch.dtype, code: torch.dtype, device: torch.device) -> None:
    """Of tensors that fill several programs and a part of one, and where the factor takes numbers beyond the largest code."""
    from megatron_llama.model.nn.fp8 import kernels

    reach = torch.finfo(code).max
    for x in (*hard_tiles(dtype), normal(3, 3001, seed=1, dtype=dtype).t(), torch.empty(0, 128, dtype=dtype)):
        for factor in (torch.tensor(1.0), torch.tensor(0.3), torch.tensor(3e4)):
            found = kernels.scaled(x.to(device), factor.to(device), code)
            expected = (x.float() * factor).clamp(-reach, reach).to(code)
            assert found.shape == x.shape and found.is_contiguous()
            assert torch.equal(found.cpu().float().nan_to_num(nan=1e9), expected.float().nan_to_num(nan=1e9))


@pytest.mark.parametrize("code", [tensorwise.NUMBERS, tensorwise.GRADIENTS], ids=str)
@pytest.mark.parametrize("shape", [(128, 384), (16, 272), (400, 16)], ids=str)
def test_codes_of_the_transposed_weight(shape: tuple[int, int], code: torch.dtype, device: torch.device) -> None:
    """Of whole squares and parts of them, and of every code."""
    every = torch.arange(shape[0] * shape[1]).remainder(251).to(torch.uint8).view(shape).view(code)
    found = tensorwise.transposed(tensorwise.Codes(every.to(device), torch.ones((), device=device))).codes
    assert found.dtype is code and found.is_contiguous() and torch.equal(found.cpu().view(torch.uint8), every.view(torch.uint8).t())
