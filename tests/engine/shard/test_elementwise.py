"""Optimizers of torch that update flat shards: as in one process, over ranks, skipped, saved, resharded, refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import megatron_llama as ml
import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron_llama.engine.rules import torch_rule
from megatron_llama.errors import CheckpointError, ConfigError
from megatron_llama.launch.launcher import Place
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import OneCycleLR

from tests import torch_twin
from tests.engine.shard import models
from tests.harness import Cluster

Parameters = Iterable[nn.Parameter] | list[dict[str, Any]]
Make = Callable[[Parameters], optim.Optimizer]
SINGLE = Place(0, 1, 0)
STEPS = 20
CLIP = 0.5


class Lion(optim.Optimizer):
    """As users write it (Chen et al., 2023): in no package that is installed."""

    def __init__(self, params: Parameters, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["exp_avg"] = torch.zeros_like(p)
                    first, second = group["betas"]
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(state["exp_avg"].lerp(p.grad, 1 - first).sign_(), alpha=-group["lr"])
                    # Another tensor in the place of the old one.
                    state["exp_avg"] = state["exp_avg"].lerp(p.grad, 1 - second)


MAKES: dict[str, Make] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, weight_decay=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "dampening": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "Adam": lambda p: optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "amsgrad": lambda p: optim.AdamW(p, lr=1e-2, amsgrad=True, maximize=True),
    "NAdam": lambda p: optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: optim.RAdam(p, lr=1e-2),
    "Adagrad": lambda p: optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.3, lr_decay=0.1),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
    "Adadelta": lambda p: optim.Adadelta(p, lr=0.5),
    "Adamax": lambda p: optim.Adamax(p, lr=1e-2),
    "ASGD": lambda p: optim.ASGD(p, lr=0.1, t0=3, lambd=0.1),
    "Rprop": lambda p: optim.Rprop(p, lr=1e-3),
    "Lion": lambda p: Lion(p),
}
LAZY = ("dampening", "NAdam", "ASGD", "Rprop")
"""Those whose state is made of values of the first step."""


def given(name: str, parameters: Parameters) -> Any:
    """What a script gives to ``shard``."""
    made = MAKES[name](parameters)
    return ml.elementwise(made) if isinstance(made, Lion) else made


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def by_dims(module: nn.Module) -> list[dict[str, Any]]:
    """Two groups with other options."""
    return [
        {"params": [p for p in module.parameters() if p.dim() > 1]},
        {"params": [p for p in module.parameters() if p.dim() < 2], "lr": 3e-2, "weight_decay": 0.0},
    ]


def loss_of(module: nn.Module, step: int) -> Tensor:
    loss: Tensor = module(torch.randn(5, 6, generator=torch.Generator().manual_seed(step))).square().mean()
    return loss


def trained(module: nn.Module, optimizer: Any, steps: Iterable[int]) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(module, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def same(one: Any, other: Any) -> bool:
    """Whether two nested states are the same bits, NaN like NaN."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and torch.equal(one.nan_to_num(7.25), other.nan_to_num(7.25))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("name", MAKES)
def test_one_process_has_the_bits_of_torch(name: str) -> None:
    """Values, state and saved groups; and a run goes on from torch's state, and from one that no step has made."""
    ours, theirs = net(), net()
    optimizer = MAKES[name](by_dims(theirs))
    engine = ml.shard(ours, optimizer=given(name, by_dims(ours)))
    before = engine.state_dict()
    losses = trained(theirs, optimizer, range(STEPS))
    assert trained(ours, engine.optimizer, range(STEPS)) == losses
    with engine.gathered():
        assert same(ours.state_dict(), theirs.state_dict())
    saved, expected = engine.optimizer.state_dict(), optimizer.state_dict()
    names = [group.pop("param_names") for group in saved["param_groups"]]
    assert names == [["0.weight", "2.weight"], ["0.bias", "2.bias"]]
    assert same(saved, expected)
    engine.close()
    again = net()
    second = ml.shard(again, optimizer=given(name, by_dims(again)))
    second.load_state_dict(before)
    assert trained(again, second.optimizer, range(3)) == losses[:3]
    second.load_state_dict({"model": theirs.state_dict()})
    second.optimizer.load_state_dict(expected)
    assert trained(again, second.optimizer, range(50, 55)) == trained(theirs, optimizer, range(50, 55))
    second.close()


