"""ZenFlow when something goes wrong: runs that go back, replicas that differ, copies that fail, and ranks that see other roundings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron_llama.checkpoint import native
from megatron_llama.engine.offload_options import ZenFlowConfig
from megatron_llama.engine.replicas import check_replicas, replicated
from megatron_llama.errors import OffloadError, TrainingError
from megatron_llama.launch.launcher import Place
from torch import Tensor

from tests.checkpoint.cases import state_at
from tests.engine.test_offload import Broken
from tests.harness import Cluster
from tests.parallel.cases import Layout, Trainer, merged, train, trainer
from tests.parallel.test_zenflow import AT_ONCE, EVERY, FOUR, OVERLAP, SINGLE, Zen, everything, rule_of, zen

AUTO_INTERVAL = replace(OVERLAP, zenflow_update_interval="auto")


def goes_back(place: Place, layout: Zen, folder: Path, bad: int) -> tuple[list[list[float]], bool]:
    """Losses of a run that saves after three steps, makes ``bad`` more and goes back, and of one that begins with what it saved; and whether
    both end in the same state."""
    run, other = trainer(place, layout), trainer(place, layout)
    for index in range(3):
        run.step(index)
    native.save(folder, run.optimizer, run.mesh, state_at(3), layout.config())
    for index in range(3, 3 + bad):
        run.step(index)
    run.optimizer.reset()
    losses, ends = [], []
    for each in (run, other):
        native.load(folder, each.optimizer, each.mesh, layout.config().model)
        losses.append([each.step(index)[0].item() for index in range(3, 10)])
        each.optimizer.settle()
        ends.append(everything(each))
    return losses, all(torch.equal(one.tensor, two.tensor) for one, two in zip(*ends, strict=True))


@pytest.mark.long
@pytest.mark.parametrize(
    ("zenflow", "bad"), [(FOUR, 1), (OVERLAP, 3), (OVERLAP, 5), (AUTO_INTERVAL, 2)], ids=["first", "middle", "overlap", "auto"]
)
def test_a_run_that_goes_back_is_as_one_that_was_killed(tmp_path: Path, cluster: Cluster, zenflow: ZenFlowConfig, bad: int) -> None:
    """Right behind the checkpoint, in the middle of a window, with an update on its way, and where windows ask to close."""
    layout = zen(Layout(dp=2, strategy="optim_grads", layers=1, bf16=True), zenflow)
    for (back, killed), same in cluster.run(2, goes_back, layout, tmp_path, bad):
        assert back == killed and same


def test_in_fp64_it_is_adamw_where_it_should_be() -> None:
    layout = Layout(fp64=True, layers=1, steps=4)
    plain = merged([train(SINGLE, layout)])
    for zenflow, equal in ((EVERY, True), (AT_ONCE, True), (FOUR, False)):
        found = merged([train(SINGLE, zen(layout, zenflow))])
        assert all(torch.equal(found[name], tensor) for name, tensor in plain.items()) == equal


def flipped(place: Place, layout: Zen) -> tuple[list[str], set[str]]:
    """Complaints after each of some steps and after a bit of the last rank's host memory flipped; and what is compared over replicas."""
    run = trainer(place, layout)
    told = []
    for index in range(4):
        run.step(index)
        told.append(complaint(run, index))
    if place.rank == 3:
        run.optimizer.masters[0][5:6].view(torch.int32).bitwise_xor_(1 << 20)
    told.append(complaint(run, 9))
    return told, {one.what for one in replicated(run.optimizer) if one.axis.name == "dp_replica"}


def complaint(run: Trainer, iteration: int) -> str:
    try:
        check_replicas(run.optimizer, run.mesh, iteration)
    except TrainingError as error:
        return str(error)
    return ""


@pytest.mark.long
@pytest.mark.parametrize("zenflow", [FOUR, OVERLAP], ids=["inline", "overlap"])
def test_replicas_are_compared_with_nothing_pending(cluster: Cluster, zenflow: ZenFlowConfig) -> None:
    """Hot columns are on the device: what the comparison sees of them on the host is what they are."""
    layout = zen(Layout(dp=4, strategy="optim_grads_params", shard_size=2, layers=1, bf16=True), zenflow)
    for told, compared in cluster.run(4, flipped, layout):
        assert told[:4] == [""] * 4 and "(master) at iteration 9" in told[4] and "on rank 3" in told[4]
        assert compared == {"master", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("good", [1, 7, 20, 60])
def test_a_copy_that_fails_has_a_name(good: int, clip: float) -> None:
    """Of a gradient or its scale on its way to the host, and of weights on their way back."""
    layout = Layout(layers=1, bf16=True, clip=clip, early=clip == 0.0)
    run = trainer(SINGLE, zen(layout, OVERLAP), copies=Broken(good))
    with pytest.raises(OffloadError, match=r"^optimizer offload, bucket \d+ of .*: got MemoryError: a page of host memory is gone, expect"):
        for index in range(9):
            run.step(index)
    run.optimizer.close()


def rounded(place: Place, layout: Zen) -> dict[str, Tensor]:
    """Norms of columns as this rank finds them, whose gradient differs by a rounding from that of its neighbours."""
    run = trainer(place, layout)
    run.step(0)
    rule = rule_of(run)
    for bucket, one in rule._shards.items():
        rule._norms.add(rule._grads[bucket] * (1 + 1e-6 * place.rank), one.blocks)
    return rule._norms.totals()


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [Layout(dp=4, strategy="optim_grads", shard_size=2, layers=1), Layout(dp=2, strategy="no_shard", layers=1), Layout(tp=2, layers=1)],
    ids=lambda layout: layout.name,
)
def test_all_ranks_take_the_same_norms_for_the_largest(cluster: Cluster, layout: Layout) -> None:
    """Otherwise columns with nearly equal norms would be hot on some replicas only."""
    first, *others = cluster.run(layout.world_size, rounded, zen(layout))
    assert all(torch.equal(other[name], norms) for other in others for name, norms in first.items())
