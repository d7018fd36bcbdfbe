"""engine.discard: passes that no step uses leave no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron_llama.engine.shard.accesses import PassError
from megatron_llama.engine.shard.engine import ModuleEngine
from megatron_llama.engine.shard.optimizer import AdamW
from megatron_llama.engine.shard.peers import OrderError
from megatron_llama.engine.shard.shard import shard
from megatron_llama.launch.launcher import Place
from torch import Tensor, nn

from tests.engine.shard.models import Trained, difference, loss_of, net, part, sharded, train
from tests.harness import Cluster

Waste = Callable[[ModuleEngine, int], None]
"""Makes passes that are thrown away; it gets the rank."""
OTHER = 77
"""A step whose batches no good pass has."""


def nothing(engine: ModuleEngine, rank: int) -> None:
    pass


def forward(engine: ModuleEngine, rank: int) -> None:
    loss_of(engine.model, part(OTHER, 0, rank))


def one_pass(engine: ModuleEngine, rank: int) -> None:
    loss_of(engine.model, part(OTHER, 0, rank)).backward()


def all_passes(engine: ModuleEngine, rank: int) -> None:
    one_pass(engine, rank)
    (loss_of(engine.model, part(OTHER, 1, rank)) * float("nan")).backward()


class Sad(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ValueError("a bad sample")


def refuse(module: nn.Module, args: object) -> None:
    raise ValueError("a bad sample")


def make_sad(module: nn.Module, args: object, output: Tensor) -> Any:
    return Sad.apply(output)


def error_in_forward(engine: ModuleEngine, rank: int) -> None:
    one_pass(engine, rank)
    with pytest.raises(ValueError, match="a bad sample"), engine.model.blocks[2].feed.register_forward_pre_hook(refuse):
        forward(engine, rank)


def error_in_backward(engine: ModuleEngine, rank: int) -> None:
    with engine.model.blocks[1].feed.register_forward_hook(make_sad):
        loss = loss_of(engine.model, part(OTHER, 0, rank))
    with pytest.raises(ValueError, match="a bad sample"):
        loss.backward()


def error_on_rank_1(engine: ModuleEngine, rank: int) -> None:
    """With parameters whole on every rank, the others come to the end of their passes alone."""
    error_in_forward(engine, rank) if rank == 1 else all_forwards(engine, rank)


def all_forwards(engine: ModuleEngine, rank: int) -> None:
    one_pass(engine, rank)
    forward(engine, rank)


WASTES = (nothing, forward, one_pass, all_passes, error_in_forward, error_in_backward)
PARAMS = "optim_grads_params"
WAYS: dict[str, dict[str, Any]] = {
    "no_shard": {"strategy": "no_shard"},
    "optim": {"strategy": "optim"},
    "optim_grads": {"strategy": "optim_grads", "bucket_size": 2000},
    "1 slot": {"strategy": PARAMS, "param_slots": 1, "grad_slots": 1},
    "2 slots": {"strategy": PARAMS},
    "3 slots": {"strategy": PARAMS, "param_slots": 3, "grad_slots": 3},
    "no static order": {"strategy": PARAMS, "static_order": False},
    "unused ones": {"strategy": PARAMS, "find_unused": True},
    "exact offload": {"strategy": PARAMS, "optimizer_offload": "exact"},
}


def trained_beside(place: Place, waste: Waste, when: tuple[int, ...], options: dict[str, Any]) -> Trained:
    """Three steps, with passes that are thrown away before some of them."""
    found = Trained()
    with sharded(net(), microbatches=2, **options) as engine:
        for step in range(3):
            if step in when:
                waste(engine, place.rank)
                engine.discard()
            done = train(place, engine, microbatches=2, steps=1, first=step)
            found.losses += done.losses
            found.norms += done.norms
            found.parameters = done.parameters
    return found


def differences(place: Place, wastes: tuple[Waste, ...], when: tuple[int, ...], options: dict[str, Any]) -> list[float]:
    """How far the runs with thrown-away passes are from one that has never made them."""
    expected = trained_beside(place, nothing, (), options)
    return [difference(expected, trained_beside(place, waste, when, options)) for waste in wastes]


@pytest.mark.few(3, all=5)
@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_no_trace_is_left(cluster: Cluster, way: str) -> None:
    """Before the recorded step, and before planned ones."""
    for found in cluster.run(2, differences, WASTES, (0, 1, 2), WAYS[way]):
        assert found == [0.0] * len(WASTES)


@pytest.mark.long
def test_no_trace_is_left_in_hybrid_shards(cluster: Cluster) -> None:
    for found in cluster.run(4, differences, WASTES, (0, 2), {"strategy": PARAMS, "shard_size": 2}):
        assert found == [0.0] * len(WASTES)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["no_shard", "optim"])
def test_one_rank_alone_may_have_had_the_error_where_parameters_are_whole(cluster: Cluster, strategy: str) -> None:
    assert cluster.run(2, differences, (error_on_rank_1,), (1, 2), {"strategy": strategy}) == [[0.0]] * 2


def discard_alone(place: Place) -> str:
    with sharded(net()) as engine, pytest.raises(OrderError) as error:
        engine.discard() if place.rank == 1 else one_pass(engine, 0)
    return str(error.value)


@pytest.mark.long
def test_a_rank_that_discards_alone_is_named_by_all(cluster: Cluster) -> None:
    for said in cluster.run(2, discard_alone):
        assert "rank 0: forward of" in said and "rank 1: engine.discard()" in said


def test_a_graph_from_before_is_refused() -> None:
    with sharded(net()) as engine:
        loss = loss_of(engine.model, part(0, 0, 0))
        engine.discard()
        forward(engine, 0)
        with pytest.raises(PassError, match="before the parameters changed"):
            loss.backward()
        engine.discard()
        one_pass(engine, 0)
        engine.step()


def test_what_needs_it_names_it() -> None:
    with sharded(net()) as engine:
        one_pass(engine, 0)
        for refused in (engine.model.zero_grad, engine.optimizer.zero_grad, engine.state_dict, lambda: one_pass(engine, 0)):
            with pytest.raises(PassError, match=r"engine\.discard\(\)"):
                refused()
        engine.discard()
        engine.model.zero_grad()
        with (
            pytest.raises(PassError, match="inside of the model"),
            engine.model.blocks[0].register_forward_pre_hook(lambda *_: engine.discard()),
        ):
            forward(engine, 0)


def test_an_input_gradient_counts_as_a_pass_and_is_named() -> None:
    with shard(Critic(), units=[nn.Linear]) as engine:
        x = torch.ones(2, 6, requires_grad=True)
        loss = engine.model(x).square().mean()
        torch.autograd.grad(loss, x, retain_graph=True)
        with pytest.raises(PassError, match=r"torch\.autograd\.grad through units"):
            loss.backward()


class Critic(nn.Module):
    """Tells samples apart."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.out = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.out(x)


