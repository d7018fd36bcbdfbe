"""Exact offload: the bits of a run that waits for every update, and of one whose optimizer never left the device; nobody waits for more
than its own bucket; what fails has a name."""

from __future__ import annotations

import os
import resource
import threading
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from megatron_llama.checkpoint import native
from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.config.schema import Config, TrainingConfig
from megatron_llama.engine.comm.streams import Future
from megatron_llama.engine.comm.worker import Task
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.offload.build import Neighbour, place_among
from megatron_llama.engine.offload.copies import Copy, HostCopies
from megatron_llama.engine.offload.exact import ExactOffload
from megatron_llama.engine.offload.pinned_buffer import PinnedBuffer
from megatron_llama.engine.offload.worker import HostWorker, physical_cores
from megatron_llama.engine.offload_options import OffloadConfig
from megatron_llama.engine.pieces import held_memory, step_counts
from megatron_llama.engine.plan.memory import state_bytes
from megatron_llama.engine.plan.offload import offload_plan
from megatron_llama.engine.replicas import check_replicas
from megatron_llama.engine.rules.update_rule import adamw_step
from megatron_llama.errors import OffloadError, TrainingError
from megatron_llama.launch.launcher import Place
from megatron_llama.model.llama import build_stages
from megatron_llama.model.presets import PRESETS
from megatron_llama.pipeline.build import build_optimizer
from megatron_llama.pipeline.plan.run_engine import engine_options, rank_bucket_plan
from megatron_llama.train.setup.resolve import resolve
from torch import Tensor

from tests.engine.test_engine import deliver, gradients, parameters_of, same, state_of
from tests.harness import Cluster, WorkerError
from tests.parallel.cases import OPTIMIZER, Layout, Trainer, digest, trainer, whole_parameters

SINGLE = Place(0, 1, 0)
EXACT = OffloadConfig(optimizer_offload="exact")
SPECULATIVE = replace(EXACT, offload_speculative=True)
PARAMS = "optim_grads_params"
FIFTY = 50
MIXED_CLIP = 1.3
"""Some steps of the runs here are clipped by it, others are not."""


def rule_of(run: Trainer) -> ExactOffload:
    """What updates on the host."""
    (rule,) = [rule for rule in run.optimizer.rules.distinct if isinstance(rule, ExactOffload)]
    return rule


@dataclass(frozen=True)
class Outcome:
    """What a run leaves, and how its speculative updates ended."""

    digest: str
    """Of whole parameters, masters, both moments and counters."""
    norms: tuple[float, ...]
    kept: int = 0
    redone: int = 0


def outcome(place: Place, layout: Layout) -> Outcome:
    """Of a whole run."""
    run = trainer(place, layout)
    norms = [run.step(index)[1] for index in range(layout.steps)]
    speculation = rule_of(run).speculation if layout.offload != OffloadConfig() else None
    found = Outcome(digest_of(run), tuple(norm.item() for norm in norms), *((speculation.kept, speculation.redone) if speculation else ()))
    run.optimizer.close()
    return found


def digest_of(run: Trainer) -> str:
    state = [tensor.reshape(-1) for tensor in state_of(run.optimizer)]
    return digest([*state, *(parameter.clone() for _, parameter in whole_parameters(run))])


def outcomes(place: Place, layouts: list[Layout]) -> list[Outcome]:
    return [outcome(place, layout) for layout in layouts]


def ways(layout: Layout) -> list[Layout]:
    """Blocking, exact, and exact with speculation."""
    offloaded = replace(layout, offload=EXACT)
    return [replace(offloaded, blocking=True), offloaded, replace(layout, offload=SPECULATIVE, early=True)]


