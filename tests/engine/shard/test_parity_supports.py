"""What modules may do, and what their users may do with them: each trains as it does with torch in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import megatron_llama as ml
import pytest
import torch
import torch.distributed as dist
from megatron_llama.engine.offload.exact import ExactOffload
from megatron_llama.launch.launcher import Place
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tests.engine.shard.shapes import SHAPES, Block, Branches, Tower
from tests.engine.shard.training import (
    BETAS,
    CLIP,
    EPS,
    LR,
    WEIGHT_DECAY,
    Run,
    Trained,
    adamw,
    built,
    deviation,
    farthest,
    train,
    train_alone,
)
from tests.engine.shard.training import trained as account_for
from tests.engine.shard.twins import own_loss
from tests.harness import Cluster
from tests.parallel.cases import LOSS_BOUND, NORM_BOUND, STRATEGIES

PARAMS = "optim_grads_params"
VALUE_BOUND = 0.05
"""Learning rates: see test_parity.py."""
RUN = Run("plain", microbatches=2, clip=CLIP, steps=5)
FEW_SLOTS: dict[str, Any] = {"strategy": PARAMS, "param_slots": 2}


def each_trained(place: Place, run: Run, options: Sequence[dict[str, Any]]) -> list[Trained]:
    return [train(run, place.rank, **each) for each in options]


def assert_as_alone(ranks: Sequence[Trained], run: Run, expected: Trained) -> None:
    """Losses of every rank's microbatches, norms, and the values after the last step."""
    assert len({each.digest for each in ranks}) == 1, "ranks hold different parameters"
    assert deviation([loss for each in ranks for loss in each.losses], expected.losses) <= LOSS_BOUND
    assert all(deviation(each.norms, expected.norms) <= NORM_BOUND for each in ranks)
    assert farthest(ranks[0].values, expected.values, run.twin.idle) <= VALUE_BOUND


@pytest.mark.few(4, all=12)
@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_trains_as_alone(shape: str, cluster: Cluster) -> None:
    """With two slots, where weights come and go, and in a third of all ways, which for each shape are others."""
    run = replace(RUN, model=shape, dp=4)
    options: list[dict[str, Any]] = [{"strategy": strategy} for strategy in STRATEGIES[:3]]
    options += [FEW_SLOTS | {"param_slots": slots, "grad_slots": grads} for slots, grads in ((1, 1), (3, 1), (3, 3), ("all", 2))]
    options += [{"strategy": strategy, "shard_size": 2, "bucket_size": 1000} for strategy in STRATEGIES[1:]]
    options += [FEW_SLOTS | {"static_order": False}]
    expected = train_alone(run)
    found = cluster.run(4, each_trained, run, [FEW_SLOTS, *options[list(SHAPES).index(shape) % 3 :: 3]])
    for ranks in zip(*found, strict=True):
        assert_as_alone(ranks, run, expected)


OFFLOADED: dict[str, dict[str, Any]] = {
    "exact": {"optimizer_offload": "exact"},
    "half": {"optimizer_offload": "exact", "optimizer_offload_fraction": 0.5, "strategy": "optim"},
    "all hot": {"optimizer_offload": "zenflow", "zenflow_topk_ratio": 1.0},
    "cold every step": {
        **{"optimizer_offload": "zenflow", "zenflow_update_interval": "1", "strategy": "optim_grads"},
        **{"zenflow_select_interval": "1000000", "zenflow_select_strategy": "step"},
    },
}


def test_an_optimizer_on_the_host_trains_parameters_of_any_rank(cluster: Cluster) -> None:
    run = replace(RUN, model="any rank")
    expected = train_alone(run)
    for ranks in zip(*cluster.run(2, each_trained, run, list(OFFLOADED.values())), strict=True):
        assert_as_alone(ranks, run, expected)