def gan(
    critic: nn.Module, maker: nn.Module, update_critic: Callable[[], Any], update_maker: Callable[[], Any], forget: Callable[[], Any]
) -> Tensor:
    """Three rounds of a GAN, whose critic sees real and made samples in passes of their own."""
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        real, noise = torch.randn(2, 4, 6, generator=generator, dtype=torch.float64)
        critic(real).square().mean().backward()
        critic(maker(noise).detach()).sub(1).square().mean().backward()
        update_critic()
        critic(maker(noise)).square().mean().backward()
        update_maker()
        forget()
    return maker(real)


def torch_and_ours(place: Place, strategy: str) -> float:
    def models() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(5)
        return Critic().double(), nn.Sequential(*(nn.Linear(6, 6) for _ in range(3))).double()

    critic, maker = models()
    for_critic = torch.optim.AdamW(critic.parameters(), lr=0.1, weight_decay=0.0)
    for_maker = torch.optim.AdamW(maker.parameters(), lr=0.1, weight_decay=0.0)

    def update(optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        optimizer.zero_grad()

    expected = gan(critic, maker, lambda: update(for_critic), lambda: update(for_maker), for_critic.zero_grad)
    critic, maker = models()
    optimizer = AdamW(lr=0.1, weight_decay=0.0)
    with (
        shard(critic, units=[nn.Linear], strategy=strategy, optimizer=optimizer, microbatches=2) as judge,
        shard(maker, units=[nn.Linear], strategy=strategy, optimizer=optimizer) as engine,
    ):
        found = gan(critic, maker, judge.step, engine.step, judge.discard)
    return (found - expected).abs().max().item()


@pytest.mark.parametrize("strategy", ["optim", PARAMS])
def test_a_gan_is_trained_as_by_torch(cluster: Cluster, strategy: str) -> None:
    """The maker's backward pass leaves gradients in the critic's engine."""
    assert max(cluster.run(2, torch_and_ours, strategy)) < 1e-12
