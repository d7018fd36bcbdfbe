"""All ways to shard train the same model, bit for bit where only the order of messages differs; misuse is an error; nothing is
copied on the way to or from a message."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron_llama.engine.exchanges import BucketExchanges
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.engine.param_handle import param_handle_of
from megatron_llama.engine.plan.memory import host_buffer_bytes, squares_bytes, state_bytes
from megatron_llama.engine.plan.overlap import gathered_during_backward, updated_during_backward
from megatron_llama.errors import ConfigError
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.model.llama import build_stages
from megatron_llama.model.nn.functional import Residual
from megatron_llama.model.positions import Positions
from megatron_llama.pipeline.build import build_optimizer
from megatron_llama.pipeline.plan.run_engine import engine_options, rank_bucket_plan
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.harness import Cluster
from tests.parallel.cases import MODEL, OPTIMIZER, STRATEGIES, Layout, Record, Trainer, merged, train, trainer

PARAMS = "optim_grads_params"
WAYS = [Layout(strategy=strategy) for strategy in STRATEGIES[:3]]
WAYS += [Layout(strategy=PARAMS, slots=slots) for slots in ("1", "2", "3", "all")]
WAYS += [Layout(strategy=PARAMS, grad_slots=1), Layout(strategy=PARAMS, prefetch=1), Layout(bucket=1), Layout(bucket=10**9)]


def bits(records: list[Record]) -> list[tuple[tuple[float, ...], tuple[float, ...], str]]:
    """Losses, norms and compute parameters of every rank."""
    return [(record.losses, record.norms, record.parameters) for record in records]


@pytest.mark.long
@pytest.mark.parametrize(
    "shape",
    [
        Layout(dp=2, tied=True, recompute="full", documents=True),
        Layout(dp=2, bf16=True),
        Layout(dp=2, reduce_bf16=True),
        Layout(tp=4, kv_heads=2, sp=True, dp=2),
        Layout(cp=2, dp=2),
    ],
    ids=lambda layout: layout.name,
)
def test_all_ways_to_shard_are_bitwise_equal_with_one_microbatch(cluster: Cluster, shape: Layout) -> None:
    names = ("strategy", "slots", "grad_slots", "prefetch", "bucket")
    ways = WAYS if shape.world_size == 2 and not shape.reduce_bf16 else WAYS[1:5]
    if not shape.reduce_bf16:  # an all-reduce rounds the sums as well
        ways = [WAYS[0], *ways]
    layouts = [replace(shape, **{name: getattr(way, name) for name in names}, steps=3) for way in ways]
    runs = [cluster.run(layout.world_size, train, layout) for layout in layouts]
    weights = [merged(records) for records in runs]
    for layout, records, weight in zip(layouts[1:], runs[1:], weights[1:], strict=True):
        assert bits(records) == bits(runs[0]), layout.name
        assert all(torch.equal(weight[name], value) for name, value in weights[0].items()), layout.name


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [Layout(dp=2), Layout(dp=2, bf16=True), Layout(dp=4, shard_size=2, strategy="optim_grads", microbatches=2)],
    ids=lambda layout: layout.name,
)
def test_updates_during_backward_give_the_same_bits(cluster: Cluster, layout: Layout) -> None:
    late, early = (cluster.run(layout.world_size, train, replace(layout, clip=0.0, steps=5, early=early)) for early in (False, True))
    assert bits(late) == bits(early)


def order_of(place: Place, layout: Layout) -> list[str]:
    """What the engine did in its second step, and when its last backward pass was over."""
    run = trainer(place, layout)
    run.step(0)
    run.optimizer.settle()
    recorder = run.mesh.recorder
    recorder.events = []
    if layout.early:
        run.optimizer.announce_step(OPTIMIZER.lr, clip=layout.clip)
    run.runtime.step(run.batches(1))
    run.optimizer.gradients.finish_all()
    recorder.event("backward is over")
    run.optimizer.step(OPTIMIZER.lr, clip=layout.clip)
    return [event for event in recorder.events if event.startswith(("reduce", "gather", "backward"))]


def test_without_clipping_updates_and_gathers_begin_in_backward(cluster: Cluster) -> None:
    layout = Layout(dp=2, clip=0.0, early=True)
    buckets = rank_bucket_plan(layout.config(), dp=2)
    for events in cluster.run(2, order_of, layout):
        cut = events.index("backward is over")
        early = [int(event.split()[1]) for event in events[:cut] if event.startswith("gather")]
        late = [int(event.split()[1]) for event in events[cut:] if event.startswith("gather")]
        assert early and sorted(early + late) == list(range(len(buckets.buckets)))
        assert all(events.index(f"reduce {bucket}") < events.index(f"gather {bucket}") for bucket in early)
        assert late == [bucket for bucket in buckets.forward_order if bucket in late]


def test_with_clipping_gathers_follow_the_norm_in_forward_order(cluster: Cluster) -> None:
    layout = Layout(dp=2)
    for events in cluster.run(2, order_of, layout):
        cut = events.index("backward is over")
        assert not [event for event in events[:cut] if event.startswith("gather")]
        assert events[cut + 1 :] == [f"gather {bucket}" for bucket in rank_bucket_plan(layout.config(), dp=2).forward_order]


def held(place: Place, layout: Layout) -> tuple[int, int, int]:
    """Elements of parameter slots, of gradient slots, and all bytes that the engine keeps between steps, activations not counted."""
    run = trainer(place, layout)
    run.step(0)
    run.step(1)
    engine = run.optimizer
    engine.settle()
    slots = list(engine.parameters._slots.values())
    gradients = list(engine.gradients._slots.values())
    tensors = [*slots, *gradients, *engine.parameters.shards, *engine.gradients.shards.values(), *engine.masters]
    tensors += [tensor for bucket in engine.gradients.trainable for tensor in engine.rules.by_bucket[bucket].state(bucket).values()]
    scale = engine.loss_scale
    tensors += [engine._squared_norms, engine._total, engine._unclipped_scale, scale.value, scale._clean, scale._overflows]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return (sum(slot.numel() for slot in slots), sum(slot.numel() for slot in gradients), sum(storages.values()))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "layout",
    [
        *(Layout(dp=2, strategy=strategy, bf16=bf16) for strategy in STRATEGIES for bf16 in (False, True)),
        Layout(dp=2, strategy=PARAMS, slots="3", grad_slots=1),
        Layout(dp=4, strategy=PARAMS, shard_size=2),
        Layout(dp=2, strategy=PARAMS, freeze=("model.layers.1.*",)),
        Layout(dp=2, bf16=True, freeze=("model.embed_tokens.*",)),
    ],
    ids=lambda layout: layout.name,
)
def test_what_is_held_is_what_the_dry_run_prints(cluster: Cluster, layout: Layout) -> None:
    plan = rank_bucket_plan(layout.config(), dp=layout.dp)
    for parameters, gradients, total in cluster.run(layout.world_size, held, layout):
        assert parameters == sum(plan.parameter_slot_numel().values())
        assert gradients == sum(plan.gradient_slot_numel().values())
        assert total == sum(state_bytes(engine_options(layout.config()), plan).values())


class Copies(TorchDispatchMode):
    """Bytes that operators copy from or to given storages, by operator. A mode belongs to a thread: it is entered in each."""

    def __init__(self, owned: set[int]) -> None:
        super().__init__()
        self.owned, self.moved = owned, dict[str, int]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in ("copy_", "clone", "_to_copy", "cat", "zero_", "fill_", "contiguous"):
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if any(tensor.untyped_storage().data_ptr() in self.owned for tensor in tensors):
                self.moved[name] = self.moved.get(name, 0) + tensors[0].numel() * tensors[0].element_size()
        return function(*args, **(kwargs or {}))


def copied(place: Place, layout: Layout) -> dict[str, int]:
    """In one step, of everything that the engine owns, in all threads that touch it."""
    run = trainer(place, layout)
    run.step(0)
    engine = run.optimizer
    engine.settle()
    tensors = [
        *engine.parameters.unsharded,
        *engine.parameters.shards,
        *engine.masters,
        *engine.gradients._unsharded.values(),
        *engine.gradients.shards.values(),
    ]
    mode = Copies({tensor.untyped_storage().data_ptr() for tensor in tensors})
    queue: Any = engine.parameters._comm_queue
    threads = (engine._stream.run, engine._stream.issue, queue._worker.submit)
    with mode:
        for put in threads:
            put(mode.__enter__).wait()
        run.step(1)
        engine.settle()
        for put in threads:
            put(lambda: mode.__exit__(None, None, None)).wait()
    return mode.moved


EMBEDDING = 384 * 64 * 4
"""Bytes of its gradient: a sum over rows, whose place is zeroed first, once a round."""


@pytest.mark.long
@pytest.mark.parametrize("layout", [Layout(dp=2, microbatches=4), Layout(dp=4, strategy="no_shard")], ids=lambda layout: layout.name)
def test_no_byte_is_copied_to_or_from_a_message(cluster: Cluster, layout: Layout) -> None:
    for found in cluster.run(layout.world_size, copied, layout):
        # A norm's gradient is a vector of sums that is written into its place: one row for each norm of the model.
        assert found.pop("copy_") == (2 * layout.layers + 1) * MODEL.hidden_size * 4
        assert found == {"zero_": EMBEDDING}


def test_what_is_copied_where_it_must_be(cluster: Cluster) -> None:
    """With two slots a shard lives apart and is put into its place by every gather: 1/dp of what was gathered, nothing else."""
    layout = Layout(dp=2, strategy=PARAMS)
    plan = rank_bucket_plan(layout.config(), dp=2)
    shards = {bucket.index: plan.shard_numel(bucket.index) * 4 for bucket in plan.buckets if not plan.has_own_slot(bucket.index)}
    kept = {bucket for unit in (0, layout.layers - 1, layout.layers, layout.layers + 1) for bucket in plan.unit_buckets[unit]}
    expected = sum(size * (1 if bucket in kept else 2) for bucket, size in shards.items())
    for found in cluster.run(2, copied, layout):
        assert found == {"copy_": expected + (2 * layout.layers + 1) * MODEL.hidden_size * 4, "zero_": EMBEDDING}


def copied_by_step(place: Place, layout: Layout) -> dict[str, int]:
    """Of the engine's weights, in the thread that calls ``step``."""
    run = trainer(place, layout)
    engine = run.optimizer
    engine.announce_step(OPTIMIZER.lr, clip=layout.clip)
    run.runtime.step(run.batches(0))
    with Copies({tensor.untyped_storage().data_ptr() for tensor in (*engine.parameters.unsharded, *engine.masters)}) as mode:
        engine.step(OPTIMIZER.lr, clip=layout.clip)
    engine.settle()
    return mode.moved


