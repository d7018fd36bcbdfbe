"""What the engine allocates on a device is what the plan says, to the byte: the real engine on torch's device ``meta``, which has no memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_llama.config.schema import Config, ParallelConfig, TrainingConfig
from megatron_llama.engine.build import build_engine
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.offload import build
from megatron_llama.engine.offload.exact import ExactOffload
from megatron_llama.engine.offload.zenflow.rule import ZenFlow
from megatron_llama.engine.offload_options import OffloadConfig, ZenFlowConfig
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.engine.options import UpdateOptions
from megatron_llama.engine.pieces import held_memory
from megatron_llama.engine.plan import offload as plans
from megatron_llama.engine.plan.memory import staging_bytes, state_bytes
from megatron_llama.engine.plan.offload import offload_plan
from megatron_llama.engine.plan.specs import HFSlice, ParamSpec, UnitSpec
from megatron_llama.engine.plan.zenflow import hot_column_count
from megatron_llama.engine.shard.module_buckets import module_bucket_plan
from megatron_llama.launch import mesh as meshes
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.model.llama import build_stages
from megatron_llama.model.presets import PRESETS
from megatron_llama.pipeline.build import build_optimizer
from megatron_llama.pipeline.plan.run_engine import engine_options, rank_bucket_plan, shard_count
from megatron_llama.planner.trace.storages import Storages
from megatron_llama.train.setup.memory import MemoryPlan
from megatron_llama.train.setup.resolve import resolve
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from tests.engine.test_moments import MomentLayout
from tests.engine.test_muon import MuonLayout
from tests.engine.test_param_groups import GroupLayout
from tests.engine.test_schedule_free import AveragedLayout
from tests.model.test_activation_memory import EXPERTS, Run
from tests.parallel.cases import STRATEGIES, Layout, Strategy
from tests.parallel.test_zenflow import EVERY, FOUR, OVERLAP, zen

META = torch.device("meta")
EXACT = OffloadConfig(optimizer_offload="exact")


class Made(TorchDispatchMode):
    """All storages of the device that exist, by what operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.storages = Storages(lambda: 0)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device == META:
                self.storages.see(leaf)
        return out


class NoWorker:
    """A worker that gets no work."""

    def __init__(self, cores: object, threads: int) -> None:
        pass

    def close(self, timeout: float = 0.0) -> None:
        """See HostWorker."""


@dataclass(frozen=True)
class Engine:
    """One rank's engine, and the bytes of all storages of the device that live when it is built."""

    engine: OverlappedDistributedOptimizer
    live: int
    components: Mapping[str, int]


@contextlib.contextmanager
def without_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Streams, process groups, pinned pages and neighbours are what no engine needs to be built."""
    with monkeypatch.context() as patch:
        patch.setattr(dist, "new_group", lambda *given, **names: dist.ProcessGroup(0, 1))
        patch.setattr(meshes, "_make_communicators", lambda *given, **names: None)
        patch.setattr(devices, "new_stream", lambda device: object())
        patch.setattr(devices, "pin", lambda memory, device: None)
        patch.setattr(devices, "unpin", lambda memory, device: None)
        patch.setattr(build, "all_gather_object", lambda one, axis: [one] * axis.size)
        patch.setattr(build, "raise_on_all_ranks", lambda axis: contextlib.nullcontext())
        patch.setattr(build, "require_memory", lambda *given: None)
        yield


def built(config: Config, world: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, Made]:
    """The engine of a rank, as on a device, and what counts its storages."""
    with without_devices(monkeypatch):
        mesh = replace(build_mesh(config, rank=rank, world_size=world, device=torch.device("cpu")), device=META)
        stages = build_stages(config, replace(mesh, device=torch.device("cpu")))
        with Made() as made:
            engine = build_optimizer(config, stages.values(), mesh, worker_factory=NoWorker)  # type: ignore[arg-type]
    live = made.storages.live
    seen = set[int]()
    return Engine(engine, live, {name: made.storages.of(tensors, seen) for name, tensors in held_memory(engine).items()}), made


def check(config: Config, world: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Compare each component, and their sum with everything that lives."""
    found, _ = built(config, world, rank, monkeypatch)
    plan = MemoryPlan(config, world)
    mesh = found.engine.mesh
    bucket_plan = rank_bucket_plan(config, dp=mesh.dp.size, tp_rank=mesh.tp.rank, rank=mesh.pp.rank)
    expected = state_bytes(engine_options(config), bucket_plan, tp=mesh.tp.size) | {"staging": plan.staging(mesh.pp.rank)}
    assert {name: found.components.get(name, 0) for name in expected} == expected
    assert found.live == sum(expected.values()) == plan.state(mesh.pp.rank)
    return found


