"""Models without trained parameters (teachers, references, encoders), frozen weights in fewer bits, and a ``shard`` that fails."""

from __future__ import annotations

import warnings
from typing import Any

import megatron_llama as ml
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron_llama.errors import TrainingError
from megatron_llama.launch.launcher import Place
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.harness import Cluster

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


class Block(nn.Module):
    """A unit that may be recomputed in backward."""

    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 20), nn.Linear(20, 12)
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return self.down(torch.tanh(self.up(self.norm(x))))

        return x + (checkpoint(inner, x, use_reentrant=False) if self.recomputes else inner(x))


def net(seed: int, *, trained: bool, recomputes: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 12), *(Block(recomputes=recomputes) for _ in range(4)), nn.Linear(12, 3)).requires_grad_(trained)


def inputs(number: int, rank: int = 0) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * number + rank))


def optimizers(module: nn.Module) -> dict[str, Any]:
    return {"ml.AdamW": ml.AdamW(), "torch's": torch.optim.AdamW(module.parameters())}


def outputs_and_gradients(module: nn.Module, rank: int) -> list[Tensor]:
    """With gradients that flow to the inputs, of two passes whose graphs live at the same time, and without."""
    results = []
    with torch.no_grad():
        results.append(module(inputs(0, rank)))
    first, second = inputs(1, rank).requires_grad_(), inputs(2, rank).requires_grad_()
    for _ in range(2):
        outputs = [module(first), module(second)]
        module(inputs(3, rank))  # nothing follows it
        for x, out in zip((first, second), outputs, strict=True):
            [gradient] = torch.autograd.grad(out.square().sum(), x)
            results += [out.detach(), gradient]
    module(first).sum().backward()
    assert first.grad is not None
    return [*results, first.grad]


def frozen_engine(place: Place, strategy: str, kind: str) -> bool:
    module = net(0, trained=False, recomputes=kind == "ml.AdamW")
    engine = ml.shard(module, units=[Block], strategy=strategy, optimizer=optimizers(module)[kind])
    expected = outputs_and_gradients(net(0, trained=False), place.rank)
    same = all(map(torch.equal, outputs_and_gradients(module, place.rank), expected))
    with engine.gathered():
        same &= torch.equal(module[1].up.weight, net(0, trained=False)[1].up.weight)
    state = engine.state_dict()
    assert not state["optimizer"]["state"] and len(state["model"]) == len(list(net(0, trained=False).parameters()))
    engine.load_state_dict({"model": net(1, trained=False).state_dict()})
    same &= all(map(torch.equal, outputs_and_gradients(module, place.rank), outputs_and_gradients(net(1, trained=False), place.rank)))
    with pytest.raises(TrainingError, match=r"engine.step\(\): got a model without trained parameters"):
        engine.step()
    engine.close()
    return same


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["ml.AdamW", "torch's"])
def test_a_frozen_model_computes_and_lets_gradients_through(kind: str, cluster: Cluster) -> None:
    for strategy in STRATEGIES:
        assert cluster.run(2, frozen_engine, strategy, kind) == [True, True], strategy


def distilled(place: Place, strategy: str) -> list[float]:
    """A student beside its teacher, each with an engine, as one process with all samples has it."""
    student, teacher = net(0, trained=True), net(1, trained=False)
    plain_student, plain_teacher = net(0, trained=True), net(1, trained=False)
    optimizer = torch.optim.AdamW(plain_student.parameters(), lr=1e-2)
    engine = ml.shard(student, units=[Block], strategy=strategy, optimizer=ml.AdamW(lr=1e-2, groups=[ml.group("*", weight_decay=0.01)]))
    ml.shard(teacher, units=[Block], strategy=strategy)
    differences = []
    for step in range(20):
        loss = F.mse_loss(student(inputs(step, place.rank)), teacher(inputs(step, place.rank)))
        loss.backward()
        engine.step()
        mean = loss.detach() / place.world_size
        dist.all_reduce(mean)
        exact = sum(F.mse_loss(plain_student(inputs(step, r)), plain_teacher(inputs(step, r))) for r in range(place.world_size))
        (exact / place.world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
        differences.append(abs(float(mean) / (float(exact) / place.world_size) - 1.0))
    engine.close()
    return differences


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", STRATEGIES[::-1])
def test_a_student_learns_from_a_sharded_teacher(strategy: str, cluster: Cluster) -> None:
    for differences in cluster.run(2, distilled, strategy):
        assert max(differences) <= 1e-6, differences


def test_frozen_weights_that_are_rounded_are_told() -> None:
    module = net(0, trained=True)
    module[0].requires_grad_(False)
    with pytest.warns(UserWarning, match=r"shard: 0.bias, 0.weight: got values of more bits in frozen parameters, which are kept in torch.bfloat16"):
        ml.shard(module, units=[Block], dtype=torch.bfloat16).close()
    module = net(0, trained=True)
    module[0].requires_grad_(False).bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ml.shard(module, units=[Block], dtype=torch.bfloat16).close()


class Sealed(Block):
    """A class that lets nobody derive from it: ``shard`` finds that when it has changed the modules before."""

    def __init_subclass__(cls) -> None:
        raise TypeError("Sealed has no subclasses")


class Recurrent(nn.Module):
    """A module with further references to its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(12, 12, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(x[:, None])[0][:, 0]


def sealed(last: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 12), Block(), Recurrent(), nn.BatchNorm1d(12), last())


def after_a_failure(place: Place) -> bool:
    module = sealed(Sealed)
    parameters, buffers = list(module.parameters()), list(module.buffers())
    values = [parameter.detach().clone() for parameter in parameters]
    kinds = [type(child) for child in module.modules()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    with pytest.raises(TypeError, match="Sealed has no subclasses"):
        ml.shard(module, units=[Block, Recurrent], optimizer=optimizer)
    assert all(now is before for now, before in zip(module.parameters(), parameters, strict=True))
    assert all(now is before for now, before in zip(module.buffers(), buffers, strict=True))
    assert all(map(torch.equal, parameters, values)) and [type(child) for child in module.modules()] == kinds
    plain = sealed(Block)
    expected = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for each, made in ((module, optimizer), (plain, expected)):
        each(inputs(0)).square().sum().backward()
        made.step()
        made.zero_grad()
    same = all(map(torch.equal, module.state_dict().values(), plain.state_dict().values()))
    module[4].__class__ = Block
    stepped = []
    for each in (module, plain):  # and it can be sharded then
        engine = ml.shard(each, units=[Block, Recurrent])
        each(inputs(1)).square().sum().backward()
        engine.step()
        with engine.gathered():
            stepped.append([parameter.detach().clone() for parameter in each.parameters()])
        engine.close()
    return same and all(map(torch.equal, *stepped))


def test_a_shard_that_fails_leaves_the_model_as_it_was(cluster: Cluster) -> None:
    assert cluster.run(2, after_a_failure) == [True, True]
