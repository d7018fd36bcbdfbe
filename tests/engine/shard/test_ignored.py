"""Parameters that ``shard`` leaves as they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import megatron_llama as ml
import pytest
import torch
import torch.distributed as dist
from megatron_llama.errors import CheckpointError, ConfigError
from megatron_llama.launch.launcher import Place
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel

from tests.harness import Cluster

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
WIDTH, STEPS, MICROBATCHES, LR = 16, 4, 2, 1e-2
IGNORED = ["*.table", "5.bias"]


class Block(nn.Module):
    """A unit of which a part is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.table


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, WIDTH))


def frozen(model: nn.Sequential) -> nn.Sequential:
    """The ignored parameters require no gradient."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("table" not in name and name != "5.bias")
    return model


def inputs(step: int, microbatch: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * step + 100 * microbatch + rank))


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean() / MICROBATCHES


def trained(place: Place, strategy: str) -> list[float]:
    """Differences from DDP of the model with these parameters frozen, whose values come from rank 0 there, too."""
    model, plain = frozen(net(place.rank)), frozen(net(place.rank))
    held = {name: parameter for name, parameter in model.named_parameters() if not parameter.requires_grad}
    addresses = {name: parameter.data_ptr() for name, parameter in held.items()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = ml.shard(model, units=[Block], strategy=strategy, optimizer=optimizer, microbatches=MICROBATCHES, ignored=IGNORED)
    ddp = DistributedDataParallel(plain)
    expected = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=LR)
    now = dict(model.named_parameters())
    assert all(now[name] is parameter and parameter.data_ptr() == addresses[name] for name, parameter in held.items())
    differences = []
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            x = inputs(step, microbatch, place.rank)
            loss, other = loss_of(model(x)), loss_of(ddp(x))
            loss.backward()
            other.backward()
            differences.append(abs(loss.item() / other.item() - 1))
        engine.step()
        expected.step()
        expected.zero_grad()
    state = engine.state_dict()
    assert list(state["model"]) == list(plain.state_dict())
    assert all(type(state["model"][name]) is Tensor and torch.equal(state["model"][name], plain.state_dict()[name]) for name in held)
    assert all(state["model"][name].data_ptr() != parameter.data_ptr() for name, parameter in held.items())
    assert not any(name in state["optimizer"]["state"] for name in held)
    with engine.gathered():
        differences += [float((p - q).abs().max()) / LR for p, q in zip(model.parameters(), plain.parameters(), strict=True)]
    engine.close()
    return differences


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", STRATEGIES[::-1])
def test_what_is_ignored_and_frozen_trains_as_with_ddp(strategy: str, cluster: Cluster) -> None:
    for world in (2, 4):
        for differences in cluster.run(world, trained, strategy):
            assert max(differences) <= 1e-4, differences


def own_gradients(place: Place, strategy: str) -> bool:
    """The user reduces and updates them: then the model trains as if all were the engine's."""
    model, plain = net(), net()
    with pytest.warns(UserWarning, match=r"got ignored parameters that require gradients"):
        engine = ml.shard(model, units=[Block], strategy=strategy, optimizer=ml.AdamW(lr=LR, weight_decay=0.0), microbatches=MICROBATCHES, ignored=IGNORED)
    held = [parameter for name, parameter in model.named_parameters() if "table" in name or name == "5.bias"]
    own = torch.optim.AdamW(held, lr=LR, weight_decay=0.0)
    ddp = DistributedDataParallel(plain)
    expected = torch.optim.AdamW(plain.parameters(), lr=LR, weight_decay=0.0)
    close = True
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            x = inputs(step, microbatch, place.rank)
            for each in (model, ddp):
                loss_of(each(x)).backward()
        for parameter in held:
            dist.all_reduce(parameter.grad)
            parameter.grad /= place.world_size
        engine.step()
        own.step()
        model.zero_grad()
        close &= all(parameter.grad is None for parameter in held)
        expected.step()
        expected.zero_grad()
    with engine.gathered():
        close &= all(torch.allclose(p, q, atol=1e-5) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    engine.close()
    return bool(close)


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", STRATEGIES[::-1])
def test_gradients_of_what_is_ignored_are_the_users(strategy: str, cluster: Cluster) -> None:
    assert cluster.run(2, own_gradients, strategy) == [True, True]


def test_gradients_of_what_is_ignored_are_the_users_on_four_ranks(cluster: Cluster) -> None:
    assert cluster.run(4, own_gradients, STRATEGIES[-1]) == [True] * 4


def whose_values(place: Place) -> list[bool]:
    results = []
    for own in ("rank0", "own"):
        model = frozen(net(place.rank))
        before = model[1].table.detach().clone()
        engine = ml.shard(model, units=[Block], ignored=model[1], ignored_values=own)
        first = net(0)[1].table
        results.append(torch.equal(model[1].table, before if own == "own" else first))
        # All of the unit is left out.
        results.append(torch.equal(model[1].linear.weight, net(place.rank if own == "own" else 0)[1].linear.weight))
        engine.close()
    return results


def test_values_are_those_of_rank_0_or_of_each_rank(cluster: Cluster) -> None:
    assert cluster.run(2, whose_values) == [[True] * 4] * 2


class Experts(nn.Module):
    """As many as each rank has."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.randn(count, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.matrices).mean(0)


def experts_of_ranks(place: Place) -> bool:
    torch.manual_seed(place.rank)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts(1 + place.rank)).requires_grad_(True)
    model[1].requires_grad_(False)
    with pytest.raises(ConfigError, match="the model differs from that of rank 0"):
        ml.shard(model, ignored=[model[1].matrices])
    before = model[1].matrices.detach().clone()
    with ml.shard(model, ignored=[model[1].matrices], ignored_values="own") as engine:
        loss_of(model(inputs(0, 0, place.rank))).backward()
        engine.step()
        return torch.equal(engine.state_dict()["model"]["1.matrices"], before)


def test_each_rank_may_have_its_own_parameters(cluster: Cluster) -> None:
    assert cluster.run(2, experts_of_ranks) == [True, True]


def loaded(place: Place) -> bool:
    model, other = frozen(net()), net(1)
    engine = ml.shard(model, units=[Block], ignored=IGNORED, dtype=torch.bfloat16)
    table = model[1].table
    with pytest.raises(CheckpointError, match=r"1.table: got nothing, expected a value"):
        engine.load_state_dict({"model": {name: value for name, value in other.state_dict().items() if name != "1.table"}})
    with pytest.raises(CheckpointError, match=r"1.table: got \(3,\), expected \(16,\)"):
        engine.load_state_dict({"model": other.state_dict() | {"1.table": torch.ones(3)}})
    engine.load_state_dict({"model": other.state_dict()})
    same = model[1].table is table and torch.equal(table, other[1].table) and table.dtype == torch.float32
    keys = model.load_state_dict(net(2).state_dict())
    same &= not keys.missing_keys and not keys.unexpected_keys and torch.equal(table, net(2)[1].table)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if place.rank == 0:
        same &= state.keys() == other.state_dict().keys() and all(torch.equal(value, net(2).state_dict()[name]) for name, value in state.items())
    set_model_state_dict(model, other.state_dict(), options=StateDictOptions(full_state_dict=True))
    same &= torch.equal(table, other[1].table)
    engine.close()
    return same


def test_state_dicts_have_what_is_ignored(cluster: Cluster) -> None:
    assert cluster.run(2, loaded) == [True, True]


def test_what_is_ignored_is_not_gathered_and_told_so() -> None:
    model = frozen(net())
    with ml.shard(model, units=[Block], ignored=IGNORED) as engine:
        for only in ("1.table", ["0.weight", "*.table"]):
            with pytest.raises(ConfigError, match=r"table', which shard\(ignored=\) has left as it is, .* read 1.table.* in the module"), engine.gathered(only=only):
                pass
        table = model[1].table
        with engine.gathered(only=model[1]):  # it has others, too
            assert model[1].table is table and model[1].linear.weight.sum().isfinite()
    whole = net()
    whole[1].requires_grad_(False)
    engine = ml.shard(whole, units=[Block], ignored=whole[1])
    with pytest.raises(ConfigError, match=r"got Block\(...\), which shard\(ignored=\) has left as it is"), engine.gathered(only=whole[1]):
        pass
    engine.close()


def test_initialize_leaves_what_is_ignored() -> None:
    class Sized(nn.Linear):
        def reset_parameters(self) -> None:
            nn.init.constant_(self.weight, 2.0)
            nn.init.constant_(self.bias, 2.0)

    with torch.device("meta"):
        model = nn.Sequential(Sized(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[0].bias = nn.Parameter(torch.full((WIDTH,), 5.0), requires_grad=False)
    with ml.shard(model, ignored="0.bias") as engine:
        engine.initialize()
        assert torch.equal(model[0].bias, torch.full((WIDTH,), 5.0))
        with engine.gathered():
            assert torch.equal(model[0].weight, torch.full((WIDTH, WIDTH), 2.0))


def meta() -> nn.Sequential:
    model = net()
    model[1].table = nn.Parameter(torch.empty(WIDTH, device="meta"))
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Sequential], Callable[[nn.Sequential], dict[str, Any]], list[str]]] = {
    "nothing": (net, lambda model: {"ignored": ["*.tables", nn.LSTM(2, 2)], "clip": -1}, [r"clip: got -1", r"got '\*.tables', which is no", r"got LSTM\(...\), which"]),
    "foreign": (net, lambda model: {"ignored": nn.Parameter(torch.ones(3))}, [r"got a parameter of \(3,\), which is no parameter"]),
    "all": (net, lambda model: {"ignored": model}, ["ignored: got all parameters"]),
    "meta": (meta, lambda model: {"ignored": "1.table"}, ["1.table: got an ignored parameter on the meta device"]),
    "optimizer": (
        net,
        lambda model: {"ignored": "1.table", "optimizer": torch.optim.AdamW(model.parameters())},
        ["optimizer: got ignored parameters: 1.table"],
    ),
    "whose": (net, lambda model: {"ignored": "1.table", "ignored_values": "mine"}, ["ignored_values: got 'mine'"]),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_ignored_is_refused(kind: str) -> None:
    build, options, messages = REFUSED[kind]
    model = build()
    with pytest.raises(ConfigError) as error:
        ml.shard(model, units=[Block], **options(model))
    for message in messages:
        assert error.match(message)


def test_what_means_no_parameter_is_refused() -> None:
    with pytest.raises(TypeError, match=r"shard\(ignored=\): got int"):
        ml.shard(net(), ignored=[3])  # type: ignore[list-item]