def test_pieces_of_a_shard_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update takes a shard piece by piece, and each piece is of the same step."""
    for name in MAKES:
        runs = []
        for piece in (1 << 20, 64):
            monkeypatch.setattr(torch_rule, "UPDATE_PIECE", piece)
            module = net()
            engine = ml.shard(module, optimizer=given(name, module.parameters()))
            runs.append((trained(module, engine.optimizer, range(5)), engine.state_dict()))
            engine.close()
        assert same(*(list(run) for run in runs)), name


@pytest.mark.parametrize("name", ["momentum", "Adam", "RMSprop"])
def test_bf16_has_masters_in_fp32(name: str) -> None:
    """The masters of the first step are those of fp32; what computes is their rounding."""
    ours, theirs = net(), net()
    engine = ml.shard(ours, optimizer=given(name, ours.parameters()), dtype=torch.bfloat16)
    with engine:
        trained(ours, engine.optimizer, range(STEPS))
        trained(theirs, MAKES[name](theirs.parameters()), range(STEPS))
        for key, value in engine.state_dict()["model"].items():
            exact = theirs.state_dict()[key]
            assert value.dtype == torch.float32
            assert (value - exact).norm() < 0.05 * (exact - net().state_dict()[key]).norm()
            assert not torch.equal(value, value.bfloat16().float())


def over_ranks(place: Place, name: str, strategy: str, shard_size: int, microbatches: int) -> models.Trained:
    module = models.net("frozen")
    trained = [p for p in module.parameters() if p.requires_grad]
    engine = ml.shard(
        module,
        units=[models.Block],
        optimizer=given(name, trained),
        clip=CLIP,
        strategy=strategy,
        shard_size=shard_size,
        microbatches=microbatches,
    )
    with engine:
        return models.train(place, engine, microbatches=microbatches, steps=STEPS)


def alone(name: str, world: int, microbatches: int) -> models.Trained:
    """torch in one process, with the batches of all ranks."""
    module = models.net("frozen")

    def losses_of(step: int) -> Iterator[Tensor]:
        for rank in range(world):
            for microbatch in range(microbatches):
                yield models.loss_of(module, models.part(step, microbatch, rank)) / microbatches / world

    optimizer = MAKES[name]([p for p in module.parameters() if p.requires_grad])
    losses, norms = torch_twin.train(module, optimizer, losses_of, STEPS, CLIP)
    together = torch.tensor(losses, dtype=torch.float64).view(STEPS, -1).sum(1).tolist()
    return models.Trained(together, norms, {key: p.detach().clone() for key, p in module.named_parameters()})


STRATEGIES = ("optim_grads_params", "optim", "no_shard", "optim_grads")


@pytest.mark.few(4)
@pytest.mark.parametrize(("number", "name"), list(enumerate(MAKES)))
def test_ranks_train_as_one_process(number: int, name: str, cluster: Cluster) -> None:
    """In fp64, where sums of another order differ by little."""
    strategy, world = STRATEGIES[number % 4], 4 if number % 5 == 0 else 2
    expected = alone(name, world, 1 + number % 2)
    for found in cluster.run(world, over_ranks, name, strategy, 2 if number == 10 else 0, 1 + number % 2):
        assert models.difference(found, expected) < 2e-7  # the factor of clipping is in fp32


def local(state: Any) -> Any:
    """A state with this rank's parts in the place of DTensors."""
    if isinstance(state, dict):
        return {key: local(value) for key, value in state.items()}
    return state.to_local() if isinstance(state, DTensor) else state


def skipping(place: Place, name: str, on_device: bool) -> None:
    """One of the ranks has a gradient that is NaN, before the first step and later."""
    with pytest.MonkeyPatch.context() as patched:
        if on_device:
            # As where the host must not wait: once there is state, it learns of no skip.
            patched.setattr(torch_rule.TorchRule, "_host_reads_skip", lambda rule, work: not work.begun)
            patched.setattr(torch_rule, "UPDATE_PIECE", 128)
        ends = []
        for bad in ((0, 3, 4), ()):
            module = net()
            engine = ml.shard(module, units=[nn.Linear], optimizer=given(name, by_dims(module)), clip=CLIP)
            # What is skipped counts as never made.
            for step in range(6) if bad else (1, 2, 5):
                before = local(engine.state_dict())
                spoilt = step in bad and place.rank == 1
                (loss_of(module, 10 * step + place.rank) * (torch.nan if spoilt else 1.0)).backward()
                assert float(engine.step().skipped) == (step in bad)
                assert same(local(engine.state_dict()), before) == (step in bad)
            ends.append(local(engine.state_dict()))
            engine.close()
        assert same(*ends)


