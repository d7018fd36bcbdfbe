"""Models with torch's tensor parallelism inside train under ``shard`` as in one process, and as under FSDP2 over the same mesh."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron_llama as ml
import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron_llama.engine.shard.engine import ModuleEngine
from megatron_llama.errors import TrainingError, UserError
from megatron_llama.launch.launcher import Place
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from tests import torch_twin
from tests.engine.shard.training import BETAS, CLIP, EPS, LR, WEIGHT_DECAY, adamw, deviation
from tests.engine.shard.twins import VOCABULARY, sentences
from tests.harness import Cluster
from tests.parallel.cases import STRATEGIES
from tests.refused import keys

WIDTH, HEAD = 32, 8
STEPS = 5
"""Few, because an operator of DTensors takes the host a millisecond."""
LOSS, NORM = 1e-6, 2e-5


class Attention(nn.Module):
    """Causal attention over as many heads as its weights have here."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=name == "query") for name in ("query", "key", "value"))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """A gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(WIDTH, 48, bias=False), nn.Linear(48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A block of LLaMA."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.mlp_norm, self.mlp = nn.RMSNorm(WIDTH), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """A small LLaMA."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def save_pretrained(self, folder: str) -> None:
        """As models of transformers have it."""
        raise AssertionError


Plan = dict[str, ParallelStyle]


def plain_plan() -> Plan:
    """Matrices of blocks and the head are cut; norms and the embedding are plain parameters on every rank."""
    cut = ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up")
    of_block: Plan = {name: ColwiseParallel() for name in cut} | {name: RowwiseParallel() for name in ("attention.out", "mlp.down")}
    return of_blocks(of_block) | {"head": ColwiseParallel(output_layouts=Replicate())}


def sequence_plan() -> Plan:
    """Everything is a DTensor, and between the matrices ranks have different tokens."""
    of_block: Plan = {name: SequenceParallel() for name in ("attention_norm", "mlp_norm")}
    for name in ("attention", "mlp"):
        of_block[name] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    of_block |= {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    of_block |= {f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")}
    of_block |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attention.out", "mlp.down")}
    return of_blocks(of_block) | {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def of_blocks(plan: Plan) -> Plan:
    return {f"blocks.*.{name}": style for name, style in plan.items()}


PLANS: Mapping[str, Callable[[], Plan]] = {"plain": plain_plan, "sequence": sequence_plan}


def grid(dp: int = 2, tp: int = 2) -> DeviceMesh:
    # Workers outlive a job, and torch would remember the mesh of an earlier one, whose groups have ended.
    _clear_sharding_prop_cache()
    return DeviceMesh("cpu", torch.arange(dp * tp).view(dp, tp), mesh_dim_names=("dp", "tp"))


def built(seed: int = 7, frozen: Sequence[str] = ()) -> Model:
    torch.manual_seed(seed)
    return with_frozen(Model(), frozen)


def with_frozen(model: Model, frozen: Sequence[str]) -> Model:
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return model


def parallelized(mesh: DeviceMesh, plan: str, frozen: Sequence[str] = ()) -> Model:
    """With values that differ between data-parallel ranks: those of the first one count."""
    model = built(7 + mesh.get_local_rank("dp"))
    if plan != "none":
        parallelize_module(model, mesh["tp"], PLANS[plan]())
    # SequenceParallel lets what was frozen require a gradient.
    return with_frozen(model, frozen)


def loss_of(model: nn.Module, step: int, part: int, parts: int) -> Tensor:
    """Of one of the equal parts of a step's batch."""
    rows = 8 // parts
    start = 8 * step + rows * part
    ids = sentences(range(start, start + rows))
    return cross_entropy(model(ids[:, :28]).flatten(0, 1), ids[:, 1:29].flatten())


@dataclass(frozen=True)
class Curve:
    """Losses, the mean over the ranks, and norms before clipping."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]


def optimizer_of(**options: Any) -> ml.AdamW:
    return ml.AdamW(lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, **options)


def mean(value: float, mesh: DeviceMesh) -> float:
    found = torch.tensor(value, dtype=torch.float64)
    torch.distributed.all_reduce(found, group=mesh.get_group("dp"))
    return float(found) / mesh["dp"].size()


def steps_of(engine: ModuleEngine, mesh: DeviceMesh, steps: range) -> Curve:
    """Train with an engine of two microbatches."""
    losses, norms = [], []
    here, parts = mesh.get_local_rank("dp"), 2 * mesh["dp"].size()
    for step in steps:
        total = 0.0
        for number in range(2):
            loss = loss_of(engine.model, step, 2 * here + number, parts) / 2
            loss.backward()
            total += loss.item()
        losses.append(mean(total, mesh))
        norms.append(engine.step().grad_norm.item())
    return Curve(tuple(losses), tuple(norms))


def sharded(mesh: DeviceMesh, plan: str, frozen: Sequence[str] = (), /, **options: Any) -> ModuleEngine:
    given = {"units": [Block], "optimizer": optimizer_of(), "clip": CLIP, "microbatches": 2, "mesh": mesh["dp"]} | options
    return ml.shard(parallelized(mesh, plan, frozen), **given)


def alone(steps: int = STEPS, frozen: Sequence[str] = ()) -> tuple[Curve, dict[str, Tensor]]:
    """One process with all samples, and its last weights."""
    model = built(frozen=frozen)
    losses, norms = torch_twin.train(model, adamw(model), lambda step: (loss_of(model, step, part, 4) / 4 for part in range(4)), steps, CLIP)
    by_step = torch.tensor(losses, dtype=torch.float64).view(steps, 4).sum(1)
    return Curve(tuple(by_step.tolist()), tuple(norms)), {name: p.detach().clone() for name, p in model.named_parameters()}


def require_close(found: Curve, expected: Curve) -> None:
    assert deviation(found.losses, expected.losses) < LOSS
    assert deviation(found.norms, expected.norms) < NORM


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def require_weights(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Weights are as near as a hundredth of what one step may move an element."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape
        assert float((found[name] - value).abs().max()) < 0.02 * LR, name


def train_by_every_strategy(place: Place, plan: str, steps: int) -> list[Curve]:
    mesh = grid()
    curves = []
    for strategy in STRATEGIES:
        with sharded(mesh, plan, strategy=strategy) as engine:
            curves.append(steps_of(engine, mesh, range(steps)))
    return curves


@pytest.mark.parametrize(
    ("plan", "steps"),
    [("plain", STEPS), *(pytest.param(plan, steps, marks=pytest.mark.long) for plan, steps in (("plain", 20), ("sequence", STEPS)))],
)
def test_ranks_train_as_one_process(cluster: Cluster, plan: str, steps: int) -> None:
    expected, _ = alone(steps)
    assert min(expected.norms) > CLIP
    for curves in cluster.run(4, train_by_every_strategy, plan, steps):
        for curve in curves:
            require_close(curve, expected)


def train_with_fsdp2(place: Place) -> tuple[Curve, Curve, dict[str, float]]:
    """FSDP2 and the engine on the same mesh, one after the other; and how far their last weights are from each other, by name."""
    mesh = grid()
    model = parallelized(mesh, "sequence")
    for parameter in model.parameters():
        # FSDP2 leaves each rank its own values.
        torch.distributed.broadcast(parameter.data.to_local(), group=mesh.get_group("dp"), group_src=0)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp"])
    here = mesh.get_local_rank("dp")
    losses, norms = torch_twin.train(
        model, adamw(model), lambda step: (loss_of(model, step, 2 * here + number, 4) / 2 for number in range(2)), STEPS, CLIP
    )
    by_step = torch.tensor(losses, dtype=torch.float64).view(STEPS, 2).sum(1).tolist()
    theirs = Curve(tuple(mean(loss, mesh) for loss in by_step), tuple(norms))
    with sharded(mesh, "sequence") as engine:
        ours = steps_of(engine, mesh, range(STEPS))
        state = engine.state_dict()["model"]
        for name, parameter in model.named_parameters():
            assert state[name].placements == parameter.placements
            assert state[name].to_local().shape == parameter.to_local().shape
        with engine.gathered():
            apart = {name: float((whole(p) - model.get_parameter(name).full_tensor()).abs().max()) for name, p in engine.model.named_parameters()}
    return ours, theirs, apart


@pytest.mark.long
def test_ranks_train_as_under_fsdp2(cluster: Cluster) -> None:
    for ours, theirs, apart in cluster.run(4, train_with_fsdp2):
        require_close(ours, theirs)
        assert max(apart.values()) < 0.02 * LR


FROZEN = ("embed.weight", "blocks.0.mlp.down.weight", "blocks.1.attention_norm.weight")


def train_frozen(place: Place) -> list[tuple[Curve, dict[str, Tensor]]]:
    mesh = grid()
    found = []
    for plan in PLANS:
        with sharded(mesh, plan, FROZEN) as engine:
            curve = steps_of(engine, mesh, range(3))
            with engine.gathered():
                found.append((curve, {name: whole(p).clone() for name, p in engine.model.named_parameters()}))
    return found


@pytest.mark.long
def test_what_is_frozen_stays(cluster: Cluster) -> None:
    expected, weights = alone(3, FROZEN)
    for plans in cluster.run(4, train_frozen):
        for curve, found in plans:
            require_close(curve, expected)
            require_weights(found, weights)
            assert all(torch.equal(found[name], built().get_parameter(name)) for name in FROZEN)


def thaw(engine: ModuleEngine, mesh: DeviceMesh) -> Curve:
    """Block 0 is frozen for two steps between others."""
    curves = []
    for start, trains in ((0, True), (2, False), (4, True)):
        engine.model.blocks[0].requires_grad_(trains)
        curves.append(steps_of(engine, mesh, range(start, start + 2)))
    return Curve(sum((c.losses for c in curves), ()), sum((c.norms for c in curves), ()))


def train_thawing(place: Place) -> Curve:
    mesh = grid()
    with sharded(mesh, "plain", optimizer=optimizer_of(groups=[ml.group("blocks.0.*")])) as engine:
        return thaw(engine, mesh)


@pytest.mark.long
def test_layers_freeze_and_thaw_between_steps(cluster: Cluster) -> None:
    model = built()

    def losses(step: int) -> list[Tensor]:
        model.blocks[0].requires_grad_(step // 2 != 1)
        return [loss_of(model, step, part, 4) / 4 for part in range(4)]

    found, norms = torch_twin.train(model, adamw(model), losses, 6, CLIP)
    by_step = torch.tensor(found, dtype=torch.float64).view(6, 4).sum(1).tolist()
    for curve in cluster.run(4, train_thawing):
        require_close(curve, Curve(tuple(by_step), tuple(norms)))


def save(place: Place, folder: Path) -> None:
    mesh = grid()
    with sharded(mesh, "plain") as engine:
        steps_of(engine, mesh, range(3))
        dcp.save(engine.state_dict(), checkpoint_id=folder)


def resume(place: Place, folder: Path, dp: int, plan: str, strategy: str) -> Curve:
    """Go on with steps 3 to 5 on other ranks."""
    mesh = grid(dp, 4 // dp)
    with sharded(mesh, plan, strategy=strategy) as engine:
        state = engine.state_dict()
        dcp.load(state, checkpoint_id=folder)
        engine.load_state_dict(state)
        return steps_of(engine, mesh, range(3, 6))


def pass_through_fsdp2(place: Place, folder: Path, copy: Path) -> None:
    """FSDP2 over the same mesh loads a state, and saves it; the engine takes its tensors as they are."""
    mesh = grid()
    model = parallelized(mesh, "plain")
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp"])
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    dcp.save(state, checkpoint_id=copy)
    with sharded(mesh, "sequence") as engine:
        engine.load_state_dict(state)
        with engine.gathered():
            for name, parameter in engine.model.named_parameters():
                value, expected = whole(parameter), state["model"][name].full_tensor()
                assert torch.equal(value, expected), name


def loaded(folder: Path) -> dict[str, Tensor]:
    """The weights in a folder, read by one process."""
    model = built(9)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    return state["model"]


@pytest.mark.long
def test_what_some_ranks_save_others_go_on_with(cluster: Cluster, tmp_path: Path) -> None:
    expected, _ = alone(6)
    _, weights = alone(3)
    rest = Curve(expected.losses[3:], expected.norms[3:])
    cluster.run(4, save, tmp_path / "ours")
    cluster.run(4, pass_through_fsdp2, tmp_path / "ours", tmp_path / "fsdp2")
    for folder in ("ours", "fsdp2"):
        require_weights(loaded(tmp_path / folder), weights)
    for dp, plan, strategy in ((2, "sequence", "optim_grads_params"), (1, "plain", "no_shard"), (4, "none", "optim_grads")):
        for curve in cluster.run(4, resume, tmp_path / "ours", dp, plan, strategy):
            require_close(curve, rest)


def look(place: Place, plan: str) -> None:
    """Whole weights between steps are DTensors around this rank's part; what rank 0 changes all have."""
    mesh = grid()
    first = built().state_dict()
    with sharded(mesh, plan) as engine:
        model = engine.model
        assert model.get_parameter("blocks.0.mlp.up.weight").shape == (48, WIDTH)
        with engine.gathered(only="blocks.0.mlp.*"):
            up = model.get_parameter("blocks.0.mlp.up.weight")
            assert isinstance(up, DTensor) and up.placements == (Shard(0),) and up.to_local().shape == (24, WIDTH)
            assert torch.equal(up.full_tensor(), first["blocks.0.mlp.up.weight"])
        with engine.gathered(modify=True), torch.no_grad():
            if mesh.get_local_rank("dp") == 0:
                model.get_parameter("blocks.0.mlp.up.weight").mul_(2)
                model.get_parameter("blocks.1.mlp.down.weight").fill_(0.5)
            if place.rank == 0:
                model.get_parameter("norm.weight").fill_(3)
        changed = dict(first)
        changed["blocks.0.mlp.up.weight"] = first["blocks.0.mlp.up.weight"] * 2
        changed["blocks.1.mlp.down.weight"] = torch.full((WIDTH, 48), 0.5)
        changed["norm.weight"] = torch.full((WIDTH,), 3.0)
        with engine.gathered():
            for name, parameter in model.named_parameters():
                assert torch.equal(whole(parameter), changed[name]), name
        own = [piece.values.square().sum() for name, piece in engine.masters().items() if name == "blocks.1.mlp.down.weight"]
        total = torch.stack([torch.zeros(()), *own]).sum()
        torch.distributed.all_reduce(total)
        assert float(total) == WIDTH * 48 / 4
        engine.load_state_dict({"model": first})
        loaded = {name: whole(value) for name, value in engine.state_dict()["model"].items()}
        assert all(torch.equal(value, first[name]) for name, value in loaded.items())
        up = "blocks.0.mlp.up.weight"
        for trained in (False, True):
            with engine.gathered(only=up):
                model.get_parameter(up).requires_grad = trained
                copied = copy.deepcopy(model.get_parameter(up))
            assert type(copied) is DTensor and torch.equal(whole(copied), first[up])
            assert model.get_parameter(up).requires_grad is trained and model.get_parameter("norm.weight").requires_grad
        with pytest.raises(TrainingError), engine.gathered():
            model.get_parameter("blocks.0.mlp.up.weight").data.to_local().zero_()


@pytest.mark.parametrize("plan", PLANS)
def test_whole_weights_are_dtensors(cluster: Cluster, plan: str) -> None:
    cluster.run(4, look, plan)


def train_otherwise(place: Place) -> list[tuple[str, Curve]]:
    """One data-parallel rank; a process group; hybrid sharding's replicas alone; without clipping by an optimizer of torch; recomputed."""
    found = []
    mesh = grid(1, 4)
    with sharded(mesh, "sequence") as engine:
        found.append(("adamw", steps_of(engine, mesh, range(4))))
    mesh = grid()
    with sharded(mesh, "sequence", mesh=mesh.get_group("dp"), shard_size=1) as engine:
        found.append(("adamw", steps_of(engine, mesh, range(4))))
    for offload in ("none", "exact"):
        with sharded(mesh, "plain", bucket_size=1000, optimizer_offload=offload, static_order=False) as engine:
            found.append(("adamw", steps_of(engine, mesh, range(4))))
    model = parallelized(mesh, "plain")
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with ml.shard(model, units=[Block], optimizer=optimizer, microbatches=2, mesh=mesh["dp"]) as engine:
        found.append(("sgd", steps_of(engine, mesh, range(4))))
    return found


@pytest.mark.long
def test_other_meshes_optimizers_and_recomputed_units(cluster: Cluster) -> None:
    model = built()
    losses, norms = torch_twin.train(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        lambda step: (loss_of(model, step, part, 4) / 4 for part in range(4)),
        4,
        0.0,
    )
    by_step = torch.tensor(losses, dtype=torch.float64).view(4, 4).sum(1).tolist()
    expected = {"adamw": alone(4)[0], "sgd": Curve(tuple(by_step), tuple(norms))}
    for runs in cluster.run(4, train_otherwise):
        for optimizer, curve in runs:
            require_close(curve, expected[optimizer])


def train_in_bf16(place: Place) -> tuple[Curve, bool]:
    mesh = grid()
    with sharded(mesh, "sequence", dtype=torch.bfloat16) as engine:
        curve = steps_of(engine, mesh, range(STEPS))
        state = engine.state_dict()["model"]
        with torch.no_grad(), engine.gathered():
            narrow = all(parameter.dtype == torch.bfloat16 for parameter in engine.model.parameters())
    return curve, narrow and all(value.dtype == torch.float32 for value in state.values())


@pytest.mark.long
def test_bf16_keeps_masters(cluster: Cluster) -> None:
    expected, _ = alone()
    for curve, dtypes in cluster.run(4, train_in_bf16):
        assert dtypes
        assert deviation(curve.losses, expected.losses) < 2**-6, "the losses themselves have eight bits"


def refusals(place: Place) -> list[str]:
    """The words of what is refused."""
    mesh = grid()
    found: list[str] = []

    def refuse(act: Callable[[], object]) -> None:
        try:
            act()
        except UserError as error:
            found.append(str(error))
        else:
            found.append("nothing was refused")

    def buffer() -> ModuleEngine:
        model = parallelized(mesh, "plain")
        model.register_buffer("table", DTensor.from_local(torch.ones(2), mesh["tp"], (Shard(0),)))
        return ml.shard(model, units=[Block], mesh=mesh["dp"])

    def uneven() -> ModuleEngine:
        return ml.shard(parallelize_module(nn.Linear(4, 5), mesh["tp"], ColwiseParallel()), mesh=mesh["dp"])

    def over_both() -> ModuleEngine:
        return ml.shard(distribute_module(nn.Linear(4, 4), mesh), mesh=mesh["dp"])

    def two_meshes() -> ModuleEngine:
        other = DeviceMesh("cpu", [place.rank], mesh_dim_names=("own",))
        model = parallelized(mesh, "plain")
        model.norm = distribute_module(model.norm, other)
        return ml.shard(model, units=[Block], mesh=mesh["dp"])

    def other_values() -> ModuleEngine:
        model = parallelized(mesh, "plain")
        with torch.no_grad():
            model.norm.weight.fill_(mesh.get_local_rank("tp"))
        return ml.shard(model, units=[Block], mesh=mesh["dp"])

    def other_samples() -> None:
        with sharded(mesh, "plain", microbatches=1) as engine:
            loss_of(engine.model, 0, place.rank, 4).backward()
            engine.step()

    def saved() -> None:
        with sharded(mesh, "plain") as engine, engine.gathered():
            engine.model.save_pretrained("nowhere")

    refuse(buffer)
    refuse(uneven)
    refuse(over_both)
    refuse(two_meshes)
    refuse(lambda: sharded(mesh, "plain", optimizer=optimizer_of(exp_avg_dtype="8bit")))
    refuse(lambda: sharded(mesh, "plain", optimizer_offload="zenflow"))
    refuse(lambda: sharded(mesh, "plain", mesh=None))
    refuse(lambda: sharded(mesh, "plain", mesh=mesh))
    refuse(lambda: sharded(mesh, "plain", mesh=mesh["tp"]))
    refuse(other_values)
    refuse(other_samples)
    refuse(saved)
    return found


def test_what_cannot_be_trained_is_refused(cluster: Cluster) -> None:
    room, checks = "engine.shard.tensor_parallel", "engine.shard.tensor_parallel.tensor_parallel_problems"
    expected = [
        [f"{checks}:6"],
        [f"{checks}:4"],
        [f"{checks}"],
        [f"{checks}:5"],
        [f"{room}.require_by_parts"],
        [f"{room}.require_by_parts:2"],
        *[[f"{room}.add_tensor_axis"]] * 3,
        [f"{room}.require_same_values"],
        [f"{room}.require_same_gradients"],
        ["engine.shard.state.require_savable"],
    ]
    for refused in cluster.run(4, refusals):
        assert [sorted(set(keys(words))) for words in refused] == expected
