"""``requires_grad_`` between steps: layers that thaw, adapters that are switched, a generator that learns through its discriminator."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import megatron_llama as ml
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron_llama.errors import TrainingError, UserError
from megatron_llama.launch.launcher import Place
from torch import Tensor, nn

from tests.harness import Cluster

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
STEPS = 12


class Block(nn.Module):
    """A layer with an addition of low rank, which may be switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 20), nn.Linear(20, 12)
        self.lora_a, self.lora_b = nn.Linear(12, 2, bias=False), nn.Linear(2, 12, bias=False)
        self.adapts = True

    def forward(self, x: Tensor) -> Tensor:
        out = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out + self.lora_b(self.lora_a(x)) if self.adapts else out


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 12), *(Block() for _ in range(4)), nn.Linear(12, 5)).double()


def inputs(number: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * number + rank), dtype=torch.float64)


def groups() -> list[Any]:
    """With decay for all, and each layer and its additions apart, for every strategy."""
    return [*(ml.group(f"{layer}.lora_*", weight_decay=0.1) for layer in range(1, 5)), *(ml.group(f"{layer}.*", weight_decay=0.1) for layer in range(6))]


Batch = Callable[[nn.Module, int, int], Tensor]
"""Returns the loss of a model, for a step and a rank."""
Freeze = Callable[[nn.Sequential, int], None]
"""Says which parameters a step trains."""


def thaws(module: nn.Sequential, step: int) -> None:
    """From the last layer to the first, one more every second step."""
    for number, layer in enumerate(module):
        layer.requires_grad_(number >= 5 - step // 2)


def alternates(module: nn.Sequential, step: int) -> None:
    """The additions alone, then the rest alone, then all."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad = step % 3 == 2 or ("lora" in name) == (step % 3 == 0)


def distance(module: nn.Module, step: int, rank: int) -> Tensor:
    return F.mse_loss(module(inputs(step, rank)), inputs(100 + step, rank))


@contextmanager
def without_adapters(module: nn.Sequential) -> Iterator[None]:
    """As peft's ``disable_adapter``: the additions are frozen meanwhile."""
    blocks = [block for block in module if isinstance(block, Block)]
    for block in blocks:
        block.adapts = False
        block.lora_a.requires_grad_(False)
        block.lora_b.requires_grad_(False)
    yield
    for block in blocks:
        block.adapts = True
        block.lora_a.requires_grad_(True)
        block.lora_b.requires_grad_(True)


def from_reference(module: nn.Module, step: int, rank: int) -> Tensor:
    """The reference is the model without its additions, as TRL has it."""
    assert isinstance(module, nn.Sequential)
    trained = module(inputs(step, rank))
    with torch.no_grad(), without_adapters(module):
        reference = module(inputs(step, rank))
    return F.mse_loss(trained, inputs(100 + step, rank)) + F.mse_loss(trained, reference)


def parts(module: nn.Sequential, step: int) -> None:
    """One bias of a block, the norm of the next, later all matrices but one: always a part of what is updated together."""
    for name, parameter in module.named_parameters():
        frozen = name == "2.up.bias" if step < 5 else name.startswith(("2.up", "3.norm")) if step < 9 else parameter.dim() > 1 and name != "4.down.weight"
        parameter.requires_grad = not (frozen and step % 4 > 0)


def as_it_is(module: nn.Sequential, step: int) -> None:
    """Nothing is frozen between steps."""


CASES: dict[str, tuple[Freeze, Batch]] = {
    "layers thaw": (thaws, distance),
    "additions and the rest take turns": (alternates, distance),
    "the reference is the model without its additions": (as_it_is, from_reference),
    "parts of a bucket": (parts, distance),
}
WAYS: list[dict[str, Any]] = [{}, {"static_order": False}, {"optimizer_offload": "exact"}]
TOGETHER: list[dict[str, Any]] = [{}, {"static_order": False}, {"unused": "skip"}]
"""With all of a unit in one bucket."""


def trained(place: Place, strategy: str, case: str, clip: float, options: dict[str, Any]) -> float:
    """The largest relative difference of a loss from one process with all samples."""
    freeze, loss_of = CASES[case]
    module, plain = net(0), net(0)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    in_groups = [ml.group("*", weight_decay=0.1)] if freeze is parts else groups()
    engine = ml.shard(module, units=[Block], strategy=strategy, clip=clip, optimizer=ml.AdamW(lr=1e-2, groups=in_groups), microbatches=2, **options)
    differences = []
    for step in range(STEPS):
        freeze(module, step)
        freeze(plain, step)
        assert [p.requires_grad for p in module.parameters()] == [p.requires_grad for p in plain.parameters()]
        mean = torch.zeros(())
        passes = 1 if step % 4 == 3 else 2  # some steps end early, as the last one of an epoch
        for microbatch in range(passes):
            loss = loss_of(module, 2 * step + microbatch, place.rank) / passes
            loss.backward()
            mean += loss.detach() / place.world_size
        result = engine.step(fewer=passes < 2)
        dist.all_reduce(mean)
        exact = sum(loss_of(plain, 2 * step + microbatch, rank) for microbatch in range(passes) for rank in range(place.world_size)) / (passes * place.world_size)
        exact.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        differences += [abs(float(mean) / float(exact) - 1), abs(float(result.grad_norm) / float(norm) - 1) / 20]
    # What has been frozen has fewer steps, for this engine as for torch.
    state = engine.optimizer.state_dict()
    names = [name for group in state["param_groups"] for name in group["param_names"]]
    numbers = {name: number for number, (name, _) in enumerate(plain.named_parameters())}
    expected = optimizer.state_dict()["state"]
    for number, name in enumerate(names):
        assert float(state["state"][number]["step"]) == float(expected[numbers[name]]["step"]), name
    engine.close()
    return max(differences)


@pytest.mark.few(2, all=7)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_frozen_between_steps_trains_as_with_torch(strategy: str, case: str, cluster: Cluster) -> None:
    ways = TOGETHER if case == "parts of a bucket" else WAYS
    for options, clip in zip(ways, (0.0, 0.3, 0.3), strict=True):
        assert max(cluster.run(2, trained, strategy, case, clip, options)) <= 1e-6, (options, clip)


def by_sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1)


