"""Weights of linear layers that arrive after their unit has begun: who waits for them, and who else may read them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from megatron_llama.engine.shard.engine import ModuleEngine
from megatron_llama.engine.shard.optimizer import AdamW
from megatron_llama.engine.shard.placeholders import Placeholder
from megatron_llama.engine.shard.shard import shard
from torch import Tensor, nn

WIDTH = 12


class Product(torch.autograd.Function):
    """A kernel of the user's, which gets a weight without an operator of torch in between."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


def with_operator(block: Block, x: Tensor) -> Tensor:
    return F.linear(x, block.last.weight.t().contiguous().t())


def with_function(block: Block, x: Tensor) -> Tensor:
    return Product.apply(x, block.last.weight)  # type: ignore[no-any-return, no-untyped-call]


def without(block: Block, x: Tensor) -> Tensor:
    return torch.zeros_like(x)


class Block(nn.Module):
    """Two linear layers in buckets of their own, and something else that reads the second."""

    def __init__(self, also: Callable[[Block, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.also = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), also

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.also(self, x) + x + self.last(x)


def model(also: Callable[[Block, Tensor], Tensor]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(also) for _ in range(3)))


def engine(net: nn.Module, strategy: str = "optim") -> ModuleEngine:
    return shard(net, units=[Block], strategy=strategy, optimizer=AdamW(lr=1e-2, weight_decay=0.0), bucket_size=WIDTH * WIDTH)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@pytest.mark.parametrize("also", [without, with_operator, with_function])
def test_whoever_reads_a_weight_has_its_values_and_delivers_its_gradient(also: Callable[[Block, Tensor], Tensor], strategy: str) -> None:
    net = model(also)
    twin = copy.deepcopy(net)
    adamw = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.0)
    with engine(net, strategy) as sharded:
        for step in range(4):
            x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step))
            losses = []
            for each in (net, twin):
                loss = each(x).square().mean()
                loss.backward()
                losses.append(loss.item())
            norm = nn.utils.clip_grad_norm_(twin.parameters(), 1e9)
            adamw.step()
            adamw.zero_grad()
            assert losses[0] == pytest.approx(losses[1], rel=1e-5)
            assert sharded.step().grad_norm.item() == pytest.approx(norm.item(), rel=1e-5)
        with torch.no_grad():
            assert torch.allclose(net(x), twin(x), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("also", [without, with_operator])
def test_a_layer_waits_for_its_own_bucket_once_it_is_known_who_reads_it(
    also: Callable[[Block, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first step a unit waits for all of its weights, and afterwards each layer for its own, or whoever else reads it first."""
    net = model(also)
    events: list[str] = []
    with engine(net) as sharded:
        parameters = sharded._engine.parameters
        wait = parameters.wait_unsharded

        def noted(bucket: int, name: str) -> int:
            events.append(name)
            return wait(bucket, name)

        monkeypatch.setattr(parameters, "wait_unsharded", noted)
        for number, block in enumerate(net):
            for name in ("first", "last"):
                getattr(block, name).register_forward_pre_hook(lambda module, x, at=f"call {number}.{name}": events.append(at))
        seen = []
        for _ in range(2):
            events.clear()
            net(torch.ones(2, WIDTH)).sum().backward()
            sharded.step()
            seen.append(events[: events.index("call 0.last")])
        assert seen[0].index("0.last.weight") < seen[0].index("call 0.first")
        assert seen[1].index("call 0.first") < seen[1].index("0.first.weight")
        assert ("0.last.weight" in seen[1]) is (also is with_operator)


def test_what_arrives_late_is_unreadable_when_its_unit_has_ended() -> None:
    net = model(without)
    kept: list[nn.Parameter] = []
    with engine(net, "optim_grads_params") as sharded:
        for _ in range(2):
            hook = net[0].last.register_forward_pre_hook(lambda module, x: kept.append(module.weight))
            net(torch.ones(2, WIDTH)).sum().backward()
            hook.remove()
            sharded.step()
        assert not isinstance(kept[0], Placeholder) and isinstance(kept[1], Placeholder)
        with pytest.raises(RuntimeError, match=r"0\.last\.weight: got \w+ while it is sharded"):
            kept[1].sum()
