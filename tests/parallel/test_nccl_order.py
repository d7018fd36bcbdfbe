"""Layouts of all kinds train by NCCL's rules (``tests/nccl_transport.py``), and orders that would hang on NCCL are named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
from megatron_llama.engine.comm import collectives, p2p
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.launch import mesh as meshes
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh

from tests.harness import Cluster, WorkerError
from tests.model.families.twins import FamilyLayout
from tests.nccl_transport import installed
from tests.parallel.cases import LOSS_BOUND, NORM_BOUND, Layout, Record, Reference, deviation, merged, record, trainer

TRAINED = [
    Layout(pp=2, schedule="zb-v"),
    Layout(pp=4, schedule="1f1b"),
    Layout(cp=2, dp=2, cp_comm="ring", strategy="optim_grads"),
    Layout(tp=2, pp=2, virtual=2, schedule="interleaved", sp=True, tied=True, microbatches=2),
    Layout(dp=4, strategy="optim_grads_params", shard_size=2, microbatches=2),
    Layout(tp=2, pp=2, dp=2, sp=True, microbatches=4, schedule="zb-h1", tied=True, strategy="optim_grads"),
    Layout(tp=2, cp=2, pp=2, sp=True, microbatches=4, schedule="gpipe"),
    Layout(tp=4, kv_heads=1, sp=True),
    Layout(tp=2, pp=2, sp=True, tp_comm="3", microbatches=2, schedule="zb-h1"),
    Layout(tp=2, cp=2, tp_comm="2", recompute="full"),
    Layout(cp=2, tp=2, pp=2, cp_comm="a2a", sp=True, microbatches=4, schedule="zb-h1"),
    Layout(cp=4, dp=2, cp_comm="a2a+p2p", strategy="optim_grads_params"),
]
"""Each axis and schedule, and what they send among themselves together."""
STEPS = 4


def train(place: Place, layout: Layout) -> tuple[Record, float]:
    """Some steps, and the loss of an evaluation with one microbatch before them."""
    with installed():
        run = trainer(place, layout, inline=True)
        evaluated = run.runtime.evaluate(run.batches(0))[0].item()
        run.runtime.evaluate(run.batches(0)[:1])
        return record(run, [run.step(index) for index in range(layout.steps)]), evaluated


@pytest.mark.long
@pytest.mark.parametrize("layout", TRAINED, ids=lambda layout: layout.name)
def test_a_layout_trains_by_the_rules_of_nccl(references: Callable[[Layout], Reference], cluster: Cluster, layout: Layout) -> None:
    found = cluster.run(layout.world_size, train, replace(layout, steps=STEPS))
    records = [trained for trained, _ in found]
    row = references(replace(layout, steps=STEPS)).row(layout.name, records[0])
    assert row.holds, row
    assert all(evaluated == records[0].losses[0] for _, evaluated in found)
    merged(records)


DIVIDED = [
    FamilyLayout(family="mixtral", dp=4, ep=2, strategy="optim_grads_params", microbatches=2),
    FamilyLayout(family="mixtral", tp=2, sp=True, pp=2, dp=2, ep=2, schedule="zb-h1", microbatches=4, strategy="optim_grads"),
    FamilyLayout(family="qwen3_moe", pp=2, dp=2, ep=2, exchange=True, schedule="zb-h1", microbatches=4, strategy="optim_grads", recompute="selective"),
]


@pytest.mark.long
@pytest.mark.parametrize("layout", DIVIDED, ids=lambda layout: layout.name)
def test_ranks_that_divide_experts_train_by_the_rules_of_nccl(cluster: Cluster, layout: FamilyLayout) -> None:
    """Tokens to their experts, and two kinds of buckets, between all other messages."""
    found = cluster.run(layout.world_size, train, replace(layout, steps=STEPS))
    [(alone, _)] = cluster.run(1, train, replace(layout.reference, steps=STEPS))
    for trained, evaluated in found:
        assert deviation(trained.losses, alone.losses) < LOSS_BOUND and deviation(trained.norms, alone.norms) < NORM_BOUND
        assert evaluated == pytest.approx(alone.losses[0], rel=LOSS_BOUND)
    merged([trained for trained, _ in found])


def unconnected(place: Place, layout: Layout, evaluates: bool) -> float:
    """One step, or evaluation, without the connections that ``build_mesh`` makes."""
    with installed(seconds=2.0), mock.patch.object(meshes, "_make_communicators"):
        run = trainer(place, layout, inline=True)
        return (run.runtime.evaluate(run.batches(0)) if evaluates else run.step(0))[0].item()


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_one_microbatch_hangs_without_the_connections_of_the_start(cluster: Cluster, schedule: str) -> None:
    """As the proof says: rank 0 posts the receive of a gradient first, rank 1 that of an activation."""
    with pytest.raises(WorkerError) as error:
        cluster.run(2, unconnected, Layout(pp=2, schedule=schedule), False)  # type: ignore[arg-type]
    message = "message of 16384 float32"
    assert f"rank 0 waits for the first use of pp_backward of ranks 0, 1, in receive {message} from 1 to 0" in str(error.value)
    assert f"rank 1 waits for the first use of pp of ranks 0, 1, in receive {message} from 0 to 1" in str(error.value)


@pytest.mark.long
def test_an_evaluation_with_virtual_stages_hangs_without_the_connections_of_the_start(cluster: Cluster) -> None:
    with pytest.raises(WorkerError) as error:
        cluster.run(2, unconnected, Layout(pp=2, virtual=2, schedule="interleaved"), True)
    assert "rank 0 waits for the first use of pp_return of ranks 0, 1, in receive message" in str(error.value)
    assert "rank 1 waits for the first use of pp of ranks 0, 1, in receive message" in str(error.value)


def grid(place: Place, layout: Layout) -> Mesh:
    return build_mesh(layout.config(), rank=place.rank, world_size=place.world_size, device=torch.device("cpu"))


def collectives_in_two_orders(place: Place) -> None:
    """On one communicator."""
    with installed(seconds=2.0):
        axis = grid(place, Layout(dp=2)).dp
        summed, gathered = torch.ones(2), torch.zeros(4)

        def reduce() -> collectives.Pending:
            return collectives.all_reduce(summed, axis)

        def gather() -> collectives.Pending:
            return collectives.all_gather(gathered, torch.ones(2), axis)

        works = [issue() for issue in ((reduce, gather) if place.rank else (gather, reduce))]
        for work in works:
            work.wait()


def test_two_orders_on_one_communicator_are_named(cluster: Cluster) -> None:
    with pytest.raises(WorkerError) as error:
        cluster.run(2, collectives_in_two_orders)
    assert "waits for all_gather to 4 float32 on dp of ranks 0, 1" in str(error.value)
    assert "waits for all_reduce of 2 float32 on dp of ranks 0, 1" in str(error.value)


def waits_in_a_circle(place: Place) -> None:
    """Two axes, each waited for before the next; two of four ranks in the other order. Gloo hangs here too, and says less."""
    with installed(seconds=2.0):
        mesh = grid(place, Layout(tp=2, dp=2))
        axes = (mesh.tp, mesh.dp) if place.rank in (0, 3) else (mesh.dp, mesh.tp)
        for axis in axes:
            collectives.all_reduce(torch.ones(1), axis).wait()


@pytest.mark.long
def test_a_circle_of_waits_is_named(cluster: Cluster) -> None:
    with pytest.raises(WorkerError) as error:
        cluster.run(4, waits_in_a_circle)
    for line in ("tp of ranks 0, 1", "dp of ranks 0, 2", "dp of ranks 1, 3", "tp of ranks 2, 3"):
        assert f"waits for all_reduce of 1 float32 on {line}" in str(error.value)


def both_directions_on_one_link(place: Place, nccl: bool) -> float:
    with installed(seconds=2.0) if nccl else nullcontext():
        return swap(grid(place, Layout(pp=2)).pp)


def swap(axis: Axis) -> float:
    """Both ranks post a receive, then send."""
    other = 1 - axis.rank
    receiving = p2p.receive(torch.zeros(1), axis, other)
    p2p.send(torch.tensor([float(axis.rank)]), axis, other).wait()
    return receiving.wait().item()


def test_what_gloo_lets_through_hangs_as_on_nccl(cluster: Cluster) -> None:
    """Over gloo a receive that was posted is in nobody's way. On one communicator of NCCL the send is behind it, on both ranks: that is
    why each direction has a communicator of its own."""
    assert cluster.run(2, both_directions_on_one_link, False) == [1.0, 0.0]
    with pytest.raises(WorkerError) as error:
        cluster.run(2, both_directions_on_one_link, True)
    assert "rank 0 waits for receive message of 1 float32 from 1 to 0 on pp of ranks 0, 1" in str(error.value)
    assert "rank 1 waits for receive message of 1 float32 from 0 to 1 on pp of ranks 0, 1" in str(error.value)