SPARSE = tuple((EXPERTS | {"decoder_sparse_step": 2}).items())


def layouts() -> Iterator[Layout]:
    """Every option that changes what is allocated."""
    for strategy in STRATEGIES:
        for reduce_bf16 in (False, True):
            yield Layout(dp=4, strategy=strategy, reduce_bf16=reduce_bf16, bf16=True)
        yield Layout(strategy=strategy, reduce_bf16=True)
        yield Layout(dp=4, strategy=strategy, reduce_bf16=True, sums_wide=True, bf16=True)
        yield Layout(dp=6, shard_size=2 * (strategy != "no_shard"), strategy=strategy, reduce_bf16=True, sums_wide=True)
        yield Layout(dp=2, cp=2, strategy=strategy, fp16=True, reduce_bf16=True)
        yield Layout(dp=2, strategy=strategy, fp64=True, reduce_bf16=True)
        yield Layout(dp=2, strategy=strategy, lora=4, bf16=True, reduce_bf16=True)
        yield Layout(dp=2, strategy=strategy, freeze=("model.embed_tokens.*", "model.layers.1.*"), bf16=True, reduce_bf16=True)
        yield Layout(dp=2, strategy=strategy, freeze=("norms",), clip=0.0, early=True)
        yield Layout(tp=2, sp=True, dp=2, strategy=strategy, tied=True, reduce_bf16=True)
        yield Layout(tp=4, kv_heads=2, dp=2, strategy=strategy, bf16=True)
        yield Layout(pp=2, dp=2, strategy=strategy, tied=True, microbatches=4, bf16=True, reduce_bf16=True)
        yield Layout(pp=2, dp=2, strategy=strategy, virtual=2, schedule="interleaved", microbatches=4)
        yield Run(dp=4, ep=2, strategy=strategy, bf16=True, reduce_bf16=True, fields=SPARSE)
        yield Run(tp=2, sp=True, dp=3, ep=3, strategy=strategy, reduce_bf16=True, fields=SPARSE)
        yield Run(dp=4, ep=2, strategy=strategy, bf16=True, reduce_bf16=True, offload=replace(EXACT, optimizer_offload_fraction=0.6), fields=SPARSE)
        yield Layout(dp=2, strategy=strategy, bucket=10**9, reduce_bf16=True)
        yield Layout(dp=2, strategy=strategy, bf16=True, offload=EXACT, reduce_bf16=True)
        yield Layout(dp=2, strategy=strategy, bf16=True, offload=replace(EXACT, optimizer_offload_fraction=0.4))
        yield Layout(dp=2, strategy=strategy, offload=replace(EXACT, offload_speculative=True), lora=4)
    for strategy in STRATEGIES[1:]:
        for shard_size in (1, 2):
            yield Layout(dp=4, shard_size=shard_size, strategy=strategy, bf16=True, reduce_bf16=True)
        for shard_size in (2, 4):
            yield Run(dp=8, ep=2, shard_size=shard_size, strategy=strategy, bf16=True, reduce_bf16=True, fields=SPARSE)
    for slots in ("1", "2", "3", "all"):
        for grad_slots in (1, 2, 3):
            yield Layout(dp=2, strategy="optim_grads_params", slots=slots, grad_slots=grad_slots, bf16=True, reduce_bf16=True)
    for grad_slots in (1, 2, 3):
        yield Layout(dp=2, strategy="optim_grads", grad_slots=grad_slots, bf16=True, graphs=True)


