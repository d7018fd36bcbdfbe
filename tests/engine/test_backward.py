"""A pre-backward hook runs when backward gets there, and costs nothing else; backward from a gradient is torch's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron_llama.engine.backward import backward, pre_backward_hook
from torch import Tensor

from tests.model.nn.spmd import numbers
from tests.model.test_activation_memory import kept


class Doubled(torch.autograd.Function):
    """Says when its backward pass runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, say: Callable[[], None]) -> Tensor:
        ctx.say = say
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.say()
        return grad * 2, None


def hooked(x: Tensor, hook: Callable[[], None]) -> Tensor:
    pre_backward_hook(x, hook)
    return x


def test_hooks_run_in_the_order_of_backward_each_before_what_lies_below() -> None:
    heard = list[str]()

    def layer(x: Tensor, name: str) -> Tensor:
        return hooked(Doubled.apply(x, lambda: heard.append(f"{name} runs")), lambda: heard.append(name))

    x = numbers(3, 4, seed=1)
    y = layer(layer(x, "low"), "high")
    assert heard == []
    (y + hooked(x, lambda: heard.append("side"))).sum().backward()
    assert [event for event in heard if event != "side"] == ["high", "high runs", "low", "low runs"]
    assert heard.count("side") == 1 and torch.equal(x.grad, torch.full_like(x, 5.0))


def test_nothing_is_saved() -> None:
    x = numbers(3, 4, seed=1)
    assert kept(lambda: hooked(x, lambda: None), set()) == 0
    assert kept(lambda: hooked(x.exp(), lambda: None), set()) == kept(lambda: x.exp(), set())


def test_the_output_may_be_changed_in_place() -> None:
    x = numbers(3, 4, seed=1)
    output = hooked(x * 2, lambda: None)
    output.mul_(3)
    output[0] = 0.0
    output.sum().backward()
    expected = torch.full_like(x, 6.0)
    expected[0] = 0.0
    assert torch.equal(x.grad, expected)


def test_a_tensor_without_gradient_has_no_hook() -> None:
    x = numbers(3, 4, seed=1)
    with torch.no_grad():
        assert hooked(x * 2, lambda: None)._backward_hooks is None


def test_what_a_hook_raises_ends_backward() -> None:
    def refuse() -> None:
        raise RuntimeError("use 3 of 8: got B2, expected B1")

    x = numbers(3, 4, seed=1)
    with pytest.raises(RuntimeError, match="got B2, expected B1"):
        hooked(x * 2, refuse).sum().backward()
    assert x.grad is None


@pytest.mark.long
def test_backward_from_a_gradient() -> None:
    """As torch has it, but without importing what takes half a second."""
    x, grad = numbers(3, 4, seed=1), numbers(3, 4, seed=2).detach()
    backward(x.sin(), grad)
    assert torch.equal(x.grad, grad * x.detach().cos())
    program = (
        "import sys, torch\nfrom megatron_llama.launch.launcher import Place\nfrom tests.parallel.cases import Layout, trainer\n"
        "trainer(Place(0, 1, 0), Layout(recompute='full', documents=True)).step(0)\nassert 'sympy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