def right_guesses(place: Place) -> int:
    """Of updates that are announced as the trainer announces its own, with a clip that never binds. No guess is overtaken by its step."""
    clip, options = 1e9, {"optimizer_offload": "exact", "offload_speculative": True}
    with ml.shard(built(Tower, place.rank), units=[Block], clip=clip, optimizer=ml.AdamW(lr=LR), **options) as engine:
        [rule] = [rule for rule in engine._engine.rules.distinct if isinstance(rule, ExactOffload)]
        for step in range(3):
            engine._engine.announce_step([group["lr"] for group in engine.param_groups], clip=clip)
            own_loss(engine.model, replace(RUN, microbatches=1).parts(place.rank, step)[0]).backward()  # type: ignore[no-untyped-call]
            for shard in rule._shards.values():
                if shard.attempt is not None:
                    shard.attempt.wait()
            engine.step()
        return rule.speculation.kept


@pytest.mark.long
def test_updates_are_guessed_as_unclipped_whatever_the_mean_divides_by(cluster: Cluster) -> None:
    assert min(cluster.run(2, right_guesses)) > 0


def train_on_a_mesh(place: Place) -> Trained:
    """Replicas and shards whose ranks are no neighbours."""
    mesh = DeviceMesh("cpu", torch.tensor([[3, 0], [1, 2]]))
    return train(replace(RUN, dp=4), place.rank, mesh=mesh, **FEW_SLOTS)


def train_in_pairs(place: Place) -> Trained:
    """A group of some of the processes, while the others are another one."""
    groups = [dist.new_group(ranks) for ranks in ((1, 3), (0, 2))]
    return train(RUN, place.rank // 2, mesh=groups[place.rank % 2 == 0], **FEW_SLOTS)


@pytest.mark.long
def test_groups_of_the_user(cluster: Cluster) -> None:
    run = replace(RUN, dp=4)
    assert_as_alone(cluster.run(4, train_on_a_mesh), run, train_alone(run))
    ranks, expected = cluster.run(4, train_in_pairs), train_alone(RUN)
    for pair in (ranks[::2], ranks[1::2]):
        assert_as_alone(pair, RUN, expected)


@pytest.mark.long
def test_blocks_that_inductor_compiles(cluster: Cluster) -> None:
    """Whose kernels, not their order, decide the last bits: within the bounds, too."""
    assert_as_alone(cluster.run(2, train_compiled), RUN, train_alone(RUN))


def train_compiled(place: Place) -> Trained:
    """Compiled after ``shard``, as its users may."""

    def compile_blocks(model: nn.Module) -> None:
        for block in model.blocks:  # type: ignore[union-attr]
            block.compile()

    return steps(place.rank, RUN, prepare=compile_blocks, **FEW_SLOTS)


def steps(
    rank: int,
    run: Run,
    *,
    build: Callable[[], nn.Module] | None = None,
    prepare: Callable[[nn.Module], object] = lambda model: None,
    before_step: Callable[[Any, nn.Module, int], dict[str, Any]] = lambda engine, model, step: {},
    loss_of: Callable[[nn.Module, dict[str, Tensor], int], Tensor] = lambda model, inputs, step: own_loss(model, inputs),
    optimizer: Callable[[nn.Module], Any] = lambda model: ml.AdamW(lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY),
    **options: Any,
) -> Trained:
    """A loop like ``train`` with places for what a user adds. ``prepare``: called after ``shard``. ``before_step``: called before the step,
    whose arguments it returns."""
    model = built(build or run.twin.build, rank)
    given = {"units": run.twin.units, "clip": run.clip, "microbatches": run.microbatches, "optimizer": optimizer(model)} | options
    losses, norms = [], []
    with ml.shard(model, **given) as engine:
        prepare(model)
        for step in range(run.steps):
            for part in run.parts(rank, step):
                loss = loss_of(model, part, step) / run.microbatches
                loss.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.item())
            norms.append(engine.step(**before_step(engine, model, step)).grad_norm.item())
        with engine.gathered():
            return account_for(rank, model, losses, norms)