@pytest.mark.few(4)
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("name", ["momentum", "dampening", "amsgrad", "NAdam", "Adagrad", "Rprop", "Lion"])
def test_a_skipped_step_changes_no_bit(name: str, on_device: bool, cluster: Cluster) -> None:
    cluster.run(2, skipping, name, on_device)


def part_of_a_run(place: Place, name: str, folder: str, first: int, steps: int) -> Any:
    """Some steps whose batches are the same for every number of ranks. Returns the whole state as torch's functions have it."""
    module = models.net("tied")
    microbatches = 4 // place.world_size
    engine = ml.shard(module, units=[models.Block], optimizer=given(name, module.parameters()), clip=CLIP, microbatches=microbatches)
    if first:
        state = engine.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/{first}")
        engine.load_state_dict(state)
    for step in range(first, first + steps):
        for microbatch in range(microbatches):
            (models.loss_of(module, models.part(step, microbatch * place.world_size + place.rank, 0)) / microbatches).backward()
        engine.step()
    dcp.save(engine.state_dict(), checkpoint_id=f"{folder}/{first + steps}")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    saved = get_optimizer_state_dict(module, engine.optimizer, options=options)
    if place.world_size > 1 and name != "SGD":  # torch's function fails for a state without a tensor
        set_optimizer_state_dict(module, engine.optimizer, saved, options=FROM_RANK_0)
    again = get_optimizer_state_dict(module, engine.optimizer, options=options)
    engine.close()
    assert same(again, saved)
    return saved


FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


@pytest.mark.few(1, all=4)
@pytest.mark.parametrize("name", ["SGD", "momentum", "amsgrad", "NAdam", "Adagrad", "ASGD", "Lion"])
def test_other_numbers_of_ranks_go_on_with_a_state(name: str, tmp_path: Path, cluster: Cluster) -> None:
    """From two to four, to one."""
    resharded = [
        cluster.run(world, part_of_a_run, name, f"{tmp_path}/parts", first, 2)[0] if world > 1 else part_of_a_run(SINGLE, name, f"{tmp_path}/parts", first, 2)
        for first, world in ((0, 2), (2, 4), (4, 1))
    ]
    expected = part_of_a_run(SINGLE, name, f"{tmp_path}/whole", 0, 6)
    found = resharded[-1]
    assert found["state"].keys() == expected["state"].keys() and found["param_groups"] == expected["param_groups"]
    for parameter, state in expected["state"].items():
        assert found["state"][parameter].keys() == state.keys()
        for what, value in state.items():
            torch.testing.assert_close(found["state"][parameter][what], value, rtol=1e-9, atol=1e-12)


def test_what_is_saved_before_the_first_step_begins_it() -> None:
    """Optimizers whose state is made of values of the first step have none that could be saved: it is NaN, which a load knows again."""
    for name in (*LAZY, "momentum"):
        module = net()
        engine = ml.shard(module, optimizer=given(name, module.parameters()))
        state = engine.state_dict()["optimizer"]["state"]["0.weight"]
        assert all(bool(tensor.isnan().all()) for tensor in state.values()) == (name in LAZY)
        engine.close()


def test_every_option_may_follow_a_schedule() -> None:
    ours, theirs = net(), net()
    engine = ml.shard(ours, optimizer=given("momentum", ours.parameters()))
    optimizer = MAKES["momentum"](theirs.parameters())
    found = []
    for module, one in ((ours, engine.optimizer), (theirs, optimizer)):
        # It cycles momentum, which it looks for among the defaults.
        scheduler = OneCycleLR(one, max_lr=0.2, total_steps=STEPS + 1)
        losses = []
        for step in range(STEPS):
            losses += trained(module, one, [step])
            scheduler.step()
            one.param_groups[0]["weight_decay"] = 0.01 * (step % 3)
            one.param_groups[0]["nesterov"] = step > 10
        found.append(losses)
    assert found[0] == found[1]
    engine.close()


def test_options_that_need_other_state_are_refused() -> None:
    for name, option, value in (("SGD", "momentum", 0.9), ("momentum", "momentum", 0.0), ("Adam", "amsgrad", True), ("momentum", "dampening", 0.1)):
        module = net()
        engine = ml.shard(module, optimizer=given(name, module.parameters()))
        trained(module, engine.optimizer, [0])
        before = engine.param_groups[0][option]
        engine.param_groups[0][option] = value
        loss_of(module, 1).backward()
        with pytest.raises(ConfigError, match=rf"param_groups\[0\]: got {option}={value}, with which the optimizer keeps other state"):
            engine.step()
        engine.param_groups[0][option] = float("nan")
        with pytest.raises(ConfigError, match=rf"param_groups\[0\]: got {option}=nan, expected finite numbers"):
            engine.step()
        engine.param_groups[0][option] = before
        engine.step()
        engine.close()