def trained_by_sgd(place: Place, strategy: str) -> float:
    """The largest relative difference of a loss from one process, where parts of buckets are frozen and torch's SGD updates."""
    module, plain = net(0), net(0)
    optimizer = by_sgd(plain)
    differences = []
    with ml.shard(module, units=[Block], strategy=strategy, clip=0.3, optimizer=by_sgd(module)) as engine:
        for step in range(STEPS):
            parts(module, step)
            parts(plain, step)
            loss = distance(module, step, place.rank)
            loss.backward()
            mean = loss.detach() / place.world_size
            engine.step()
            dist.all_reduce(mean)
            exact = torch.stack([distance(plain, step, rank) for rank in range(place.world_size)]).mean()
            exact.backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
            differences.append(abs(float(mean) / float(exact) - 1))
    return max(differences)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_optimizer_of_torch_leaves_out_what_is_frozen(strategy: str, cluster: Cluster) -> None:
    assert max(cluster.run(2, trained_by_sgd, strategy)) <= 1e-6


def adversaries(place: Place, strategy: str) -> float:
    """A generator learns through a discriminator that is frozen meanwhile, each with an engine."""
    generator, discriminator = net(0), net(1)
    plain = [net(0), net(1)]
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1) for module in plain]
    engines = [
        ml.shard(module, units=[Block], strategy=strategy, optimizer=ml.AdamW(lr=1e-2, groups=[ml.group("*", weight_decay=0.1)]))
        for module in (generator, discriminator)
    ]

    def losses(maker: nn.Module, judge: nn.Module, steps: list[Callable[[], Any]], step: int, ranks: list[int]) -> list[Tensor]:
        judge.requires_grad_(False)
        first = torch.stack([F.softplus(-judge(maker(inputs(step, rank)))).mean() for rank in ranks]).mean()
        judge.requires_grad_(True)  # before the backward pass, which belongs to the pass above
        first.backward()
        steps[0]()
        with torch.no_grad():
            made = torch.cat([maker(inputs(50 + step, rank)) for rank in ranks])
        real = torch.cat([inputs(100 + step, rank) for rank in ranks])
        second = F.softplus(judge(torch.cat([made, -real]))).mean()
        second.backward()
        steps[1]()
        return [first.detach(), second.detach()]

    def plain_step(number: int) -> Callable[[], None]:
        def step() -> None:
            optimizers[number].step()
            optimizers[number].zero_grad()

        return step

    differences = []
    for step in range(STEPS):
        means = losses(generator, discriminator, [engines[0].step, engines[1].step], step, [place.rank])
        exact = losses(plain[0], plain[1], [plain_step(0), plain_step(1)], step, list(range(place.world_size)))
        for mean, value in zip(means, exact, strict=True):
            dist.all_reduce(mean)
            differences.append(abs(float(mean) / place.world_size / float(value) - 1))
    for engine in engines:
        engine.close()
    return max(differences)


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_generator_learns_through_a_frozen_discriminator(strategy: str, cluster: Cluster) -> None:
    assert max(cluster.run(2, adversaries, strategy)) <= 1e-6