def is_a_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def train_with_a_predicate(place: Place) -> Trained:
    return train(RUN, place.rank, units=is_a_block, **FEW_SLOTS)


def test_units_that_a_predicate_chooses(cluster: Cluster) -> None:
    """The same bits as those of their class."""
    expected = cluster.run(2, each_trained, RUN, [FEW_SLOTS])
    assert [each.digest for each in cluster.run(2, train_with_a_predicate)] == [each.digest for [each] in expected]


class Partly(Tower):
    """Of which a block and a part of the root are never used."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 5)

    def trunk(self, x: Tensor) -> Tensor:
        """All blocks but the third."""
        for number in (0, 1, 3):
            x = self.blocks[number](x)
        return x


def train_partly(place: Place, options: dict[str, Any]) -> Trained:
    return steps(place.rank, RUN, build=Partly, find_unused=True, **options)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["optim", PARAMS])
def test_unused_parameters_are_found(strategy: str, cluster: Cluster) -> None:
    """They have a gradient of zero: weight decay and moments go on, which torch's AdamW leaves out for parameters whose ``grad`` is None."""
    model = built(Partly)

    def fill(step: int) -> None:
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    expected = train_alone(RUN, model, before_update=fill)
    assert_as_alone(cluster.run(2, train_partly, {"strategy": strategy}), RUN, expected)


class Changing(Tower):
    """Takes another way in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.order = (0, 1, 2, 3)

    def trunk(self, x: Tensor) -> Tensor:
        """The blocks of its order."""
        for number in self.order:
            x = self.blocks[number](x)
        return x


ORDERS = ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1), (0, 1, 1, 2, 3), (1, 0, 2, 3))


def in_changing_order(model: nn.Module, inputs: dict[str, Tensor], step: int) -> Tensor:
    model.order = ORDERS[step]  # type: ignore[assignment]
    return own_loss(model, inputs)


def train_in_changing_order(place: Place) -> Trained:
    return steps(place.rank, RUN, build=Changing, loss_of=in_changing_order, static_order=False, **FEW_SLOTS)


@pytest.mark.long
def test_an_order_that_changes(cluster: Cluster) -> None:
    expected = train_alone(RUN, built(Changing), loss_of=in_changing_order)
    assert_as_alone(cluster.run(2, train_in_changing_order), RUN, expected)


def evaluated(place: Place, evaluating: bool) -> tuple[Trained, list[float]]:
    """Train, and between steps and between the microbatches of a step evaluate under either of torch's two modes."""
    seen: list[float] = []

    def loss_of(model: nn.Module, inputs: dict[str, Tensor], step: int) -> Tensor:
        if evaluating and step > 0:
            model.eval()
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    seen.append(own_loss(model, inputs).item())
            model.train()
        return own_loss(model, inputs)

    return steps(place.rank, RUN, loss_of=loss_of, **FEW_SLOTS), seen


@pytest.mark.long
def test_evaluation_changes_no_bit(cluster: Cluster) -> None:
    """It is of the current weights: the loss that training sees next."""
    for (plain, _), (found, seen) in zip(cluster.run(2, evaluated, False), cluster.run(2, evaluated, True), strict=True):
        assert found.losses == plain.losses and found.digest == plain.digest
        assert seen == [2 * loss for loss in found.losses[2:] for _ in range(2)]


def on_meta() -> nn.Module:
    """A model without memory."""
    with torch.device("meta"):
        return Tower()


def initialize(module: nn.Module) -> None:
    """Values that every process computes alike, whichever module comes first."""
    for name, parameter in module.named_parameters(recurse=False):
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) / 4)


def train_from_meta(place: Place) -> Trained:
    return from_meta(place.rank, lambda engine: engine.initialize(initialize))


def train_loaded(place: Place) -> Trained:
    values = {name: value.clone() for name, value in built(Tower).state_dict().items()}
    return from_meta(place.rank, lambda engine: engine.load_state_dict({"model": values}))