@pytest.mark.long
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_step_copies_no_weights_in_the_callers_thread(cluster: Cluster, clip: float) -> None:
    """Also not those that were updated during backward and are gathered only now."""
    layout = Layout(dp=2, bf16=True, clip=clip)
    buckets = rank_bucket_plan(layout.config(), dp=2)
    assert sum(updated_during_backward(buckets, bucket.index, is_async=False) for bucket in buckets.buckets) > len(
        list(gathered_during_backward(buckets))
    )
    assert cluster.run(2, copied_by_step, layout) == [{}] * 2


def gathered_by(place: Place, layout: Layout) -> list[str]:
    """Uses and gathers of one step, in order."""
    run = trainer(place, layout)
    run.step(0)
    recorder, access = run.mesh.recorder, run.optimizer.access
    recorder.events = []
    for stage in run.stages.values():

        def noted(unit: int, backward: bool) -> None:
            recorder.event(f"use {'B' if backward else 'F'}{unit}")
            access(unit, backward)

        stage.on_weight_access = noted
    run.step(1)
    return [event for event in recorder.events if event.startswith(("use", "gather"))]


@pytest.mark.tries("prefetch_bytes")
def test_prefetching_goes_as_far_as_the_bytes_allow(cluster: Cluster) -> None:
    """With three slots two blocks are on their way while one computes; with a limit of one byte a single one is."""
    layout = Layout(dp=2, strategy=PARAMS, slots="3", layers=6)
    plan = rank_bucket_plan(layout.config(), dp=2)
    block = {unit: next(b for b in plan.unit_buckets[unit] if not plan.has_own_slot(b)) for unit in range(1, 7)}
    far, near = (cluster.run(2, gathered_by, replace(layout, prefetch=prefetch)) for prefetch in (0, 1))
    assert far[0] == far[1] and near[0] == near[1] and sorted(far[0]) == sorted(near[0])
    # When block 2 begins, it and the two after it have been asked for, or only the next.
    for events, ahead in ((far[0], 4), (near[0], 3)):
        begun = events[: events.index("use F3")]
        assert f"gather {block[ahead]}" in begun and f"gather {block[ahead + 1]}" not in begun