def refusals(place: Place) -> dict[str, str]:
    """What each way to freeze wrongly says."""
    said = {}

    def told(name: str, call: Callable[[], object]) -> None:
        with pytest.raises(UserError) as error:
            call()
        said[name] = str(error.value)

    module = net(0)
    module[1].up.weight.requires_grad_(False)
    # The host updates whole buckets.
    engine = ml.shard(module, units=[Block], microbatches=2, optimizer_offload="exact")
    module.requires_grad_(True)
    told("never trained", lambda: module(inputs(0, 0)))
    with torch.no_grad():
        module(inputs(0, 0))
    module[1].up.weight.requires_grad_(False)
    module[2].up.requires_grad_(False)
    told("cut", lambda: module(inputs(0, 0)))
    module[2].up.requires_grad_(True)
    module(inputs(0, 0)).sum().backward()
    module[3].requires_grad_(False)
    told("within a step", lambda: module(inputs(0, 0)))
    module[3].requires_grad_(True)
    module(inputs(0, 0)).sum().backward()
    engine.step()
    engine.close()
    return said


def test_what_cannot_be_frozen_is_refused_by_name(cluster: Cluster) -> None:
    for said in cluster.run(2, refusals):
        assert "1.up.weight: got requires_grad=True, expected False as in shard()" in said["never trained"]
        assert "got requires_grad=False for 2.up.weight and True for 2.down.weight" in said["cut"] and 'ml.group("2.up.weight")' in said["cut"]
        assert said["within a step"].startswith("requires_grad_: got another value for 3.") and "within a step" in said["within a step"]


def parted(place: Place, kind: str) -> str:
    """Ranks that freeze other layers, or of which one freezes none."""
    module = net(0)
    engine = ml.shard(module, units=[Block], optimizer=ml.AdamW(groups=groups()))

    def step() -> None:
        module(inputs(0, 0)).sum().backward()
        engine.step()

    step()
    step()
    if place.rank or kind == "others":
        module[1 + place.rank].requires_grad_(False)
    with pytest.raises(TrainingError) as error:
        for _ in range(3):
            step()
    engine.close()
    return str(error.value)


@pytest.mark.parametrize("kind", ["others", "none"])
def test_ranks_that_freeze_other_layers_are_named(kind: str, cluster: Cluster) -> None:
    for said in cluster.run(2, parted, kind):
        words = "requires_grad_: got other trained parameters than on rank 0 on rank 1" if kind == "others" else "rank 1: other trained parameters from step 3 on"
        assert words in said


def called(parameters: Iterable[nn.Parameter], trained: bool) -> None:
    for parameter in parameters:
        assert parameter.requires_grad_(trained) is parameter


def assigned(parameters: Iterable[nn.Parameter], trained: bool) -> None:
    for parameter in parameters:
        parameter.requires_grad = trained


@pytest.mark.parametrize("ask", [called, assigned])
@pytest.mark.parametrize("modify", [False, True])
def test_what_is_frozen_inside_of_gathered_is_kept(modify: bool, ask: Callable[[Iterable[nn.Parameter], bool], None]) -> None:
    """Whole parameters are copies: what is asked of them is asked of what they stand for. Pickles of them know nothing of it."""
    model = net(0)
    with ml.shard(model, units=[Block], optimizer=ml.AdamW(lr=1e-2, groups=groups())) as engine:

        def moves() -> list[bool]:
            before = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in engine.state_dict()["model"].items()}
            before = {name: value.clone() for name, value in before.items()}
            model(inputs(0, 0)).square().mean().backward()
            engine.step()
            return [not torch.equal(value, before[name]) for name, value in engine.state_dict()["model"].items() if name.startswith("1.up.") or name == "2.up.weight"]

        assert moves() == [True] * 3
        with engine.gathered(modify=modify):
            ask(model[1].parameters(), False)
            assert not model[1].up.weight.requires_grad
            for copied in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
                assert all(type(parameter) is nn.Parameter for parameter in copied.parameters())
                assert copied[1].up.weight.requires_grad_().requires_grad
        assert not model[1].up.weight.requires_grad and model[2].up.weight.requires_grad
        assert moves() == [False, False, True]
        with engine.gathered(modify=modify, only="1.*"):
            ask(model[1].parameters(), True)
            whole = model[1].up.weight
        assert type(whole) is nn.Parameter
        assert moves() == [True] * 3
