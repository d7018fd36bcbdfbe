"""Products of experts' rows by Triton, and a block of experts that a device computes without the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron_llama.engine.comm import device as devices
from megatron_llama.model.nn.moe import rows
from megatron_llama.model.nn.moe.experts import expert_mlp
from megatron_llama.model.nn.moe.routing import Router, route
from megatron_llama.model.nn.ops import PLAIN
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.closeness import DTYPES, draw, error
from tests.model.nn.handle import Handle
from tests.model.nn.moe.reference import Sizes

pytestmark = pytest.mark.kernels
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SHAPES = {
    "parts of tiles": ((70, 0, 5, 129, 0, 1), 72, 136),
    "whole tiles": ((64, 128), 128, 64),
    "none at the ends": ((0, 0, 3, 0), 24, 40),
    "one expert": ((9,), 8, 8),
    "odd widths": ((2, 3, 4), 7, 5),
    "no rows": ((0, 0, 0), 16, 8),
}
EACH_SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def grouped(sizes: tuple[int, ...], device: torch.device) -> rows.ExpertRows:
    """So many rows of each expert, whose number the host is not told."""
    experts = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    generator = torch.Generator().manual_seed(1)
    shuffled = experts[torch.randperm(len(experts), generator=generator)]
    groups = rows.sorted_rows(shuffled[:, None].to(device), len(sizes), torch.float32)
    assert groups.sizes is None and groups.ends.tolist() == torch.tensor(sizes).cumsum(0).tolist()
    return groups


def parts(sizes: tuple[int, ...]) -> list[slice]:
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


@EACH_SHAPE
@EACH_DTYPE
def test_products_of_rows(shape: tuple[tuple[int, ...], int, int], dtype: torch.dtype, device: torch.device) -> None:
    """By each expert's weight and by its transpose, as near to fp64 as one rounding."""
    sizes, width, depth = shape
    groups = grouped(sizes, device)
    x = draw(sum(sizes), depth, seed=1, device=device, dtype=dtype)
    grad = draw(sum(sizes), width, seed=2, device=device, dtype=dtype)
    weights = draw(len(sizes), width, depth, seed=3, device=device, dtype=dtype)
    for found, left, right in (
        (rows.linear(x, weights, groups), x, weights.mT),
        (rows.linear_backward(grad, weights, groups), grad, weights),
    ):
        expected = torch.cat([left[part].double() @ right[expert].double() for expert, part in enumerate(parts(sizes))])
        assert found.dtype is dtype
        assert not len(expected) or error(found, expected) <= max(torch.finfo(dtype).eps, 2e-6)


@pytest.mark.parametrize("beta", [0.0, 1.0])
@EACH_SHAPE
@EACH_DTYPE
def test_weight_gradients(shape: tuple[tuple[int, ...], int, int], dtype: torch.dtype, beta: float, device: torch.device) -> None:
    """In fp32 to the last place whatever the factors are, zeros for experts without rows; what is overwritten is not read."""
    sizes, width, depth = shape
    groups = grouped(sizes, device)
    grad = draw(sum(sizes), width, seed=2, device=device, dtype=dtype)
    x = draw(sum(sizes), depth, seed=1, device=device, dtype=dtype)
    view = torch.full((len(sizes), width, depth), torch.nan, device=device)
    if beta:
        view.copy_(draw(*view.shape, seed=4, device=device))
    before = view.double()
    rows.accumulate(view, beta, grad, x, groups)
    expected = torch.stack([grad[part].double().t() @ x[part].double() for part in parts(sizes)])
    expected = expected + before if beta else expected
    assert error(view, expected) <= 2e-6


