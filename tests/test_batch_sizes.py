"""Growing batches, against Megatron's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

from megatron_llama.batch_sizes import BatchSizes, length_problems
from megatron_llama.config import TrainingConfig

RAMPS = [(2, 2, 20), (4, 4, 100), (8, 24, 33), (2, 6, 1), (31, 1, 50), (16, 16, 7)]


@pytest.mark.parametrize("ramp", RAMPS)
def test_as_megatron(ramp: tuple[int, int, int]) -> None:
    theirs = RampupBatchsizeNumMicroBatchesCalculator(32, 1, 1, False, 1, *ramp)
    ours = BatchSizes(32, ramp)
    seen = set()
    for consumed in range(150):
        theirs.update(consumed, False)
        assert ours.at(consumed) == theirs.get_current_global_batch_size(), consumed
        seen.add(ours.at(consumed))
    assert seen <= set(ours.all()) and max(ours.all()) == 32


@pytest.mark.parametrize("ramp", [(), *RAMPS])
@pytest.mark.parametrize("samples", [1, 3, 19, 31, 32, 100, 1000])
def test_a_run_is_as_many_whole_steps_as_its_samples_are_enough_for(ramp: tuple[int, ...], samples: int) -> None:
    sizes, consumed, steps = BatchSizes(32, ramp), 0, 0
    while consumed + sizes.at(consumed) <= samples:
        consumed, steps = consumed + sizes.at(consumed), steps + 1
    assert sizes.iterations(samples) == steps


FINE = TrainingConfig(micro_batch_size=2, global_batch_size=32, train_iters=5)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rampup_batch_size": (4, 4)}, "--rampup-batch-size: got 4 4, expected START INCREMENT SAMPLES with"),
        ({"rampup_batch_size": (4, 3, 10)}, "global_batch_size 32 for a whole n; change these or --global-batch-size"),
        ({"rampup_batch_size": (64, 4, 10)}, "global_batch_size 32 for a whole n"),
        ({"rampup_batch_size": (2, 2, 10)}, "--rampup-batch-size: got 2 2 10, expected multiples of micro_batch_size x dp = 4"),
        ({"train_samples": 100}, "got --train-samples 100 and --train-iters 5, expected one of them; leave one out"),
    ],
)
def test_what_is_refused(changes: dict[str, object], says: str) -> None:
    assert list(length_problems(FINE, 4)) == list(length_problems(replace(FINE, rampup_batch_size=(4, 4, 10)), 4)) == []
    [problem] = length_problems(replace(FINE, **changes), 4)  # type: ignore[arg-type]
    assert says in problem