@pytest.mark.long
@pytest.mark.tries("offload_speculative")
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, strategy="no_shard", bf16=True, layers=2),
        Layout(dp=2, strategy="optim_grads_params", layers=2),
    ],
    ids=lambda layout: layout.name,
)
def test_fifty_steps_that_are_clipped_now_and_then(layout: Layout, cluster: Cluster) -> None:
    layout = replace(layout, steps=FIFTY, clip=MIXED_CLIP)
    found = cluster.run(layout.world_size, outcomes, ways(layout) if layout.world_size == 2 else ways(layout)[::2], timeout=300.0)
    for blocking, *others in found:
        assert min(blocking.norms) < MIXED_CLIP < max(blocking.norms), "clipping is to be active on some steps"
        assert all((other.digest, other.norms) == (blocking.digest, blocking.norms) for other in others)
    assert any(others[-1].kept > 0 < others[-1].redone for others in found), "both ends of speculation"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(bf16=True, clip=0.0, early=True),
        Layout(dp=2, strategy=PARAMS, clip=0.0, early=True, microbatches=2),
        Layout(dp=4, strategy="optim_grads", shard_size=2, microbatches=2, clip=0.0, early=True, bf16=True),
        Layout(cp=2, reduce_bf16=True),
        Layout(tp=2, kv_heads=1, tied=True),
        Layout(pp=2, tied=True, microbatches=2, schedule="zb-h1"),
        Layout(dp=2, lora=4, strategy=PARAMS),
        Layout(dp=2, freeze=("model.layers.[01].*",), strategy=PARAMS, clip=0.0, early=True),
        Layout(dp=2, fp16=True, loss_scale=1000.0),
        Layout(fp64=True),
    ],
    ids=lambda layout: layout.name,
)
def test_everything_that_is_trained_gets_the_same_bits(layout: Layout, cluster: Cluster) -> None:
    """As those of an optimizer on the device. Also with a part of it there, and little to take back."""
    half = replace(SPECULATIVE, optimizer_offload_fraction=0.5, speculation_bytes=200_000)
    layouts = [replace(layout, steps=3, layers=2, **change) for change in ({}, {"offload": EXACT}, {"offload": half, "early": True})]
    for device, exact, halved in cluster.run(layout.world_size, outcomes, layouts):
        assert device.digest == exact.digest == halved.digest
        assert device.norms == exact.norms == halved.norms


def resharded(place: Place, layouts: list[Layout], folder: str) -> list[str]:
    """Digests of each layout's run: three steps, saved, and read by the next one."""
    found = []
    for number, layout in enumerate(layouts):
        run = trainer(place, layout)
        config = layout.config()
        if number:
            native.load(folder, run.optimizer, run.mesh, config.model)
        for index in range(3 * number, 3 * number + 3):
            run.step(index)
        native.save(folder, run.optimizer, run.mesh, TrainState(3 * number + 3, 0), config)
        run.step(99)
        found.append(digest_of(run))
        run.optimizer.close()
    return found