@pytest.mark.few(4)
@pytest.mark.parametrize("layout", list(layouts()), ids=lambda layout: f"{layout.name} {layout.bucket} {layout.clip:g}")
def test_allocated_is_planned(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every rank of the pipeline, and of tp. What is pinned on the host too."""
    config = layout.sized()
    for stage in range(layout.pp):
        for rank in range(layout.tp):
            first = stage * (layout.world_size // layout.pp)
            engine = check(config, layout.world_size, first + rank, monkeypatch).engine
            offload = MemoryPlan(config, layout.world_size).offload(stage)
            rules = [rule for rule in engine.rules.distinct if isinstance(rule, ExactOffload)]
            assert [rule.nbytes for rule in rules] == ([] if offload is None else [offload.held])


def muon_layouts() -> Iterator[MuonLayout]:
    for strategy in STRATEGIES:
        yield MuonLayout(dp=4, strategy=strategy, bf16=True)
        yield MuonLayout(tp=2, dp=2, strategy=strategy, tied=True, bf16=True)
    yield MuonLayout(tp=4, kv_heads=2, dp=2)
    yield MuonLayout(pp=2, dp=2, microbatches=2, fp64=True)
    yield MuonLayout(dp=4, shard_size=2)
    yield MuonLayout(experts=4, dp=4, ep=2, strategy="optim_grads", bf16=True)
    yield MuonLayout(experts=4, tp=2, sp=True, dp=2)


@pytest.mark.parametrize("layout", list(muon_layouts()), ids=lambda layout: layout.name)
def test_muon(layout: MuonLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every rank, also those that own fewer matrices than others."""
    for rank in range(layout.world_size):
        found = check(layout.sized(), layout.world_size, rank, monkeypatch)
        assert found.components["update buffers"] > 0


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kept", [("bf16", "bf16"), ("fp32", "bf16")], ids=" ".join)
def test_moments_in_bf16(strategy: Strategy, kept: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    layout = MomentLayout(dp=2, strategy=strategy, bf16=True, kept=kept)
    found = check(layout.sized(), layout.world_size, 0, monkeypatch)
    assert found.components["moments"] * 4 == found.components["master weights"] * sum({"fp32": 4, "bf16": 2}[name] for name in kept)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kept", [("8bit", "8bit"), ("bf16", "8bit")], ids=" ".join)
def test_moments_in_bytes(strategy: Strategy, kept: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """68 bytes for 64 elements of a matrix; norms keep fp32."""
    layout = MomentLayout(dp=2, strategy=strategy, bf16=True, kept=kept)
    found = check(layout.sized(), layout.world_size, 0, monkeypatch)
    masters = found.engine.masters
    norms = sum(len(m) for m, b in zip(masters, found.engine.bucket_plan.buckets, strict=True) if b.kind.resident)
    matrices = sum(map(len, masters)) - norms
    each = {"8bit": 68, "bf16": 128}
    assert found.components["moments"] == sum(matrices // 64 * each[name] + norms * (2 if name == "bf16" else 4) for name in kept)
    for rank in range(layout.world_size):
        check(replace(layout, tp=2, dp=1, tied=True).sized(), 2, rank, monkeypatch)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_averaged_weights(strategy: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 the shard is not its own master: the model is trained with other weights."""
    for layout in (AveragedLayout(dp=2, strategy=strategy), AveragedLayout(dp=2, strategy=strategy, bf16=True, tied=True)):
        found = check(layout.sized(), layout.world_size, 0, monkeypatch)
        assert found.components["master weights"] * 2 == found.components["moments"] > 0
    check(AveragedLayout(pp=2, dp=2, fp64=True).sized(), 4, 3, monkeypatch)


@pytest.mark.parametrize(
    "layout",
    [
        AveragedLayout(),
        AveragedLayout(fp64=True),
        *(MomentLayout(kept=kept) for kept in (("bf16", "bf16"), ("8bit", "8bit"), ("fp32", "8bit"))),
    ],
    ids=lambda layout: f"{type(layout).__name__} {getattr(layout, 'kept', '')} {layout.name}",
)
def test_an_update_needs_what_is_planned(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside everything that lives as long as the engine."""
    config = layout.sized()
    found, made = built(config, 1, 0, monkeypatch)
    engine = found.engine
    one, zero = torch.ones((), device=META), torch.zeros((), device=META)
    planned = MemoryPlan(config, 1).update_bytes(0)
    with made:
        made.storages.peak = before = made.storages.live
        for bucket in engine.gradients.trainable:
            engine.rules.by_bucket[bucket].step(bucket, engine.gradients.shards[bucket], scale=one, skip=zero, lr=1e-3)
    # Numbers of a step come on top.
    assert 0.7 * planned < made.storages.peak - before < planned + 4096
    assert made.storages.live == before


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_groups_of_parameters(strategy: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group has slots of its own."""
    for layout in (GroupLayout(dp=2, strategy=strategy, bf16=True), GroupLayout(tp=2, dp=2, strategy=strategy, tied=True, offload=EXACT)):
        for rank in range(layout.world_size):
            check(layout.sized(), layout.world_size, rank, monkeypatch)


class Backend:
    """What torch's backend of a communicator does with memory pools."""

    mem_allocator = "NCCL's"

    def __init__(self, number: int, done: list[str]) -> None:
        self._number, self._done = number, done

    def register_mem_pool(self, pool: str) -> None:
        self._done.append(f"{self._number} registers {pool}")

    def deregister_mem_pool(self, pool: str) -> None:
        self._done.append(f"{self._number} takes {pool} back")


@pytest.mark.tries("nccl_register_buffers")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_travels_and_nothing_else_is_made_in_registered_memory(strategy: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole parameters and gradients, their shards, and what casts them: in the pool that every communicator knows once all of it is made,
    until the engine is closed."""
    layout = Layout(dp=4, strategy=strategy, shard_size=2 * (strategy != "no_shard"), bf16=True, reduce_bf16=True)
    config = layout.sized()
    config = replace(config, parallel=replace(config.parallel, nccl_register_buffers=True))
    done, backends, pooled = list[str](), dict[int, Backend](), list[int]()

    @contextlib.contextmanager
    def use_pool(pool: str, device: torch.device) -> Iterator[None]:
        assert device == META
        [mode] = (mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Made))
        before = mode.storages.live
        yield
        pooled.append(mode.storages.live - before)
        done.append(f"made in {pool}")

    def backend(group: dist.ProcessGroup, device: torch.device) -> Any:
        if device != META:
            return SimpleNamespace(name=lambda: "gloo")
        return backends.setdefault(id(group), Backend(len(backends), done))

    with monkeypatch.context() as patch:
        patch.setattr(dist.ProcessGroup, "_get_backend", backend)
        patch.setattr(torch.cuda, "MemPool", lambda allocator: f"a pool of {allocator}")
        patch.setattr(torch.cuda, "use_mem_pool", use_pool)
        engine, _ = built(config, 4, 0, patch)
        engine.engine.close()
    travelling = sum(engine.components.get(name, 0) for name in ("parameters", "parameter shards", "gradients", "staging"))
    assert pooled == [travelling] and travelling < engine.live
    assert len(backends) == (1 if strategy == "no_shard" else 2)
    expected = ["made in {}", *(f"{n} registers {{}}" for n in range(len(backends))), *(f"{n} takes {{}} back" for n in range(len(backends)))]
    assert done == [line.format("a pool of NCCL's") for line in expected]


def module_cases() -> Iterator[tuple[Config, int, bool]]:
    """(configuration, processes, find_unused) of engines around a user's model: every option that changes what is allocated."""
    for strategy in STRATEGIES:
        for shard_size in (0, 2) if strategy != "no_shard" else (0,):
            parallel = ParallelConfig(
                data_parallel_sharding_strategy=strategy, data_parallel_shard_size=shard_size, grad_reduce_in_bf16=True
            )
            for find_unused in (False, True):
                for bf16 in (False, True):
                    yield Config(parallel=parallel, training=TrainingConfig(bf16=bf16)), 4, find_unused
            yield Config(parallel=parallel, training=TrainingConfig(bf16=True), offload=EXACT), 4, False
            yield Config(parallel=parallel, training=TrainingConfig(bf16=True)), 4 if shard_size else 1, True


SHAPES: dict[str, tuple[int, ...]] = {
    "root.weight": (9, 4),
    **{f"layers.{n}.{leaf}": shape for n in range(4) for leaf, shape in {"conv": (6, 5, 3, 3), "weight": (8, 11), "bias": (8,)}.items()},
    "number": (),
}
GROUPS = (UpdateOptions(adam_beta2=0.95, weight_decay=0.1), UpdateOptions(adam_beta1=0.8, adam_eps=1e-5, weight_decay=0.3))


def units() -> list[UnitSpec]:
    """Layers with convolutions, which are the second group, between parts of the root."""

    def spec(name: str) -> ParamSpec:
        shape = SHAPES[name]
        part = HFSlice(name, shape, 0, shape[0] if shape else 1)
        return ParamSpec(name, shape, (part,), decay=len(shape) > 1, group=int("conv" in name), resident=len(shape) < 2)

    layers = [UnitSpec(f"layers.{n}", tuple(spec(name) for name in SHAPES if name.startswith(f"layers.{n}."))) for n in range(4)]
    ends = [UnitSpec(name, (spec(name),), is_root_part=True) for name in ("root.weight", "number")]
    return [ends[0], *layers, ends[1]]


@pytest.mark.parametrize(("config", "world", "find_unused"), list(module_cases()))
def test_around_a_model_that_is_not_ours(config: Config, world: int, find_unused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = config.parallel
    options = replace(
        engine_options(config), param_slots=2, bucket_size=400, groups=GROUPS, grad_divisor=float(world), find_unused=find_unused
    )
    plan = module_bucket_plan(
        units(), options, shards=shard_count(parallel, world))
    for rank in range(world):
        with without_devices(monkeypatch):
            mesh = replace(build_mesh(config, rank=rank, world_size=world, device=torch.device("cpu")), device=META)
            with Made() as made:
                engine = build_engine(
                    options,
                    plan,
                    mesh,
                    attach=lambda placed, view, handle: None,
                    worker_factory=NoWorker,  # type: ignore[arg-type]
                )
        expected = state_bytes(options, plan)
        expected |= {"staging": staging_bytes(options, plan, dp=world)}
        seen = set[int]()
        found = {name: made.storages.of(tensors, seen) for name, tensors in held_memory(engine).items()}
        assert {name: found.get(name, 0) for name in expected} == expected
        assert made.storages.live == sum(expected.values())


def zenflow_layouts() -> Iterator[tuple[Layout, ZenFlowConfig]]:
    """Every option of ZenFlow that changes what is allocated, and layouts that cut rows."""
    for one in (FOUR, OVERLAP, EVERY, replace(FOUR, zenflow_update_interval="auto"), replace(FOUR, zenflow_topk_ratio=0.1)):
        yield Layout(bf16=True), one
        yield Layout(dp=3, strategy="optim_grads", bf16=True, bucket=10**9), one
    for layout in (
        Layout(),
        Layout(fp16=True),
        Layout(fp64=True),
        Layout(lora=4),
        Layout(tied=True, strategy="optim_grads_params"),
        Layout(dp=2, strategy="optim_grads_params", slots="2", bf16=True, reduce_bf16=True),
        Layout(tp=2, dp=2, bf16=True),
        Layout(tp=4, dp=2, bf16=True),
        Layout(pp=2, microbatches=2, bf16=True),
    ):
        yield layout, replace(OVERLAP, zenflow_update_interval="auto")


@pytest.mark.few(4)
@pytest.mark.parametrize(("layout", "zenflow"), list(zenflow_layouts()))
def test_zenflow(layout: Layout, zenflow: ZenFlowConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte: on every rank before columns are selected, and with the selected ones where no rank has parts of rows."""
    config = zen(layout, zenflow).sized()
    options = engine_options(config)
    for rank in range(layout.world_size):
        found, made = built(config, layout.world_size, rank, monkeypatch)
        engine, mesh = found.engine, found.engine.mesh
        bucket_plan = rank_bucket_plan(config, dp=mesh.dp.size, tp_rank=mesh.tp.rank, rank=mesh.pp.rank)
        shard_rank = mesh.dp_shard.rank
        state = state_bytes(options, bucket_plan, shard_rank=shard_rank)
        planned = sum(state.values()) + staging_bytes(options, bucket_plan, dp=mesh.dp.size)
        plan = offload_plan(options, bucket_plan, shard_rank=shard_rank)
        assert plan is not None
        [rule] = [rule for rule in engine.rules.distinct if isinstance(rule, ZenFlow)]
        assert rule.nbytes == plan.held
        if rule._auto is not None:
            # torch.tensor makes these, which is no operator.
            for numbers in (rule._auto._hot_count, rule._auto._cold_count):
                made.storages.see(numbers)
        with monkeypatch.context() as patch:
            patch.setattr(plans, "hot_column_count", lambda ratio, total: 0)
            without = state_bytes(options, bucket_plan, shard_rank=shard_rank)
        assert made.storages.live == planned - sum(state.values()) + sum(without.values())
        for column in rule.column_state():
            hot = torch.arange(column.total) < hot_column_count(zenflow.zenflow_topk_ratio, column.total)
            column.selected.copy_(hot[column.first : column.first + column.selected.numel()])
        with made:
            rule._distribute()
        if layout.world_size == layout.pp:
            assert made.storages.live == planned


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_llama3_8b(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its real size in bf16. The largest bucket is the embedding, 128,256 x 4096, or the head: two casts of it in bf16, 2 bytes each."""
    parallel = ParallelConfig(grad_reduce_in_bf16=True, data_parallel_sharding_strategy=strategy)
    training = TrainingConfig(seq_length=4096, micro_batch_size=1, global_batch_size=8, train_iters=1, bf16=True)
    config = resolve(Config(PRESETS["llama3-8b"], parallel, training), 8)
    assert check(config, 8, 3, monkeypatch).components["staging"] == 2 * 128_256 * 4096 * 2
