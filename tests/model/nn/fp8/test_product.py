"""Products of codes, against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron_llama.model.nn.fp8.codes import Blocks, Tiles, blocks, both_orders, decoded, tiles
from megatron_llama.model.nn.fp8.product import product
from megatron_llama.model.presets import PRESETS
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.model.nn.fp8.numbers import normal
from tests.model.nn.fp8.shapes import weights_of

PLACES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
SIZES = pytest.mark.parametrize(("m", "n", "k"), [(1, 128, 128), (3, 256, 384), (5, 128, 640), (70, 384, 2048)])


def in_units_of_rounding(found: Tensor, x: Tiles, weight: Blocks) -> float:
    """The largest error, in steps of bf16 at the exact value and what a sum of these terms loses: in fp32, or in a tensor core, which
    cuts every term off 13 bits behind the largest of some."""
    left, right = decoded(x).double(), decoded(weight).double()
    exact = left @ right.t()
    step = 2.0 ** (torch.frexp(exact).exponent - 8).double()
    lost = left.shape[-1] * 2.0**-24 if found.device.type == "cpu" else 2.0**-11
    return float(((found.double() - exact).abs() / (step + left.abs() @ right.t().abs() * lost)).max())


@PLACES
@SIZES
def test_products(m: int, n: int, k: int, device: str) -> None:
    """Of outputs, and of gradients of inputs."""
    x, (weight, back) = tiles(normal(m, 2, k, seed=1).to(device)), both_orders(normal(n, k, seed=2).to(device))
    found = product(x, weight)
    assert found.dtype is torch.bfloat16 and found.shape == (m, 2, n) and in_units_of_rounding(found, x, weight) <= 1
    grad = tiles(normal(m, 2, n, seed=3).to(device))
    found = product(grad, back)
    assert found.shape == (m, 2, k) and in_units_of_rounding(found, grad, back) <= 1


@PLACES
@pytest.mark.parametrize("fault", ["tile", "block"])
def test_a_scale_of_another_tile_is_far_outside(fault: str, device: str) -> None:
    x, weight = tiles(normal(5, 2, 384, seed=1).to(device)), blocks(normal(256, 384, seed=2).to(device))
    found = product(*((x._replace(scales=x.scales.roll(1, -1)), weight) if fault == "tile" else (x, weight._replace(scales=weight.scales.roll(1, 0)))))
    assert in_units_of_rounding(found, x, weight) > 10


@PLACES
def test_what_is_not_finite_stays_so(device: str) -> None:
    """Or the step would not be skipped."""
    for odd in (float("nan"), float("inf"), -float("inf")):
        x, weight = normal(4, 256, seed=1).to(device), normal(128, 256, seed=2).to(device)
        x[2, 130] = odd
        assert product(tiles(x), blocks(weight)).isnan().all(1).tolist() == [False, False, True, False]
        weight[7, 3] = odd
        assert product(tiles(x), blocks(weight)).isnan().all()


class Rows(TorchDispatchMode):
    """How many rows the scaled products get."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), names: Any = None) -> Any:
        if function is torch.ops.aten._scaled_mm_v2.default:
            self.found.append(len(args[0]))
        return function(*args, **names or {})


def test_a_gpu_gets_scales_whose_columns_are_aligned() -> None:
    """By 16 bytes, which cuBLAS asks for and torch without a GPU does not: rows are added, and taken off the product."""
    with FakeTensorMode(), Rows() as rows:
        weight = blocks(torch.empty(128, 256, dtype=torch.bfloat16, device="cuda"))
        for tokens in (1, 4, 7):
            assert product(tiles(torch.empty(tokens, 256, dtype=torch.bfloat16, device="cuda")), weight).shape == (tokens, 128)
    assert rows.found == [4, 4, 8]


@pytest.mark.few(3)
@pytest.mark.parametrize("model", ["llama3-8b", "llama3-70b", "llama3.1-405b"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_gpu_takes_the_products_of_a_model(model: str, tp: int) -> None:
    """Shapes, strides and where scales lie, as torch checks them without a GPU; whoever made the codes; forward and backward."""
    for n, k in weights_of(PRESETS[model], tp):
        with FakeTensorMode():
            forward, backward = both_orders(torch.empty(n, k, dtype=torch.bfloat16, device="cuda"))
            for tokens in (1, 6, 8192 // tp):
                x = tiles(torch.empty(tokens, 1, k, dtype=torch.bfloat16, device="cuda"))
                by_kernel = x._replace(scales=torch.empty(k // 128, tokens, 1, device="cuda").movedim(0, -1))
                for codes in (x, by_kernel):
                    out = product(codes, forward)
                    assert out.shape == (tokens, 1, n) and out.device.type == "cuda" and out.dtype is torch.bfloat16
                assert product(tiles(out), backward).shape == (tokens, 1, k)