def from_meta(rank: int, fill: Callable[[Any], object]) -> Trained:
    """Training of a model that got its values after ``shard``."""
    model = on_meta().train()
    optimizer = ml.AdamW(lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    losses, norms = [], []
    with ml.shard(model, units=[Block], optimizer=optimizer, clip=RUN.clip, microbatches=2) as engine:
        fill(engine)
        for step in range(RUN.steps):
            for part in RUN.parts(rank, step):
                loss = own_loss(model, part) / 2
                loss.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.item())
            norms.append(engine.step().grad_norm.item())
        with engine.gathered():
            return account_for(rank, model, losses, norms)


@pytest.mark.long
def test_a_model_from_meta(cluster: Cluster) -> None:
    model = built(Tower)
    for module in model.modules():
        initialize(module)
    assert_as_alone(cluster.run(2, train_from_meta), RUN, train_alone(RUN, model))


@pytest.mark.long
def test_a_model_from_meta_that_is_loaded(cluster: Cluster) -> None:
    assert_as_alone(cluster.run(2, train_loaded), RUN, train_alone(RUN))


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Three groups with options of their own, as torch's users write them."""
    assert isinstance(model, Tower)
    blocks = list(model.blocks.parameters())
    return [
        {"params": list(model.inlet.parameters()), "lr": 3e-3, "weight_decay": 0.3},
        {"params": blocks[::2], "betas": (0.8, 0.9)},
        {"params": [*blocks[1::2], *model.outlet.parameters()], "eps": 1e-6, "weight_decay": 0.0},
    ]


def torch_optimizer(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(grouped(model), lr=LR, weight_decay=0.05, fused=True)


def own_groups(model: nn.Module) -> Any:
    """The same by ``ml.group``: by a pattern, by a predicate, by parameters, and what is left."""
    blocks = dict(model.named_parameters(prefix=""))
    names = [name for name in blocks if name.startswith("blocks.")]
    groups = (
        ml.group("inlet.*", lr=3e-3, weight_decay=0.3),
        ml.group(lambda name, parameter: name in names[::2], betas=(0.8, 0.9), weight_decay=0.05),
        ml.group([blocks[name] for name in names[1::2]], eps=1e-6, weight_decay=0.0),
        ml.group("outlet.*", eps=1e-6, weight_decay=0.0),
    )
    return ml.AdamW(lr=LR, weight_decay=0.05, groups=groups)


GROUPS = {"torch": torch_optimizer, "own": own_groups}


def train_in_groups(place: Place, kind: str) -> list[Trained]:
    return [steps(place.rank, RUN, optimizer=GROUPS[kind], **options) for options in (FEW_SLOTS, {"strategy": "optim"})]


@pytest.mark.long
@pytest.mark.parametrize("kind", GROUPS)
def test_groups_of_parameters(kind: str, cluster: Cluster) -> None:
    model = built(Tower)
    expected = train_alone(RUN, model, torch_optimizer(model))
    for ranks in zip(*cluster.run(2, train_in_groups, kind), strict=True):
        assert_as_alone(ranks, RUN, expected)


RATES = (1e-3, 2e-3, 5e-4, 1e-4, 3e-3)


def train_at_rates(place: Place) -> Trained:
    return steps(place.rank, RUN, before_step=lambda engine, model, step: {"lr": RATES[step]}, **FEW_SLOTS)


def train_with_a_scheduler(place: Place) -> Trained:
    """Torch's scheduler drives ``engine.optimizer``."""
    made: list[torch.optim.lr_scheduler.LambdaLR] = []

    def before_step(engine: Any, model: nn.Module, step: int) -> dict[str, Any]:
        if step == 0:
            made.append(torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: RATES[min(step, 4)] / LR))
        else:
            made[0].step()
        return {}

    return steps(place.rank, RUN, before_step=before_step, **FEW_SLOTS)


