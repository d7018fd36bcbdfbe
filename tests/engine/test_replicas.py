"""Replicas that differ by one bit are found, wherever they are, and the rank is named."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from megatron_llama.engine.replicas import _digest, check_replicas, has_replicas, replicated
from megatron_llama.errors import TrainingError
from megatron_llama.launch.launcher import Place

from tests.harness import Cluster
from tests.model.test_activation_memory import EXPERTS, Run
from tests.parallel.cases import Layout, trainer

DP3 = Layout(dp=3, bucket=20_000)
MOMENTS = {"master", "exp_avg", "exp_avg_sq"}
GATHERED = {"dp": {"gathered"}}
LAYOUTS: Mapping[str, tuple[Layout, dict[str, set[str]]]] = {
    "dp": (DP3, GATHERED),
    "no shards": (Layout(dp=2, strategy="no_shard"), {"dp": {"gathered", *MOMENTS}}),
    "hybrid": (Layout(dp=4, strategy="optim_grads_params", shard_size=2), {**GATHERED, "dp_replica": MOMENTS}),
    "early": (Layout(dp=2, early=True, clip=0.0, prefetch=1), GATHERED),
    "tp": (Layout(tp=2, sp=True), {"tp": MOMENTS}),
    "key and value heads": (Layout(tp=4, kv_heads=2), {"tp": MOMENTS, "kv": MOMENTS}),
    "tied": (Layout(pp=2, tied=True, bf16=True), {"embedding": MOMENTS}),
    "frozen": (Layout(dp=2, strategy="optim_grads_params", freeze=("model.layers.*",)), GATHERED),
    "experts": (Run(dp=4, ep=2, fields=tuple(EXPERTS.items())), {**GATHERED, "expert_dp": {"gathered"}}),
    "experts, no shards": (
        Run(dp=4, ep=2, strategy="no_shard", fields=tuple(EXPERTS.items())),
        {"dp": {"gathered", *MOMENTS}, "expert_dp": {"gathered", *MOMENTS}},
    ),
    "experts, hybrid": (
        Run(dp=8, ep=2, shard_size=4, strategy="optim_grads", fields=tuple(EXPERTS.items())),
        {**GATHERED, "dp_replica": MOMENTS, "expert_dp": {"gathered"}, "expert_dp_replica": MOMENTS},
    ),
    "everything": (
        Layout(tp=2, sp=True, pp=2, dp=2, tied=True, strategy="optim_grads"),
        {**GATHERED, "tp": MOMENTS, "embedding": MOMENTS},
    ),
}
"""And what is compared over which axis."""


def compared(place: Place, layout: Layout) -> dict[str, set[str]]:
    """What is compared over which axis, after two steps in which nothing differs."""
    run = trainer(place, layout)
    for step in range(2):
        run.step(step)
        check_replicas(run.optimizer, run.mesh, step)
    found: dict[str, set[str]] = {}
    for one in replicated(run.optimizer):
        found.setdefault(one.axis.name, set()).add(one.what)
    assert has_replicas(run.optimizer, run.mesh)
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_true_replicas_are_left_alone(name: str, cluster: Cluster) -> None:
    """And every copy there is is looked at."""
    layout, expected = LAYOUTS[name]
    assert cluster.run(layout.world_size, compared, layout) == [expected] * layout.world_size


def flipped(place: Place, layout: Layout, victim: int, axis: str, what: str) -> tuple[str, str, float, float]:
    """The complaint after one bit of one rank was flipped; and of that rank the parameter, and its value before and after."""
    run = trainer(place, layout)
    run.step(0)
    run.optimizer.settle()
    told = ("", 0.0, 0.0)
    if place.rank == victim:
        one = [one for one in replicated(run.optimizer) if (one.axis.name, one.what) == (axis, what)][-1]
        before = float(one.tensor[5])
        one.tensor[5:6].view(torch.int32).bitwise_xor_(1 << 20)
        name = one.name if axis != "embedding" else "model.embed_tokens.weight"  # as the first of these ranks calls it
        told = (f"{name} ({one.what}) at iteration 7, element {one.start + 5}: ", before, float(one.tensor[5]))
    with pytest.raises(TrainingError) as error:
        check_replicas(run.optimizer, run.mesh, 7)
    return str(error.value), *told


FLIPS = [
    (DP3, 1, "dp", "gathered", "ranks 0, 2"),
    (LAYOUTS["hybrid"][0], 3, "dp_replica", "exp_avg", "rank 1"),
    (LAYOUTS["tp"][0], 1, "tp", "master", "rank 0"),
    (LAYOUTS["key and value heads"][0], 3, "kv", "exp_avg_sq", "rank 2"),
    (Layout(pp=2, tied=True), 1, "embedding", "master", "rank 0"),
    (LAYOUTS["experts, no shards"][0], 3, "expert_dp", "exp_avg", "rank 1"),
]


@pytest.mark.long
@pytest.mark.parametrize(("layout", "victim", "axis", "what", "others"), FLIPS, ids=lambda value: getattr(value, "name", None))
def test_one_bit_is_found(layout: Layout, victim: int, axis: str, what: str, others: str, cluster: Cluster) -> None:
    answers = cluster.run(layout.world_size, flipped, layout, victim, axis, what)
    _, where, before, after = answers[victim]
    numbers = others.removeprefix("ranks ").removeprefix("rank ")
    expected = f"expected {before:.9g} as on rank {numbers}, over {axis}; look for a faulty memory"
    for said, *_ in answers:
        assert where in said and f"got {after:.9g} on rank {victim} (1 elements differ), {expected}" in said


def holds_replicas(place: Place, layout: Layout) -> bool:
    run = trainer(place, layout)
    return has_replicas(run.optimizer, run.mesh)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [(Layout(pp=2), False), (Layout(pp=2, tied=True), True), (Layout(dp=2), True)],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_layout_in_which_nothing_can_be_compared_is_known(layout: Layout, expected: bool, cluster: Cluster) -> None:
    assert cluster.run(layout.world_size, holds_replicas, layout) == [expected] * layout.world_size


def test_digests_see_a_flipped_bit_in_codes_of_8_bits() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    other = codes.clone()
    other[200] ^= 64
    assert int((_digest(other) != _digest(codes)).sum()) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_digests_see_single_changes_and_exchanges(dtype: torch.dtype) -> None:
    tensor = torch.randn((1 << 20) + 77, generator=torch.Generator().manual_seed(1)).to(dtype)
    digest = _digest(tensor)
    assert torch.equal(_digest(tensor.clone()), digest)
    for place in (0, (1 << 20) - 1, 1 << 20, tensor.numel() - 1):
        other = tensor.clone()
        other[place] = -other[place]
        assert int((_digest(other) != digest).sum()) == 2
    swapped = tensor.clone()
    swapped[3], swapped[1 << 20] = tensor[1 << 20], tensor[3]
    assert (_digest(swapped) != digest).tolist() == [False, True]
