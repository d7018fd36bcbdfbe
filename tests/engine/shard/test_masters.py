"""A rank's own pieces of the masters, read and written between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_llama.engine.shard.accesses import PassError
from megatron_llama.engine.shard.engine import ModuleEngine
from megatron_llama.errors import TrainingError
from megatron_llama.launch.launcher import Place
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.engine.shard.models import loss_of, net, part, sharded, train
from tests.harness import Cluster

SINGLE = Place(0, 1, 0)
KINDS: list[tuple[int, dict[str, Any]]] = [
    *((2, {"strategy": strategy}) for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params")),
    (4, {"shard_size": 2}),
    (2, {"optimizer_offload": "exact"}),
]


def wholes(engine: ModuleEngine) -> dict[str, Tensor]:
    """The masters as a state dict has them."""
    state = engine.state_dict()["model"]
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def read(place: Place, options: dict[str, Any]) -> tuple[bool, dict[str, list[tuple[int, int]]]]:
    """Whether all pieces are those of the masters, and the elements of each parameter that a rank has."""
    engine = sharded(net("frozen").float(), dtype=torch.bfloat16, **options)
    train(place, engine, microbatches=1, steps=2)
    expected = wholes(engine)
    good = []
    elements: dict[str, list[tuple[int, int]]] = {}
    if place.rank == 0:  # alone: nothing is sent
        engine.masters()
    for name, (values, where) in engine.masters().items():
        elements.setdefault(name, []).append((where.start, where.stop))
        trained = dict(engine.model.named_parameters())[name].requires_grad
        good.append(values.dtype == (torch.float32 if trained else torch.bfloat16) and torch.equal(values, expected[name].view(-1)[where]))
    masters = engine.masters()
    before = {name: piece.values.clone() for name, piece in masters.items()}
    train(place, engine, microbatches=1, steps=1, first=2)
    engine._engine.settle()
    # Live, as far as the optimizer changes them in place.
    good.append("exact" in options.values() or any(not torch.equal(masters[name].values, before[name]) for name in masters))
    engine.close()
    return all(good), elements


@pytest.mark.few(2)
@pytest.mark.parametrize(("world", "options"), KINDS)
def test_pieces_of_all_ranks_are_the_masters(cluster: Cluster, world: int, options: dict[str, Any]) -> None:
    found = cluster.run(world, read, options)
    assert all(good for good, _ in found)
    copies = {"no_shard": 2}.get(str(options.get("strategy")), 2 if "shard_size" in options else 1)
    for name, parameter in net().named_parameters():
        spans = sorted(span for _, elements in found for span in elements.get(name, ()))
        covered = [number for low, high in spans for number in range(low, high)]
        assert sorted(covered) == sorted(list(range(parameter.numel())) * copies)


def written(place: Place, options: dict[str, Any]) -> list[bool]:
    model = net().float()
    engine = sharded(model, **options)
    train(place, engine, microbatches=1, steps=2)
    before = wholes(engine)
    with engine.masters(modify=True) as masters:
        for name, (values, where) in masters.items():
            if name != "scale":
                # Ranks with the same piece write other values.
                values.copy_(torch.arange(where.start, where.stop) % 7 / 100 + engine.mesh.dp_replica.rank)
    expected = {
        name: value if name == "scale" else (torch.arange(value.numel()) % 7 / 100).view(value.shape) for name, value in before.items()
    }
    found = wholes(engine)
    with engine.gathered():
        computing = dict(model.state_dict())
    with torch.no_grad():
        loss = loss_of(model, part(5, 0, 0))
    plain = net().float()
    plain.load_state_dict(expected)
    close = torch.allclose(loss, loss_of(plain, part(5, 0, 0)), rtol=1e-6)
    train(place, engine, microbatches=1, steps=1, first=2)
    same = []
    for value in wholes(engine).values():
        values = [torch.empty_like(value) for _ in range(place.world_size)]
        dist.all_gather(values, value)
        same.append(all(torch.equal(value, other) for other in values))
    engine.close()
    return [all(torch.equal(each[name], expected[name]) for name in expected) for each in (found, computing)] + [close, all(same)]


@pytest.mark.few(2)
@pytest.mark.parametrize(("world", "options"), KINDS)
def test_what_is_written_reaches_the_weights_of_all(cluster: Cluster, world: int, options: dict[str, Any]) -> None:
    assert cluster.run(world, written, options) == [[True] * 4] * world


def test_a_change_that_is_not_published_is_an_error() -> None:
    with sharded(net()) as engine:
        masters = engine.masters()
        masters["scale"].values.view(-1)[2:3].mul_(2)
        with pytest.raises(TrainingError, match=r"engine\.masters: got a change of scale that .*with engine\.masters\(modify=True\)"):
            engine.masters()
        for _ in range(2):
            with pytest.raises(TrainingError, match="got a change of scale"):
                engine.model(part(0, 0, 0))
        with engine.masters(modify=True):
            pass
        train(SINGLE, engine, microbatches=1, steps=2)
        # A section that ends with an error has published nothing.
        with pytest.raises(KeyError), engine.masters(modify=True) as masters:
            masters["head.weight"].values.zero_()
            raise KeyError
        with pytest.raises(TrainingError, match=r"got a change of head\.weight"):
            engine.model(part(0, 0, 0))


def test_masters_are_for_the_time_between_steps() -> None:
    with sharded(net()) as engine:
        loss_of(engine.model, part(0, 0, 0)).backward()  # type: ignore[no-untyped-call]
        with pytest.raises(PassError, match=r"engine\.masters\(\): got a step whose passes have begun"):
            engine.masters()


def averages(place: Place) -> bool:
    """The recipe of the guide: an average of the weights, the norm of all, an evaluation with the average."""
    model = net()
    engine = sharded(model)
    average = {name: piece.values.clone() for name, piece in engine.masters().items()}
    expected = {name: value.detach().clone() for name, value in wholes(engine).items()}
    for step in range(3):
        train(place, engine, microbatches=1, steps=1, first=step)
        for name, piece in engine.masters().items():
            average[name].lerp_(piece.values, 0.25)
        for name, value in wholes(engine).items():
            expected[name].lerp_(value, 0.25)
    squares = torch.stack([piece.values.square().sum() for piece in engine.masters().values()]).sum()
    dist.all_reduce(squares)
    norm = torch.stack([value.square().sum() for value in wholes(engine).values()]).sum()
    with engine.masters(modify=True) as masters:
        for name, piece in masters.items():
            trained = piece.values.clone()
            piece.values.copy_(average[name])
            average[name] = trained
    shown = wholes(engine)
    engine.close()
    return torch.allclose(squares, norm) and all(torch.equal(shown[name], expected[name]) for name in expected)


def test_an_average_of_the_weights_needs_no_more_than_the_pieces(cluster: Cluster) -> None:
    assert cluster.run(2, averages) == [True, True]