@pytest.mark.long
def test_saved_resumed_and_resharded(cluster: Cluster, tmp_path: Path) -> None:
    chain = [Layout(dp=2), Layout(dp=2, strategy=PARAMS), Layout(tp=2, sp=True), Layout(pp=2)]
    chain = [replace(layout, bf16=True, early=True, layers=2) for layout in chain]
    blocking = [replace(layout, offload=EXACT, blocking=True) for layout in chain]
    exact = [replace(layout, offload=SPECULATIVE) for layout in chain]
    runs = [cluster.run(2, resharded, layouts, str(tmp_path / name)) for name, layouts in (("blocking", blocking), ("exact", exact))]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("offload", [EXACT, SPECULATIVE], ids=["waiting", "speculating"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(poison: float, offload: OffloadConfig) -> None:
    run, twin = (trainer(SINGLE, Layout(offload=one, clip=1e9)) for one in (offload, OffloadConfig()))
    for each in (run, twin):
        deliver_announced(each, gradients(each, 0, scale=0.1))
    before = state_of(run.optimizer)
    bad = gradients(run, 1, scale=0.1)
    bad["model.layers.2.mlp.down_proj.weight"][3, 4] = poison
    assert float(deliver_announced(run, bad)) == 1.0
    assert same(before, state_of(run.optimizer))
    for each in (run, twin):
        assert float(deliver_announced(each, gradients(each, 2, scale=0.1))) == 0.0
    assert same(state_of(run.optimizer), state_of(twin.optimizer))


def deliver_announced(run: Trainer, values: dict[str, Tensor]) -> Tensor:
    """A whole step with these gradients; whether it was skipped."""
    run.optimizer.announce_step(1e-3, clip=run.layout.clip)
    deliver(run, values)
    return run.optimizer.step(1e-3, clip=run.layout.clip).skipped


class Gated(HostCopies):
    """Copies to the device wait for a gate, each for that of its target."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: dict[int, threading.Event] = {}

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See HostCopies."""
        gate = self.gates.get(target.data_ptr())
        assert gate is None or gate.wait(timeout=60)
        super().copy(target, source)


@pytest.mark.tries("optimizer_offload")
def test_a_layer_waits_for_its_own_bucket_alone() -> None:
    """The embedding and the first layers can run while the weights of the last ones are still on the host."""
    copies = Gated()
    run = trainer(SINGLE, Layout(offload=EXACT, bucket=1), copies=copies)
    engine = run.optimizer
    run.runtime.step(run.batches(0))
    order = engine.bucket_plan.forward_order
    last = order[-1]
    gate = copies.gates[engine.parameters.shards[last].data_ptr()] = threading.Event()
    engine.step(1e-3, clip=1.0)
    before = parameters_of(run)["lm_head.weight"].detach().clone()
    for bucket in order[:-1]:
        engine.parameters.wait_unsharded(bucket, "any")
    late = threading.Thread(target=engine.parameters.wait_unsharded, args=(last, "any"))
    late.start()
    assert torch.equal(parameters_of(run)["lm_head.weight"], before) and late.is_alive()
    gate.set()
    late.join(60)
    assert not late.is_alive() and not torch.equal(parameters_of(run)["lm_head.weight"], before)


def reduced_while_the_host_is_busy(place: Place) -> tuple[list[str], list[str], list[bool]]:
    """What was issued in a step before the host began to update, what after that, and whether it was so."""
    run, busy, waited = (trainer(place, Layout(dp=2, offload=EXACT, clip=0.0, strategy="optim_grads")), threading.Event(), list[bool]())
    run.step(0)
    run.optimizer.settle()
    run.optimizer.announce_step(OPTIMIZER.lr, clip=0.0)
    rule_of(run)._worker.put(Task(lambda: waited.append(busy.wait(timeout=60))), priority=-1)
    run.mesh.recorder.events = events = []
    run.runtime.step(run.batches(1))
    run.optimizer.gradients.finish_all()
    before = [event for event in events if event.startswith(("gather", "reduce"))]
    busy.set()
    run.optimizer.step(OPTIMIZER.lr, clip=0.0)
    run.optimizer.settle()
    return before, [event for event in events[len(before) :] if event.startswith("gather")], waited


@pytest.mark.long
def test_nothing_else_stands_behind_an_update(cluster: Cluster) -> None:
    """All gradients are reduced while the host does other things; gathers follow in the order in which it then updates."""
    layout = rank_bucket_plan(Layout(dp=2).config(), dp=2)
    for before, after, waited in cluster.run(2, reduced_while_the_host_is_busy):
        assert before == [f"reduce {bucket.index}" for bucket in layout.buckets] and waited == [True]
        assert after == [f"gather {bucket}" for bucket in layout.forward_order]


class Noting(HostCopies):
    """What is copied to the device, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[int] = []

    def to_device(self, target: Tensor, source: Tensor, *, after: Future) -> Copy:
        """See HostCopies."""
        self.order.append(target.data_ptr())
        return super().to_device(target, source, after=after)


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_updates_run_in_the_order_of_the_next_forward_pass(clip: float) -> None:
    """Also those that were ready in the order of reductions, where the host has not come to them when backward is over."""
    copies, busy = Noting(), threading.Event()
    run = trainer(SINGLE, Layout(offload=EXACT, bucket=1, clip=clip), copies=copies)
    engine = run.optimizer
    rule_of(run)._worker.put(Task(lambda: busy.wait(timeout=60)), priority=-1)
    deliver_announced(run, gradients(run, 0, scale=0.1))
    busy.set()
    engine.settle()
    assert copies.order == [engine.parameters.shards[bucket].data_ptr() for bucket in engine.bucket_plan.forward_order]


class Broken(HostCopies):
    """From some copy on the machine has no more of them."""

    def __init__(self, good: int) -> None:
        super().__init__()
        self._left = good

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See HostCopies."""
        self._left -= 1
        if self._left < 0:
            raise MemoryError("a page of host memory is gone")
        super().copy(target, source)


@pytest.mark.parametrize("good", [1, 12, 40])
def test_a_worker_that_dies_has_a_name_and_leaves_the_checkpoint(good: int, tmp_path: Path) -> None:
    run = trainer(SINGLE, Layout(offload=SPECULATIVE, bucket=1, early=True, bf16=True), copies=Broken(good))
    native.save(tmp_path, run.optimizer, run.mesh, TrainState(0, 0), run.layout.config())
    with pytest.raises(
        OffloadError, match=r"^optimizer offload, bucket \d+ of .*: got MemoryError: a page of host memory is gone, expected"
    ):
        for index in range(4):
            run.step(index)
        run.optimizer.settle()
    run.optimizer.close()
    fresh, twin = (trainer(SINGLE, Layout(offload=EXACT, bf16=True)) for _ in range(2))
    native.load(tmp_path, fresh.optimizer, fresh.mesh, run.layout.config().model)
    assert same(state_of(fresh.optimizer), state_of(twin.optimizer))


def dies_on_the_last_rank(place: Place) -> None:
    run = trainer(place, Layout(dp=2, offload=EXACT), copies=Broken(10 if place.rank else 10**9))
    for index in range(3):
        run.step(index)


@pytest.mark.long
def test_a_worker_that_dies_ends_all_ranks(cluster: Cluster) -> None:
    with pytest.raises(WorkerError, match=r"rank 1: (.*\n)*.*OffloadError: optimizer offload, bucket"):
        cluster.run(2, dies_on_the_last_rank)


def refused_memory(place: Place) -> str:
    """What a buffer says that is larger than the address space the system allows."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 34, before[1]))
    try:
        PinnedBuffer(1 << 33, torch.float32, torch.device("cpu"), "weights and moments")
    except OffloadError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    return ""


def test_memory_that_the_system_refuses(cluster: Cluster) -> None:
    (said,) = cluster.run(1, refused_memory)
    assert (
        said.startswith("host memory for weights and moments: got 34,359,738,368 bytes, which the system refused: ")
        and "; offload less" in said
    )


def measured(place: Place, layout: Layout) -> tuple[int, int, int, int]:
    """Bytes that the rule holds on the host, that the engine holds on the device, and that a step copies each way."""
    run = trainer(place, layout)
    run.step(0)
    run.optimizer.settle()
    rule, engine = rule_of(run), run.optimizer
    before = rule.to_host_bytes, rule.to_device_bytes
    run.step(1)
    engine.settle()
    theirs = [bucket for bucket in engine.gradients.trainable if engine.rules.by_bucket[bucket] is rule]
    on_host = {
        tensor.untyped_storage().data_ptr() for bucket in theirs for tensor in (engine.masters[bucket], *rule.state(bucket).values())
    }
    tensors = [tensor for component in held_memory(engine).values() for tensor in component]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    storages = {address: size for address, size in storages.items() if address not in on_host}
    return (rule.nbytes, sum(storages.values()), rule.to_host_bytes - before[0], rule.to_device_bytes - before[1])


@pytest.mark.few(1)
@pytest.mark.tries("speculation_bytes")
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, offload=SPECULATIVE),
        Layout(dp=2, strategy=PARAMS, bf16=True, offload=replace(SPECULATIVE, speculation_bytes=300_000)),
        Layout(dp=2, strategy="optim_grads", bf16=True, offload=replace(EXACT, optimizer_offload_fraction=0.4)),
        Layout(dp=2, lora=4, bf16=True, offload=EXACT),
    ],
    ids=lambda layout: layout.name,
)
def test_what_is_held_and_copied_is_what_the_plan_says(layout: Layout, cluster: Cluster) -> None:
    config = layout.config()
    plan, shape = (offload_plan(engine_options(config), rank_bucket_plan(config, dp=2)), rank_bucket_plan(config, dp=2))
    assert plan is not None
    for held_there, held_here, to_host, to_device in cluster.run(2, measured, layout):
        assert held_there == plan.held
        assert held_here == sum(state_bytes(engine_options(config), shape).values())
        assert (to_host, to_device) == (plan.to_host, plan.to_device)


@pytest.mark.tries("optimizer_offload_fraction")
def test_a_fraction_leaves_the_first_layers_on_the_device() -> None:
    sizes = {}
    for fraction in (0.0, 0.3, 1.0):
        layout = Layout(bucket=1, offload=replace(EXACT, optimizer_offload_fraction=fraction))
        plan, shape = (offload_plan(engine_options(layout.config()), rank_bucket_plan(layout.config(), dp=1)), rank_bucket_plan(layout.config(), dp=1))
        assert plan is not None
        on_host = [bucket in plan.buckets for bucket in shape.forward_order]
        assert on_host == sorted(on_host), "a forward pass needs those of the device first"
        sizes[fraction] = sum(shape.buckets[bucket].numel for bucket in plan.buckets) / shape.numel
    assert sizes[0.0] == 0.0 and sizes[1.0] == 1.0 and 0.3 <= sizes[0.3] < 0.5


def cores_of(run: Trainer) -> set[int]:
    """The processors that the worker may use, as it finds them."""
    found: set[int] = set()
    job = Task(lambda: found.update(os.sched_getaffinity(0)))
    rule_of(run)._worker.put(job, priority=0)
    job.wait()
    return found


@pytest.mark.tries("offload_cores")
def test_the_worker_runs_where_it_is_told() -> None:
    here = physical_cores()
    for option, expected in (("auto", set(here)), (str(here[-1]), {here[-1]})):
        assert cores_of(trainer(SINGLE, Layout(offload=replace(EXACT, offload_cores=option)))) == expected


def test_processors_that_the_system_refuses_are_an_error_at_once() -> None:
    """Without it the thread would end, and everybody would wait for it."""
    with pytest.raises(
        OffloadError, match=r"^--offload-cores: got 8000, 8001, refused: .*, expected processors that a thread may choose; "
    ):
        HostWorker((8000, 8001))


def test_ranks_divide_the_processors_that_they_share() -> None:
    """Those of a machine, unless a launcher has bound each rank, or each pair of them, to some."""
    free, bound = (tuple(Neighbour("a", cores, 0) for cores in sets) for sets in (((0, 1, 2, 3),) * 4, ((0, 1), (2, 3), (0, 1), (2, 3))))
    away = Neighbour("b", (0, 1), 0)
    assert [place_among((away, *free), rank, apart=True) for rank in range(5)] == [(0, 1), (0, 4), (1, 4), (2, 4), (3, 4)]
    assert [place_among((away, *bound), rank, apart=True) for rank in range(5)] == [(0, 1), (0, 2), (0, 2), (1, 2), (1, 2)]
    assert [place_among((away, *bound), rank, apart=False) for rank in range(5)] == [(0, 1), (0, 4), (1, 4), (2, 4), (3, 4)]


def test_threads_change_no_bit() -> None:
    """Parameters and shards start at multiples of 64 elements, and the kernel divides work in units of its own."""
    results = []
    for threads in (1, 2, 3):
        worker, found = HostWorker(threads=threads), list[Tensor]()
        job = Task(partial(updated, found))
        worker.put(job, priority=0)
        job.wait()
        worker.close()
        results.append(found)
    assert all(same(results[0], other) for other in results[1:])


def updated(found: list[Tensor]) -> None:
    generator = torch.Generator().manual_seed(3)
    master, grad, average, square = (torch.randn(64 * 9973, generator=generator) for _ in range(4))
    state = {"exp_avg": average, "exp_avg_sq": square.abs(), "step": torch.tensor(5.0)}
    adamw_step(master, grad, state, OPTIMIZER, decay=0.1, scale=torch.tensor(1.7), skip=torch.tensor(0.0), lr=1e-3)
    found += [master, *state.values()]


def test_a_run_that_goes_back_is_at_its_checkpoint_again(tmp_path: Path) -> None:
    run = trainer(SINGLE, Layout(offload=SPECULATIVE, early=True, bf16=True))
    run.step(0)
    native.save(tmp_path, run.optimizer, run.mesh, TrainState(1, 0), run.layout.config())
    before = state_of(run.optimizer)
    run.step(1)
    run.optimizer.reset()
    assert not any(map(bool, step_counts(run.optimizer))) and not same(before, state_of(run.optimizer))
    native.load(tmp_path, run.optimizer, run.mesh, run.layout.config().model)
    assert same(before, state_of(run.optimizer))


@pytest.mark.long
def test_replicas_on_the_host_are_compared(cluster: Cluster) -> None:
    layout = Layout(dp=4, strategy=PARAMS, shard_size=2, offload=EXACT, bf16=True)
    for said in cluster.run(4, flipped_on_the_host, layout):
        assert "(master) at iteration 7" in said and "on rank 3" in said


def flipped_on_the_host(place: Place, layout: Layout) -> str:
    run = trainer(place, layout)
    run.step(0)
    check_replicas(run.optimizer, run.mesh, 1)
    if place.rank == 3:
        run.optimizer.masters[0][5:6].view(torch.int32).bitwise_xor_(1 << 20)
    try:
        check_replicas(run.optimizer, run.mesh, 7)
    except TrainingError as error:
        return str(error)
    return ""


def test_a_model_that_does_not_fit_is_refused_before_anything_is_allocated() -> None:
    config = resolve(Config(model=PRESETS["llama3.1-405b"], training=TrainingConfig(bf16=True), offload=EXACT), 1)
    config = replace(config, parallel=replace(config.parallel, exchange_chunk_bytes=1 << 30))
    mesh = Mesh.single()
    stages = build_stages(config, mesh).values()
    with pytest.raises(OffloadError, match=r"^--optimizer-offload: got .* free on this machine, expected .* (TiB|GiB) for its 1 rank, "):
        build_optimizer(config, stages, mesh)
