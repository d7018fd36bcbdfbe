"""Exchanges over gloo: exact sums in rank order, the minimum of bytes, nothing allocated, and any order of issue and wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_llama.config.schema import Config
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm import exchange as exchange_module
from megatron_llama.engine.comm.exchange import Exchange, Reductions, StagingBuffer, all_reduce_exchange, gather, summed_numel
from megatron_llama.engine.comm.streams import open_stream
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from torch import Tensor

from tests.harness import Cluster

CPU = torch.device("cpu")
IN_FLIGHT = 3


def mesh_of(place: Place) -> Mesh:
    """All ranks are data-parallel."""
    return build_mesh(Config(), rank=place.rank, world_size=place.world_size, device=CPU)


def rough(seed: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers whose sums depend on the order of addition."""
    return (torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1e3).to(dtype)


def in_rank_order(seeds: list[int], numel: int, wire: torch.dtype | None) -> Tensor:
    """What every rank would compute alone."""
    parts = [rough(seed, numel) if wire is None else rough(seed, numel).to(wire).float() for seed in seeds]
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def reductions(axis: Axis, largest: int, chunk: int, wire: torch.dtype | None = None) -> Reductions:
    """Of fp32 buffers."""
    return Reductions(axis, largest=largest, dtype=torch.float32, wire=wire, device=CPU, in_flight=IN_FLIGHT, chunk_bytes=chunk)


def scatter_sums(place: Place, numel: int, chunk: int, wire: torch.dtype | None, aliased: bool) -> None:
    """Three buffers, thrice, against sums in rank order."""
    axis = mesh_of(place).dp
    shared = reductions(axis, numel, chunk, wire)
    part = numel // axis.size
    place_of = slice(axis.rank * part, (axis.rank + 1) * part)
    full = [torch.empty(numel) for _ in range(3)]
    shards = [f[place_of] if aliased else torch.empty(part) for f in full]
    exchanges = [shared.scatter(f, s, index=i, buffer=i % IN_FLIGHT) for i, (f, s) in enumerate(zip(full, shards, strict=True))]
    for turn in range(3):
        for index in range(3):
            full[index].copy_(rough(_seed(turn, index, axis.rank), numel))
        for step in range(3):  # every rank in an order of its own
            exchanges[(step + axis.rank) % 3].start()
        for index, exchange in reversed(list(enumerate(exchanges))):
            exchange.wait()
            assert aliased or torch.equal(full[index], rough(_seed(turn, index, axis.rank), numel)), "the source is only read"
            seeds = [_seed(turn, index, rank) for rank in range(axis.size)]
            assert torch.equal(shards[index], in_rank_order(seeds, numel, wire)[place_of]), (turn, index)


def _seed(turn: int, index: int, rank: int) -> int:
    return 1000 * turn + 10 * index + rank


@pytest.mark.few(4)
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(("numel", "chunk"), [(768, 100), (768, 10**6), (76_800, 10_000), (12, 1)])
def test_scatter_sums_in_rank_order_bit_for_bit(cluster: Cluster, world: int, numel: int, chunk: int) -> None:
    for aliased in (True, False):
        cluster.run(world, scatter_sums, numel, chunk, None, aliased)


@pytest.mark.parametrize("world", [2, 3])
def test_on_a_narrow_wire_every_part_is_rounded_and_the_sum_is_not(cluster: Cluster, world: int) -> None:
    for aliased in (True, False):
        cluster.run(world, scatter_sums, 768, 100, torch.bfloat16, aliased)
    assert not torch.equal(in_rank_order([0, 1], 768, torch.bfloat16), in_rank_order([0, 1], 768, None))


def all_reduce_sums(place: Place, numel: int, wire: torch.dtype | None) -> Tensor:
    """Three times; returns the last."""
    axis = mesh_of(place).dp
    tensor = torch.empty(numel)
    exchange = all_reduce_exchange(tensor, axis, index=7, wire=wire, chunk_bytes=500)
    for turn in range(3):
        tensor.copy_(rough(_seed(turn, 0, axis.rank), numel))
        exchange.start()
        exchange.wait()
        expected = in_rank_order([_seed(turn, 0, rank) for rank in range(axis.size)], numel, wire)
        assert torch.equal(tensor, expected if wire is None else expected.to(wire).float())
    return tensor


