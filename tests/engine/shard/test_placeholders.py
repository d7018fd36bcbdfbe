"""What modules hold while their parameters are sharded."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from megatron_llama.engine.shard.placeholders import Placeholder, ShardedParameterError
from torch import nn


def placeholder(found: nn.Parameter | None = None) -> Placeholder:
    return Placeholder("layer.weight", (3, 4), torch.bfloat16, torch.device("cpu"), lambda which: found, requires_grad=True)


def holding() -> nn.Linear:
    module = nn.Linear(4, 3, bias=False)
    module.weight = placeholder()
    return module


def test_what_needs_no_values_is_answered() -> None:
    one = placeholder()
    assert isinstance(one, nn.Parameter)
    assert (tuple(one.shape), one.dtype, one.device.type, one.numel(), one.dim()) == ((3, 4), torch.bfloat16, "cpu", 12, 2)
    assert one.requires_grad and one.is_leaf and one.is_floating_point() and not one.is_meta
    assert (one.size(1), one.stride(), one.element_size(), one.nbytes) == (4, (4, 1), 2, 24)
    assert {one: 1}[one] == 1 and "layer.weight" in repr(one)
    module = holding()
    assert next(module.parameters()).device.type == "cpu" and sum(p.numel() for p in module.parameters()) == 12


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda p: p + 1, "add"),
        (lambda p: p.data, "data"),
        (lambda p: p.detach(), "detach"),
        (lambda p: torch.stack([p, p]), "stack"),
        (lambda p: torch.ones(2, 4, dtype=p.dtype) @ p.T, "T"),
        (lambda p: p.data_ptr(), "data_ptr"),
        (lambda p: p.item(), "item"),
        (lambda p: p.float(), "float"),
        (lambda p: p.copy_(p), "copy_"),
        (lambda p: p[0], "__getitem__"),
        (lambda p: copy.deepcopy(p), "a copy"),
        (lambda p: pickle.dumps(p), "pickling"),
    ],
)
def test_what_needs_values_is_refused(use: Callable[[nn.Parameter], object], what: str) -> None:
    with pytest.raises(ShardedParameterError, match=rf"layer\.weight: got {what} while .*engine\.gathered\(\)"):
        use(placeholder())


@pytest.mark.parametrize(
    "use", [lambda p: p.grad, lambda p: nn.utils.clip_grad_norm_([p], 1.0), lambda p: torch.optim.SGD([p], lr=1.0).step()]
)
def test_a_gradient_is_never_silently_none(use: Callable[[nn.Parameter], object]) -> None:
    with pytest.raises(ShardedParameterError, match=r"got grad while.*shard\(clip=\)"):
        use(placeholder())


def test_freezing_a_parameter_that_nothing_follows_is_refused() -> None:
    """Those inside of ``engine.gathered``: what a pass trains is asked of the model's own placeholders."""
    with pytest.raises(ShardedParameterError, match=r"freeze parameters outside of engine.gathered\(\)"):
        holding().requires_grad_(False)
    with pytest.raises(ShardedParameterError, match=r"freeze parameters outside of engine.gathered\(\)"):
        placeholder().requires_grad = False


def test_a_parameter_that_may_be_read_takes_its_place() -> None:
    values = nn.Parameter(torch.arange(12.0).view(3, 4))
    one = placeholder(values)
    assert torch.equal(torch.cat([one, one]), torch.cat([values, values]))
    torch.nn.functional.linear(torch.ones(2, 4), one).sum().backward()
    assert values.grad is not None and torch.equal(values.grad, torch.full((3, 4), 2.0))
