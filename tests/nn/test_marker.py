"""A marker is heard when backward gets there, and otherwise is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron_llama.nn.marker import before_backward
from torch import Tensor

from tests.nn.spmd import numbers
from tests.plans.test_activation_memory import kept, storage


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


def test_markers_are_heard_in_the_order_of_backward_each_before_what_lies_below() -> None:
    heard = list[str]()

    def layer(x: Tensor, name: str) -> Tensor:
        return before_backward(Doubled.apply(x, lambda: heard.append(f"{name} runs")), lambda: heard.append(name))

    x = numbers(3, 4, seed=1)
    y = layer(layer(x, "low"), "high")
    assert heard == []
    (y + before_backward(x, lambda: heard.append("side"))).sum().backward()
    assert [event for event in heard if event != "side"] == ["high", "high runs", "low", "low runs"]
    assert heard.count("side") == 1 and torch.equal(x.grad, torch.full_like(x, 5.0))


def test_nothing_is_copied_or_saved() -> None:
    x = numbers(3, 4, seed=1)
    y = x.exp()
    marked = before_backward(y, lambda: None)
    assert storage(marked) == storage(y) and torch.equal(marked, y)
    assert kept(lambda: before_backward(x, lambda: None), set()) == 0
    assert kept(lambda: before_backward(x.exp(), lambda: None), set()) == kept(lambda: x.exp(), set())


def test_the_output_may_be_changed_in_place() -> None:
    x = numbers(3, 4, seed=1)
    marked = before_backward(x * 2, lambda: None)
    marked.mul_(3)
    marked[0] = 0.0
    marked.sum().backward()
    expected = torch.full_like(x, 6.0)
    expected[0] = 0.0
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_without_backward_there_is_no_marker(requires_grad: bool) -> None:
    x = numbers(3, 4, seed=1).detach().requires_grad_(requires_grad)
    with torch.set_grad_enabled(not requires_grad):
        assert before_backward(x, lambda: None) is x


def test_what_a_marker_raises_ends_backward() -> None:
    def refuse() -> None:
        raise RuntimeError("use 3 of 8: got B2, expected B1")

    x = numbers(3, 4, seed=1)
    with pytest.raises(RuntimeError, match="got B2, expected B1"):
        before_backward(x * 2, refuse).sum().backward()
    assert x.grad is None