def test_a_state_of_another_optimizer_is_refused() -> None:
    module, other = net(), net()
    engine = ml.shard(module, optimizer=given("momentum", module.parameters()))
    adam = MAKES["Adam"](other.parameters())
    trained(other, adam, [0])
    with pytest.raises(CheckpointError, match=r"momentum_buffer of 0.weight: got nothing(.|\n)*exp_avg of 0.weight: got a value"):
        engine.optimizer.load_state_dict(adam.state_dict())
    engine.close()


class Counting(Lion):
    """Counts its steps in its group."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.param_groups[0]["step"] = self.param_groups[0].get("step", 0) + 1


class OwnCount(Lion):
    """Counts its steps itself."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.made = getattr(self, "made", 0) + 1


class Normed(Lion):
    """Makes steps of the gradient's length."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad / p.grad.norm(), alpha=-1e-3)


class Rows(Lion):
    """Looks at rows where there are some."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.data.sub_(p.grad - (p.grad.mean(1, keepdim=True) if p.dim() > 1 else 0), alpha=1e-3)


class Plain(Lion):
    """Counts steps in numbers of Python."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["count"] = self.state[p].get("count", 0) + 1


class Blocks(Lion):
    """Keeps numbers of blocks."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["scales"] = torch.ones(p.numel() // 64)


class Late(Lion):
    """Has more state from its second step on."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if self.state[p]:
                self.state[p]["slow"] = p.clone()
        super().step()


class Shared(Lion):
    """Keeps something of all parameters."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.state["all"]["count"] = 1


@pytest.mark.parametrize(
    ("optimizer", "got"),
    [
        (Counting, "a step that changes an option of its group"),
        (OwnCount, "a step that changes an attribute"),
        (Normed, "other results for the parts of a matrix"),
        (Rows, "other results for the parts of a matrix"),
        (Plain, "count of int in the state of a parameter"),
        (Blocks, r"scales of shape \(4,\) for a parameter of shape \(4, 64\)"),
        (Late, r"other state after a later step \(exp_avg, slow\)"),
        (Shared, "an error in a step of a part: it keeps 'all'"),
        (optim.LBFGS, "an optimizer that calls for the loss several times"),
    ],
)
def test_what_breaks_the_promise_is_refused(optimizer: Any, got: str) -> None:
    module = net()
    with pytest.raises(ConfigError, match=rf"shard\(optimizer=.*{optimizer.__name__}\): got {got}"):
        ml.shard(module, optimizer=ml.elementwise(optimizer(module.parameters())))
    loss_of(module, 0).backward()


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda p: optim.Adafactor(p), "numbers of rows and columns"),
        (lambda p: optim.LBFGS(p), "the loss several times"),
        (lambda p: optim.SparseAdam(p), "sparse gradients"),
        (Lion, r"not known whether it treats each element by itself.*ml\.elementwise\(optimizer\)"),
        (lambda p: optim.Adam(p, differentiable=True), "differentiable=True"),
    ],
    ids=["Adafactor", "LBFGS", "SparseAdam", "unknown", "differentiable"],
)
def test_what_is_not_known_to_be_elementwise_is_refused(make: Any, got: str) -> None:
    module = net()
    with pytest.raises(ConfigError, match=rf"(?s)shard\(optimizer=.*got .*{got}"):
        ml.shard(module, optimizer=make(list(module.parameters())))


def test_what_the_engine_would_not_do_is_refused() -> None:
    module = net()
    hooked = optim.SGD(module.parameters(), lr=0.1)
    hooked.register_step_pre_hook(lambda *arguments: None)
    used = optim.Adagrad(module.parameters())
    loss_of(module, 0).backward()
    used.step()
    module.zero_grad()
    for optimizer, options, got in (
        (hooked, {}, "got hooks, expected none"),
        (used, {}, "got the state of 4 parameters"),
        (optim.SGD(module.parameters(), lr=0.1), {"optimizer_offload": "exact"}, "got exact with torch.optim.SGD"),
    ):
        with pytest.raises(ConfigError, match=got):
            ml.shard(module, optimizer=optimizer, **options)
    with pytest.raises(TypeError, match=r"ml.elementwise: got AdamW"):
        ml.elementwise(ml.AdamW())  # type: ignore[arg-type]


def test_a_trial_leaves_the_scripts_random_numbers_alone() -> None:
    module = net()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    ml.shard(module, optimizer=given("Lion", module.parameters())).close()
    assert torch.equal(torch.rand(2), expected)
