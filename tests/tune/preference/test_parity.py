"""Every method under every layout equals plain torch on transformers' model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.harness import Cluster
from tests.parallel.cases import LOSS_BOUND, NORM_BOUND, STRATEGIES, Layout, bounds, deviation
from tests.tune.preference.cases import CASES, align, align_twin

STEPS = 4
EVERYTHING = Layout(tp=2, pp=2, dp=2, sp=True, microbatches=2, strategy="optim_grads_params")
LAYOUTS = (
    Layout(tp=2, sp=True),
    Layout(pp=2, microbatches=4),
    Layout(cp=2),
    Layout(cp=2, cp_comm="ring"),
    *(Layout(dp=2, microbatches=2, strategy=strategy) for strategy in STRATEGIES),
    Layout(pp=2, microbatches=4, schedule="zb-v", virtual=2),
    Layout(tp=2, dp=2, tied=True),
    EVERYTHING,
)


def assert_equal(cluster: Cluster, layout: Layout, name: str, *, chunked: bool = False) -> None:
    ranks = cluster.run(layout.world_size, align, layout, CASES[name], chunked)
    expected, expected_numbers = align_twin(layout, CASES[name])
    loss = max(deviation(found.losses, expected.losses) for found, _ in ranks)
    norm = max(deviation(found.norms, expected.norms) for found, _ in ranks)
    if loss >= LOSS_BOUND or norm >= NORM_BOUND:
        exact, _ = align_twin(replace(layout, fp64=True), CASES[name])
        loss_bound, norm_bound = bounds(deviation(expected.losses, exact.losses), deviation(expected.norms, exact.norms))
        assert loss < loss_bound and norm < norm_bound, (loss, loss_bound, norm, norm_bound)
    for found, numbers in ranks:
        assert found.losses == ranks[0][0].losses
        for key, values in expected_numbers.items():
            # Rewards are differences of log-probabilities of about -30, which fp32 rounds to 2e-6.
            assert numbers[key] == pytest.approx(values, rel=2e-6, abs=1e-5), key


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_one_process_equals_plain_torch(cluster: Cluster, name: str) -> None:
    """The head in chunks. The layouts below have the logits at once."""
    assert_equal(cluster, Layout(steps=STEPS), name, chunked=True)


METHODS = [*CASES, "orpo", "kto", "reward"]


@pytest.mark.long
@pytest.mark.parametrize(("layout", "name"), list(zip(LAYOUTS, METHODS, strict=True)), ids=lambda value: getattr(value, "name", value))
def test_layout_equals_plain_torch(cluster: Cluster, layout: Layout, name: str) -> None:
    """Each layout with a method. Every one with each: ``tools/parity.py --preferences``, over twenty steps."""
    assert_equal(cluster, replace(layout, steps=STEPS), name)