@pytest.mark.few(4)
@pytest.mark.parametrize("numel", [1, 63, 64, 1000])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_all_reduce_sums_in_rank_order_and_agrees_everywhere(cluster: Cluster, world: int, numel: int) -> None:
    for wire in (None, torch.bfloat16) if world > 1 else (None,):
        results = cluster.run(world, all_reduce_sums, numel, wire)
        assert all(torch.equal(result, results[0]) for result in results)


def gathered(place: Place, aliased: bool) -> None:
    """Own parts inside and outside of the whole."""
    axis = mesh_of(place).dp_gather
    full = torch.zeros(300 * axis.size)
    own = full[axis.rank * 300 : (axis.rank + 1) * 300] if aliased else torch.empty(300)
    exchange = gather(full, own, axis, index=0, chunk_bytes=128)
    for turn in range(3):
        own.copy_(rough(10 * turn + axis.rank, 300))
        exchange.start()
        exchange.wait()
        assert torch.equal(full, torch.cat([rough(10 * turn + rank, 300) for rank in range(axis.size)]))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_gather(cluster: Cluster, world: int) -> None:
    for aliased in (True, False):
        cluster.run(world, gathered, aliased)


def two_threads(place: Place) -> None:
    """Reductions, started here and finished by a thread that then gathers the result on another axis."""
    mesh = mesh_of(place)
    numel, count = 1200 * mesh.dp.size, 12
    part = slice(mesh.dp.rank * 1200, (mesh.dp.rank + 1) * 1200)
    full, weights = ([torch.empty(numel) for _ in range(count)] for _ in range(2))
    shared = reductions(mesh.dp, numel, 1000)
    sums = [shared.scatter(f, f[part], index=i, buffer=i % IN_FLIGHT) for i, f in enumerate(full)]
    gathers = [gather(w, w[part], mesh.dp_gather, index=i, chunk_bytes=1000) for i, w in enumerate(weights)]
    stream = open_stream(CPU, inline=False)

    def follow_up(index: int) -> None:
        sums[index].wait()
        weights[index][part].copy_(full[index][part])
        gathers[index].start()

    for turn in range(4):
        done = []
        for index in range(count):
            full[index].copy_(rough(_seed(turn, index, mesh.dp.rank), numel))
            if index >= IN_FLIGHT:
                done[index - IN_FLIGHT].wait()
            sums[index].start()
            done.append(stream.run(lambda index=index: follow_up(index)))
        done[-1].wait()
        for index in reversed(range(count)):
            gathers[index].wait()
            expected = in_rank_order([_seed(turn, index, rank) for rank in range(mesh.dp.size)], numel, None)
            assert torch.equal(weights[index], expected), (turn, index)
    stream.close()


@pytest.mark.parametrize("world", [2, 4])
def test_gathers_from_one_thread_while_another_reduces(cluster: Cluster, world: int) -> None:
    cluster.run(world, two_threads)


def misused(place: Place, wire: torch.dtype | None) -> list[str]:
    """What wrong orders of calls raise, in the middle of a reduction that then goes on. Reductions 0 and 3 share a buffer."""
    axis = mesh_of(place).dp
    shared, errors = reductions(axis, 128, 1000, wire), list[str]()
    full = [rough(_seed(0, index, axis.rank), 128) for index in range(2)]
    shards = [torch.zeros(64) for _ in range(2)]
    first, other = (shared.scatter(f, s, index=i, buffer=i % IN_FLIGHT) for f, s, i in zip(full, shards, (0, 3), strict=True))
    first.start()
    for wrong in (other.start, first.start, other.wait):
        with pytest.raises(RuntimeError) as error:
            wrong()
        errors.append(str(error.value))
    for exchange in (first, other):
        exchange.start() if exchange is other else None
        exchange.wait()
    for index, shard in enumerate(shards):
        assert torch.equal(shard, in_rank_order([_seed(0, index, rank) for rank in (0, 1)], 128, wire)[64 * axis.rank :][:64])
    return errors


@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_wrong_orders_are_errors_that_spoil_nothing(cluster: Cluster, wire: torch.dtype | None) -> None:
    taken = "reduce_scatter 3 on dp needs the receive buffer of reduce_scatter 0 on dp, which was not waited for"
    again = "reduce_scatter 0 on dp was started again before it was waited for"
    early = "reduce_scatter 3 on dp was waited for, but not started"
    assert cluster.run(2, misused, wire) == [[taken, again, early]] * 2