@pytest.mark.parametrize("torchs", [False, True], ids=["Triton", "torch's grouped product"])
@EACH_DTYPE
def test_rows_of_experts_elsewhere_are_left_alone(dtype: torch.dtype, torchs: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stand behind those of the last expert here, and hold anything."""
    sizes, width, depth = SHAPES["parts of tiles"]
    count = len(sizes)
    experts = torch.cat([torch.arange(count).repeat_interleave(torch.tensor(sizes)), torch.full((90,), count)])
    shuffled = experts[torch.randperm(len(experts), generator=torch.Generator().manual_seed(1))]
    groups = rows.sorted_rows(shuffled[:, None].to(device), count, torch.float32, most=len(shuffled))
    assert groups.sizes is None and groups.elsewhere is not None and len(groups.order) == len(experts) > sum(sizes) == int(groups.ends[-1])
    monkeypatch.setattr(rows, "_has_grouped_kernel", lambda *tensors: torchs and dtype is torch.bfloat16)
    x = draw(len(experts), depth, seed=1, device=device, dtype=dtype)
    grad = draw(len(experts), width, seed=2, device=device, dtype=dtype)
    x[sum(sizes) :] = torch.nan
    grad[sum(sizes) :] = torch.nan
    weights = draw(count, width, depth, seed=3, device=device, dtype=dtype)
    found = rows.linear(x, weights, groups)
    expected = torch.cat([x[part].double() @ weights[expert].double().t() for expert, part in enumerate(parts(sizes))])
    assert found.shape == (len(experts), width) and error(found[: sum(sizes)], expected) <= max(torch.finfo(dtype).eps, 2e-6)
    view = torch.full((count, width, depth), torch.nan, device=device)
    rows.accumulate(view, 0.0, grad, x, groups)
    assert error(view, torch.stack([grad[part].double().t() @ x[part].double() for part in parts(sizes)])) <= 2e-6


class NothingAsked(TorchDispatchMode):
    """Refuses the operators by which the host would learn what is on the device."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert name not in {"_local_scalar_dense", "nonzero", "bincount", "masked_select", "unique_dim", "_unique2", "_to_cpu"}, name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("torchs", [False, True], ids=["Triton", "torch's grouped product"])
@EACH_DTYPE
def test_a_block_as_on_the_host(dtype: torch.dtype, torchs: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and gradients as near as the host's to fp64, with nothing asked of the device; some experts have no tokens. Hopper takes torch's
    grouped product where it can, which the host has too."""
    sizes = Sizes(tokens=50, experts=9, top_k=2, hidden=32, inner=24)
    drawn = [tensor.to(device) for tensor in sizes.draw(2, dtype)]
    with torch.no_grad():
        drawn[0].abs_()
        drawn[1][4] = -drawn[1][4].abs()

    def results(dtype: torch.dtype) -> list[Tensor]:
        x, *weights = (tensor.detach().to(dtype).requires_grad_() for tensor in drawn[:-1])
        handles = [Handle(weight) for weight in weights]
        for handle in handles:
            handle.grad = torch.full_like(handle.grad, torch.nan, dtype=torch.promote_types(dtype, torch.float32))
        for _ in range(2):
            x.grad = None
            routing = route(x, weights[0], Router(2, normalize=True))
            out = expert_mlp(x, routing, weights[1], weights[2], PLAIN.gate("silu"))
            out.backward(drawn[-1].to(dtype))
        assert x.grad is not None
        return [out.detach(), x.grad, *(handle.grad for handle in handles)]

    exact = results(torch.float64)
    with monkeypatch.context() as patch:
        patch.setattr(rows, "waits_for_nothing", lambda tensor, dtype: False)
        host = results(dtype)
    monkeypatch.setattr(devices, "capability", lambda device: (9, 0) if torchs else (8, 0))
    with NothingAsked():
        found = results(dtype)
    for number, (one, other, reference) in enumerate(zip(found, host, exact, strict=True)):
        assert one.dtype is other.dtype
        assert error(one, reference) <= 1.5 * error(other, reference) + 4e-7, number
    assert not found[3].view(9, 48, 32)[4].any() and not found[4].view(9, 32, 24)[4].any()