def train_with_param_groups(place: Place) -> Trained:
    def before_step(engine: Any, model: nn.Module, step: int) -> dict[str, Any]:
        for group in engine.param_groups:
            group["lr"] = RATES[step]
        return {}

    return steps(place.rank, RUN, before_step=before_step, **FEW_SLOTS)


@pytest.mark.few(1)
@pytest.mark.parametrize("how", [train_at_rates, train_with_a_scheduler, train_with_param_groups])
def test_learning_rates_that_change(how: Callable[[Place], Trained], cluster: Cluster) -> None:
    model = built(Tower)
    optimizer = adamw(model)

    def before_step(step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = RATES[step]

    assert_as_alone(cluster.run(2, how), RUN, train_alone(RUN, model, optimizer, before_step))


def train_summed(place: Place) -> Trained:
    """The user divides by the number of ranks."""
    return steps(place.rank, RUN, reduction="sum", loss_of=lambda model, inputs, step: own_loss(model, inputs) / 2, **FEW_SLOTS)


def test_gradients_that_are_summed(cluster: Cluster) -> None:
    """Twice the half loss on each of two ranks is one loss: of powers of two not a bit is lost."""
    expected = [ranks[0] for ranks in cluster.run(2, each_trained, RUN, [FEW_SLOTS])]
    found = cluster.run(2, train_summed)
    assert [each.digest for each in found] == [each.digest for each in expected] and found[0].norms == expected[0].norms


def train_by_settings(place: Place, sizes: Sequence[int]) -> Trained:
    """``engine.microbatches`` changes from step to step."""
    run = replace(RUN, microbatches=1, steps=len(sizes))
    model = built(Tower, place.rank)
    losses, norms = [], []
    with ml.shard(model, units=[Block], optimizer=ml.AdamW(lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY), clip=CLIP) as engine:
        for step, size in enumerate(sizes):
            engine.microbatches = size
            for part in replace(run, microbatches=size).parts(place.rank, step):
                loss = own_loss(model, part) / size
                loss.backward()  # type: ignore[no-untyped-call]
                losses.append(loss.item())
            norms.append(engine.step().grad_norm.item())
        with engine.gathered():
            return account_for(place.rank, model, losses, norms)


def test_microbatches_that_change(cluster: Cluster) -> None:
    sizes = (1, 2, 4, 1)
    found = cluster.run(2, train_by_settings, sizes)
    expected = train_alone(replace(RUN, microbatches=1, steps=len(sizes)))
    assert all(deviation(each.norms, expected.norms) <= NORM_BOUND for each in found)
    assert farthest(found[0].values, expected.values) <= VALUE_BOUND


def train_two(place: Place) -> list[str]:
    """Two models with two engines, whose steps alternate."""
    models = [built(build, place.rank) for build in (Tower, Branches)]
    engines = [ml.shard(model, units=[Block], clip=CLIP, optimizer=ml.AdamW(lr=LR)) for model in models]
    for step in range(3):
        [part] = replace(RUN, microbatches=1).parts(place.rank, step)
        losses = [own_loss(model, part) for model in models]
        for loss, engine in zip(reversed(losses), reversed(engines), strict=True):
            loss.backward()  # type: ignore[no-untyped-call]
            engine.step()
    found = []
    for model, engine in zip(models, engines, strict=True):
        with engine.gathered():
            found.append(account_for(1, model, [], []).digest)
        engine.close()
    return found


def train_one(place: Place, shape: str) -> str:
    run = Run(shape, clip=CLIP, steps=3)
    return train(run, place.rank, optimizer=ml.AdamW(lr=LR)).digest


@pytest.mark.long
def test_two_engines_do_not_meet(cluster: Cluster) -> None:
    found = cluster.run(2, train_two)
    assert found[0] == found[1] == [cluster.run(2, train_one, shape)[0] for shape in ("plain", "branches")]