class Meter:
    """A process group that counts what it is given to send."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        assert group is not None
        self.recv, self._send, self._get_backend = group.recv, group.send, group._get_backend
        self.messages: list[tuple[int, int]] = []

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        """Bytes and peer of every message."""
        self.messages += [(tensor.numel() * tensor.element_size(), peer) for tensor in tensors]
        return self._send(tensors, peer, tag)


def volume(place: Place) -> tuple[dict[tuple[str, str], tuple[int, int]], list[int]]:
    """What the recorder counts, and the bytes that really leave this rank, exchange by exchange."""
    mesh, numel, sent = mesh_of(place), 6400, list[int]()
    part = numel // mesh.dp.size
    meter = Meter(mesh.dp.group)
    mesh = replace(mesh, dp=replace(mesh.dp, group=meter), dp_gather=replace(mesh.dp_gather, group=meter))
    exchanges: list[Exchange] = [
        reductions(mesh.dp, numel, 1000).scatter(torch.zeros(numel), torch.zeros(part), index=0, buffer=0),
        reductions(mesh.dp, numel, 1000, torch.bfloat16).scatter(torch.zeros(numel), torch.zeros(part), index=1, buffer=1),
        gather(torch.zeros(numel), torch.zeros(part), mesh.dp_gather, index=2, chunk_bytes=1000),
        all_reduce_exchange(torch.zeros(numel), mesh.dp, index=3, wire=None, chunk_bytes=1000),
    ]
    for exchange in exchanges:
        meter.messages.clear()
        exchange.start()
        exchange.wait()
        sent.append(sum(size for size, _ in meter.messages))
        assert max(size for size, _ in meter.messages) <= 1000
        peers = list(dict.fromkeys(peer for _, peer in meter.messages))
        assert peers == [(place.rank + step) % place.world_size for step in range(1, place.world_size)]
    return {key: (value.calls, value.bytes) for key, value in mesh.recorder.traffic.items()}, sent


@pytest.mark.parametrize("world", [2, 4])
def test_the_minimum_leaves_a_rank_in_chunks(cluster: Cluster, world: int) -> None:
    whole = 6400 * 4
    least = whole * (world - 1) // world
    for traffic, sent in cluster.run(world, volume):
        assert sent == [least, least // 2, least, 2 * least]
        assert traffic == {
            ("dp", "reduce_scatter"): (2, whole + whole // 2),
            ("dp_gather", "all_gather"): (1, whole),
            ("dp", "all_reduce"): (1, whole),
        }


def allocations(work: Callable[[], object]) -> list[str]:
    """Operators that make tensor storage."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    return [event.name for event in profiler.events() if event.cpu_memory_usage > 0]


def allocated(place: Place) -> tuple[list[str], list[str]]:
    """In a step, and in an addition that widens inside."""
    mesh, numel = mesh_of(place), 6400 * place.world_size
    part = slice(mesh.dp.rank * 6400, (mesh.dp.rank + 1) * 6400)
    full, weights, repeated = (torch.zeros(numel) for _ in range(3))
    exchanges: list[Exchange] = [
        reductions(mesh.dp, numel, 1000).scatter(full, full[part], index=0, buffer=0),
        reductions(mesh.dp, numel, 1000, torch.bfloat16).scatter(full, torch.zeros(6400), index=1, buffer=1),
        gather(weights, torch.zeros(6400), mesh.dp_gather, index=0, chunk_bytes=1000),
        all_reduce_exchange(repeated, mesh.dp, index=2, wire=torch.bfloat16, chunk_bytes=1000),
        all_reduce_exchange(repeated, mesh.dp, index=3, wire=None, chunk_bytes=1000),
    ]

    def step() -> None:
        for exchange in exchanges:
            exchange.start()
            exchange.wait()

    narrow = full.bfloat16()
    return allocations(step), allocations(lambda: full.add_(narrow))


def test_a_step_allocates_nothing(cluster: Cluster) -> None:
    for step, addition in cluster.run(3, allocated):
        assert step == [] and addition != []


def dead_peer(place: Place) -> list[str]:
    """Rank 1 leaves instead of sending: what the exchange says that was on its way, and those that start later."""
    mesh = mesh_of(place)
    shared = reductions(mesh.dp, 128, 1000)
    scatters = [shared.scatter(torch.zeros(128), torch.zeros(64), index=i, buffer=i) for i in range(2)]
    exchanges = [*scatters, all_reduce_exchange(torch.zeros(128), mesh.dp, index=2, wire=None)]
    dist.barrier()  # both have all connections by now
    if place.rank == 1:
        dist.destroy_process_group()
        return []
    errors = []
    for exchange in exchanges:
        exchange.start()
        for _ in range(2):
            with pytest.raises(RuntimeError) as error:
                exchange.wait()
            errors.append(str(error.value))
    return errors