def chunks_of(place: Place, chunk_bytes: int) -> int:
    """Messages that leave this rank in a step, as the process groups see them; the largest must fit."""
    config = Layout(dp=2).config()
    config = replace(config, parallel=replace(config.parallel, exchange_chunk_bytes=chunk_bytes))
    mesh = build_mesh(config, rank=place.rank, world_size=2, device=torch.device("cpu"))
    engine = build_optimizer(config, build_stages(config, mesh).values(), mesh)
    transfers = [exchange._exchange._transfers for exchange in engine.parameters._gathers]
    messages = [message.view for transfer in transfers for message in transfer._outgoing]
    assert all(view.numel() * view.element_size() <= chunk_bytes for view in messages)
    engine.close()
    return len(messages)


@pytest.mark.long
@pytest.mark.tries("exchange_chunk_bytes")
def test_messages_go_in_chunks_of_the_option(cluster: Cluster) -> None:
    buckets = rank_bucket_plan(Layout(dp=2).config(), dp=2).buckets
    for chunk_bytes in (1 << 20, 1 << 12):
        expected = sum(-(-bucket.numel // 2 * 4 // chunk_bytes) for bucket in buckets)
        assert cluster.run(2, chunks_of, chunk_bytes) == [expected] * 2


def least_chunk(place: Place, layout: Layout, least: int) -> str:
    """Engines with chunks of so many bytes, and with fewer; returns the error."""
    for chunk_bytes in (least, least - 1):
        config = layout.config()
        config = replace(config, parallel=replace(config.parallel, exchange_chunk_bytes=chunk_bytes))
        mesh = build_mesh(config, rank=place.rank, world_size=place.world_size, device=torch.device("cpu"))
        stages = build_stages(config, mesh).values()
        if chunk_bytes == least:
            build_optimizer(config, stages, mesh).close()
    with pytest.raises(ConfigError) as error:
        build_optimizer(config, stages, mesh)
    return str(error.value)


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "itemsize"),
    [
        (Layout(dp=2, bucket=10**9), 4),
        (Layout(dp=2, bucket=10**9, bf16=True, reduce_bf16=True), 2),
        (Layout(dp=2, bucket=10**9, strategy="no_shard"), 4),
        (Layout(pp=2, dp=2, split=(1, 3), bucket=10**9), 4),
    ],
    ids=lambda case: getattr(case, "name", None),
)
def test_chunks_that_are_too_small_are_refused_by_all_ranks(cluster: Cluster, layout: Layout, itemsize: int) -> None:
    """Of two ranks of a pipeline one alone may have messages that are too long."""
    largest = max(bucket.numel for rank in range(layout.pp) for bucket in rank_bucket_plan(layout.config(), dp=2, rank=rank).buckets) // 2
    assert 1 << 15 < largest < 1 << 18
    least = -(-largest // (1 << 15)) * itemsize
    expected = f"at least {least}, which cuts the largest message into 32768 pieces"
    message = f"--exchange-chunk-bytes: got {least - 1}, expected {expected}; give more or leave it out"
    assert cluster.run(layout.world_size, least_chunk, layout, least) == [message] * layout.world_size


def broken(place: Place, how: str) -> str:
    """One misuse of a two-slot engine; returns the error."""
    run = trainer(place, Layout(strategy=PARAMS))
    run.step(0)
    engine = run.optimizer
    parameters = {name: p for stage in run.stages.values() for name, p in stage.named_parameters()}
    with pytest.raises(RuntimeError) as error:
        MISUSE[how](run, engine, parameters)
    return str(error.value)


def read_without_use(run: Trainer, engine: OverlappedDistributedOptimizer, parameters: dict[str, torch.Tensor]) -> None:
    """Block 3 has the slot of block 1."""
    engine.begin_evaluation(run.runtime._plan(True, 1).accesses)
    handle = param_handle_of(parameters["model.layers.3.mlp.down_proj.weight"])
    assert handle is not None
    handle.wait_unsharded()


def stale_version(run: Trainer, engine: OverlappedDistributedOptimizer, parameters: dict[str, torch.Tensor]) -> None:
    """An update between forward and backward."""
    handle = param_handle_of(parameters["model.norm.weight"])
    assert handle is not None
    version = handle.wait_unsharded()
    run.step(1)
    handle.check_version(version)


def out_of_order(run: Trainer, engine: OverlappedDistributedOptimizer, parameters: dict[str, torch.Tensor]) -> None:
    """Unit 2 before unit 0."""
    engine.begin_evaluation(run.runtime._plan(True, 1).accesses)
    engine.access(2, False)


def unused_in_forward(run: Trainer, engine: OverlappedDistributedOptimizer, parameters: dict[str, torch.Tensor]) -> None:
    """A block that leaves its MLP out."""
    block = run.stages[0].model.layers["2"]

    def forward(residual: Residual, positions: Positions) -> Residual:
        stream, normed = block.input_layernorm(*residual)
        return Residual(stream, block.self_attn(normed, positions))

    block.forward = forward
    run.step(1)


MISUSE = {function.__name__: function for function in (read_without_use, stale_version, out_of_order, unused_in_forward)}
EXPECTED = {
    "read_without_use": ("model.layers.3.mlp.down_proj.weight: read while its slot", "of layers.3", "holds"),
    "stale_version": ("model.norm.weight: backward reads version", "layers.0 ... head", "forward saw version"),
    "out_of_order": ("got F2, expected F0",),
    "unused_in_forward": ("model.layers.2.mlp.down_proj.weight", "layers.2"),
}


@pytest.mark.parametrize("how", MISUSE)
def test_misuse_names_bucket_unit_and_parameter(how: str) -> None:
    message = broken(Place(0, 1, 0), how)
    assert all(words in message for words in EXPECTED[how]), message


def receive_bytes(place: Place, layout: Layout) -> int:
    """Bytes of all tensors that exchanges made for themselves."""
    made: list[torch.Tensor] = []

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            if function.overloadpacket.__name__ in ("empty", "empty_like", "new_empty"):
                made.append(out)
            return out

    run = trainer(place, layout)
    old = run.optimizer.gradients
    with Made():
        slots = {bucket: old.bucket_plan.gradient_slots[bucket] for bucket in old.trainable}
        axes = {bucket: run.mesh.data_axes(old.bucket_plan.buckets[bucket].kind) for bucket in old.trainable}
        BucketExchanges(old._unsharded, old._parts, old.shards, slots, axes, _wire(layout), 1 << 20)
    return sum(tensor.untyped_storage().nbytes() for tensor in made)


def largest_temporary(place: Place, layout: Layout) -> int:
    """Bytes, of the tensors that taking parts of the norm makes."""
    sizes: list[int] = []

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            if function.overloadpacket.__name__ != "view":
                sizes.append(out.untyped_storage().nbytes())
            return out

    run = trainer(place, layout)
    run.step(0)
    with Made():
        for bucket in run.optimizer.gradients.trainable:
            run.optimizer._take_squared_norm(bucket)
    return max(sizes)


@pytest.mark.parametrize("layout", [Layout(dp=2, strategy="no_shard"), Layout(dp=2, bf16=True)], ids=lambda layout: layout.name)
def test_the_largest_temporary_is_that_of_the_formula(cluster: Cluster, layout: Layout) -> None:
    expected = squares_bytes(engine_options(layout.config()), rank_bucket_plan(layout.config(), dp=layout.dp))
    assert cluster.run(2, largest_temporary, layout) == [expected] * 2


def _wire(layout: Layout) -> torch.dtype | None:
    return torch.bfloat16 if layout.reduce_bf16 else None


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "layout",
    [
        *(Layout(dp=2, strategy=strategy, reduce_bf16=narrow) for strategy in STRATEGIES for narrow in (False, True)),
        Layout(dp=4, shard_size=2, reduce_bf16=True),
        Layout(dp=4, bucket=10**9),
        Layout(),
    ],
    ids=lambda layout: layout.name,
)
def test_receive_buffers_are_those_of_the_formula(cluster: Cluster, layout: Layout) -> None:
    expected = host_buffer_bytes(engine_options(layout.config()), rank_bucket_plan(layout.config(), dp=layout.dp), dp=layout.dp)
    assert max(cluster.run(layout.world_size, receive_bytes, layout)) == expected, "the last rank may have a smaller part"
    assert (expected > 0) is (layout.dp > 1)


def build_and_drop(place: Place) -> tuple[int, int]:
    """Threads of an engine, and those that are left when it is gone."""
    before = set(threading.enumerate())
    run = trainer(place, Layout(dp=2))
    run.step(0)
    run.optimizer.settle()
    threads = [thread for thread in set(threading.enumerate()) - before if thread.name in ("issue", "follow_up", "gathers")]
    run.optimizer.close()
    del run
    gc.collect()
    for thread in threads:
        thread.join(timeout=60)
    return len(threads), sum(thread.is_alive() for thread in threads)


def test_an_engines_threads_end_with_it(cluster: Cluster) -> None:
    assert cluster.run(2, build_and_drop) == [(3, 0), (3, 0)]