def test_a_dead_peer_is_an_error_of_the_wait(cluster: Cluster) -> None:
    errors = cluster.run(2, dead_peer)[0]
    assert len(errors) == 6 and all("closed" in error.lower() for error in errors), errors


def test_alone_nothing_is_sent_and_nothing_rounded() -> None:
    mesh = Mesh.single()
    full, shard, weights = rough(0, 128), torch.empty(128), torch.empty(128)
    for exchange in (
        reductions(mesh.dp, 128, 1000, torch.bfloat16).scatter(full, shard, index=0, buffer=0),
        gather(weights, full, mesh.dp_gather, index=0),
        all_reduce_exchange(full, mesh.dp, index=0, wire=torch.bfloat16),
    ):
        exchange.start()
        exchange.wait()
    assert torch.equal(shard, rough(0, 128)) and torch.equal(weights, full) and torch.equal(full, rough(0, 128))
    assert mesh.recorder.traffic == {} and replace(mesh.dp).size == 1


def sums_of_a_backend(place: Place) -> None:
    """What a device does, with gloo's own collectives for those of its backend: three buckets that take turns in two buffers, twice."""
    axis = mesh_of(place).dp
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_module, "carried_by_gloo", lambda axis, device: False)
        shared = Reductions(axis, largest=256, dtype=torch.float32, wire=torch.bfloat16, device=CPU, in_flight=2)
        whole = StagingBuffer(256, torch.bfloat16, CPU)
        full = [torch.empty(256) for _ in range(3)]
        own = slice(axis.rank * 128, (axis.rank + 1) * 128)
        # Into a place of its own, and twice into the bucket's own part.
        shards = [torch.empty(128), full[1][own], full[2][own]]
        scatters = [shared.scatter(f, s, index=i, buffer=i % 2) for i, (f, s) in enumerate(zip(full, shards, strict=True))]
        summed = [torch.empty(256), torch.empty(192)]
        sums = [all_reduce_exchange(one, axis, index=i, wire=torch.bfloat16, staging=whole) for i, one in enumerate(summed)]
    assert [buffer.nbytes for buffer in shared.staging] == [256 * 2] * 2
    original = exchange_module.reduce_scatter_single

    def in_place(target: Tensor, sent: Tensor, **names: Any) -> Any:
        """NCCL demands that a sum overlaps with what is sent nowhere but in this rank's own part."""
        assert target.data_ptr() == sent[own].data_ptr() and target.shape == sent[own].shape
        return original(target, sent, **names)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_module, "reduce_scatter_single", in_place)
        repeat(axis, full, shards, scatters, summed, sums)


def repeat(
    axis: Axis, full: list[Tensor], shards: list[Tensor], scatters: list[Exchange], summed: list[Tensor], sums: list[Exchange]
) -> None:
    """Two rounds of all of them, between two ranks: a sum of two numbers has one order."""
    own = slice(axis.rank * 128, (axis.rank + 1) * 128)
    for turn in range(2):
        for index in range(3):
            full[index].copy_(rough(_seed(turn, index, axis.rank), 256))
            scatters[index].start()
            scatters[index].wait()
            ours, theirs = (rough(_seed(turn, index, rank), 256).bfloat16() for rank in range(2))
            assert torch.equal(shards[index], (ours + theirs).float()[own]), (turn, index)
        for index, one in enumerate(summed):
            one.copy_(rough(_seed(turn, index, axis.rank), one.numel()))
            sums[index].start()
            sums[index].wait()
            ours, theirs = (rough(_seed(turn, index, rank), one.numel()).bfloat16() for rank in range(2))
            assert torch.equal(one, (ours + theirs).float())


def wide_sums_of_a_backend(place: Place, numel: int) -> None:
    """What a device does where ranks add up: against the sum in fp64 of what travels, which is rounded once into the shard, and where
    replicas are summed once more on its way back. Three buckets take turns in two buffers, twice."""
    axis = mesh_of(place).dp
    part = numel // axis.size
    own = slice(axis.rank * part, (axis.rank + 1) * part)
    repeated = numel - 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_module, "carried_by_gloo", lambda axis, device: False)
        shared = Reductions(axis, largest=numel, dtype=torch.float32, wire=torch.bfloat16, device=CPU, in_flight=2, sums_wide=True)
        full = [torch.empty(numel - axis.size * (i == 1)) for i in range(3)]
        shards = [torch.empty(part), torch.empty(part - 1), full[2][own]]
        scatters = [shared.scatter(f, s, index=i, buffer=i % 2) for i, (f, s) in enumerate(zip(full, shards, strict=True))]
        staging = StagingBuffer(summed_numel(numel, axis.size), torch.bfloat16, CPU)
        replicas = torch.empty(repeated)
        sums = all_reduce_exchange(replicas, axis, index=3, wire=torch.bfloat16, staging=staging, sums_wide=True)
    assert [buffer.numel() for buffer in shared.staging] == [2 * numel] * 2
    for turn in range(2):
        for index, (whole, shard, exchange) in enumerate(zip(full, shards, scatters, strict=True)):
            whole.copy_(rough(_seed(turn, index, axis.rank), numel)[: whole.numel()])
            exchange.start()
            exchange.wait()
            exact = wide(turn, index, axis.size, numel)[: whole.numel()].chunk(axis.size)[axis.rank]
            torch.testing.assert_close(shard.double(), exact, rtol=0, atol=axis.size * 2**-24 * 1e4)
        replicas.copy_(rough(_seed(turn, 3, axis.rank), numel)[:repeated])
        sums.start()
        sums.wait()
        # Half a step of bf16, where the fp32 sum is not so near the middle that its own rounding decides.
        exact = wide(turn, 3, axis.size, numel)[:repeated]
        assert bool(((replicas.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-2).all())
        assert torch.equal(replicas, replicas.bfloat16().float())


def wide(turn: int, index: int, ranks: int, numel: int) -> Tensor:
    """The sum of what travels, in fp64."""
    return sum((rough(_seed(turn, index, rank), numel).bfloat16().double() for rank in range(ranks)), torch.zeros(numel).double())


@pytest.mark.tries("ddp_reduce_scatter_with_fp32_accumulation")
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_backend_leaves_sums_to_its_ranks(cluster: Cluster, world: int) -> None:
    cluster.run(world, wide_sums_of_a_backend, 1200)


def test_a_backend_sums_in_buffers_that_take_turns(cluster: Cluster) -> None:
    cluster.run(2, sums_of_a_backend)


class Named:
    """A stream that notes what it is given."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.log.append(f"{self.name} records")
        return f"event {len(self.log)}"


@pytest.mark.parametrize("wire", [torch.bfloat16, None])
@pytest.mark.parametrize("scatters", [False, True])
def test_a_device_fills_a_buffer_after_its_last_sum_was_read(
    wire: torch.dtype | None, scatters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reductions start in one stream and are followed up in another. The first one waits for the second, and no other buffer does; without
    a wire there is no buffer, and nobody waits."""
    log, current = list[str](), list[Named]()
    issuing, following = Named("issuing", log), Named("following", log)
    monkeypatch.setattr(devices, "is_host", lambda device: False)
    monkeypatch.setattr(devices, "current_stream", lambda device: current[-1])

    def sums(*tensors: Tensor, group: object, async_op: bool) -> object:
        log.append(f"{current[-1].name} sums {tensors[-1].numel()}")
        return SimpleNamespace(wait=lambda: log.append(f"{current[-1].name} waits for the sum"))

    monkeypatch.setattr(dist, "all_reduce", sums)
    monkeypatch.setattr(exchange_module, "reduce_scatter_single", sums)
    monkeypatch.setattr(exchange_module, "carried_by_gloo", lambda axis, device: False)
    axis = replace(Mesh.single().dp, ranks=(0, 1), group=object())  # type: ignore[arg-type]
    buffers = [StagingBuffer(64, torch.bfloat16, CPU) for _ in range(2)]
    shared = Reductions(axis, largest=64, dtype=torch.float32, wire=wire, device=CPU, in_flight=2)
    sizes = (64, 62, 60)
    for index, numel in enumerate(sizes):
        full = torch.ones(numel)
        exchange = (
            shared.scatter(full, full[: numel // 2], index=index, buffer=index % 2)
            if scatters
            else all_reduce_exchange(full, axis, index=index, wire=wire, staging=buffers[index % 2])
        )
        current.append(issuing)
        exchange.start()
        current.append(following)
        exchange.wait()
    turn = ["issuing sums {}", "following waits for the sum"] + ["following records"] * (wire is not None)
    turns = [[line.format(numel) for line in turn] for numel in sizes]
    assert log == [*turns[0], *turns[1], *(["issuing waits for event 3"] if wire else []), *turns[2]]
