"""Growing batches, against Megatron's own; how long a run is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from megatron_llama.config.batch_ramp import BatchSizes, length_problems, size_problems, with_decay, with_epochs
from megatron_llama.config.schema import Config, OptimizerConfig, TrainingConfig

from tests.over_cases import over_cases

RAMPS = [(2, 2, 20), (4, 4, 100), (8, 24, 33), (2, 6, 1), (31, 1, 50), (16, 16, 7)]


@pytest.mark.long
@pytest.mark.parametrize("ramp", RAMPS)
def test_as_megatron(ramp: tuple[int, int, int]) -> None:
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    theirs = RampupBatchsizeNumMicroBatchesCalculator(32, 1, 1, False, 1, *ramp)
    ours = BatchSizes(32, ramp)
    seen = set()
    for consumed in range(150):
        theirs.update(consumed, False)
        assert ours.at(consumed) == theirs.get_current_global_batch_size(), consumed
        seen.add(ours.at(consumed))
    assert seen <= set(ours.all()) and max(ours.all()) == 32


@over_cases
@pytest.mark.parametrize("ramp", [(), *RAMPS])
@pytest.mark.parametrize("samples", [1, 3, 19, 31, 32, 100, 1000])
@pytest.mark.parametrize("first", [0, 2, 40])
def test_a_run_is_as_many_whole_steps_as_its_samples_are_enough_for(ramp: tuple[int, ...], samples: int, first: int) -> None:
    sizes, consumed, steps = BatchSizes(32, ramp), first, 0
    while consumed + sizes.at(consumed) <= samples:
        consumed, steps = consumed + sizes.at(consumed), steps + 1
    assert sizes.steps(first, samples) == (steps, max(samples - consumed, 0))
    assert first or sizes.samples(steps) == consumed


@over_cases
@pytest.mark.parametrize("ramp", [(), *RAMPS])
@pytest.mark.parametrize("samples", [1, 31, 32, 100, 101])
def test_every_sample_of_a_run_of_epochs_is_in_one_step(ramp: tuple[int, ...], samples: int) -> None:
    """The last step has what is left, in as many places as any other."""
    training = TrainingConfig(micro_batch_size=1, global_batch_size=32, rampup_batch_size=ramp, epochs=2)
    config = with_epochs(Config(training=training), samples)
    sizes, consumed, whole = BatchSizes.from_training(config.training), 0, BatchSizes(32, ramp)
    for _ in range(config.training.train_iters):
        assert 0 < sizes.at(consumed) <= sizes.places(consumed) == whole.at(consumed)
        consumed += sizes.at(consumed)
    assert consumed == config.training.train_samples == 2 * samples
    assert sizes.at(consumed) == whole.at(consumed)


def test_epochs_by_their_numbers() -> None:
    """Shares of a pass; going on with more of them; an end that lies behind."""
    config = Config(training=TrainingConfig(global_batch_size=8, epochs=0.5))
    assert with_epochs(config, 21).training.train_samples == 10 and with_epochs(config, 21).training.train_iters == 2
    assert with_epochs(config, 1).training.train_iters == 1
    longer = replace(config, training=replace(config.training, epochs=3))
    # Two epochs of 21 samples were 6 steps, the last one of 2 samples.
    assert with_epochs(longer, 21, steps_done=6, samples_done=42).training.train_iters == 6 + 3
    assert with_epochs(config, 21, steps_done=6, samples_done=42).training.train_iters == 6
    counted = Config(training=TrainingConfig(global_batch_size=8, train_iters=4))
    assert with_epochs(counted, 21) is counted


def test_where_the_decay_ends() -> None:
    by_steps, by_samples = (TrainingConfig(train_iters=9), TrainingConfig(train_iters=9, train_samples=80))
    assert with_decay(OptimizerConfig(), by_steps).lr_decay_iters == 9
    assert with_decay(OptimizerConfig(), by_samples) == OptimizerConfig(lr_decay_samples=80)
    assert with_decay(OptimizerConfig(lr_warmup_samples=4), by_samples) == OptimizerConfig(lr_decay_samples=80, lr_warmup_samples=4)
    assert with_decay(OptimizerConfig(lr_warmup_iters=4), by_samples) == OptimizerConfig(lr_decay_iters=9, lr_warmup_iters=4)
    epochs = TrainingConfig(train_iters=9, train_samples=80, epochs=2)
    assert with_decay(OptimizerConfig(), epochs).lr_decay_iters == 9
    assert with_decay(OptimizerConfig(lr_warmup_samples=4), epochs).lr_decay_samples == 80


FINE = TrainingConfig(micro_batch_size=2, global_batch_size=32, train_iters=5)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rampup_batch_size": (4, 4)}, "--rampup-batch-size: got 4 4, expected START INCREMENT SAMPLES with"),
        ({"rampup_batch_size": (4, 3, 10)}, "global_batch_size 32 for a whole n; change these or --global-batch-size"),
        ({"rampup_batch_size": (64, 4, 10)}, "global_batch_size 32 for a whole n"),
        ({"rampup_batch_size": (2, 2, 10)}, "--rampup-batch-size: got 2 2 10, expected multiples of micro_batch_size x dp = 4"),
        ({"train_samples": 100}, "got --train-samples 100 and --train-iters 5, expected one of them; leave one out"),
        ({"epochs": 1.5}, "got --train-iters 5 and --epochs 1.5, expected one of them"),
        ({"train_samples": 64, "train_iters": 2, "epochs": 1.0}, "got --train-samples 64 and --epochs 1, expected one of them"),
        ({"train_samples": 20, "train_iters": 0}, "--train-samples: got 20, expected enough for a step of 32"),
        ({"train_iters": 0}, "--train-iters: got 0, expected a positive number; give --train-iters N, --train-samples N or --epochs N"),
        ({"train_iters": -1, "epochs": 1.0}, "--train-iters: got -1"),
    ],
)
def test_what_is_refused(changes: dict[str, object], says: str) -> None:
    def problems(training: TrainingConfig) -> list[str]:
        return [*size_problems(training, 4), *length_problems(training)]

    for fine in ({}, {"rampup_batch_size": (4, 4, 10)}, {"epochs": 2.0, "train_iters": 0}, {"train_samples": 64, "train_iters": 2}):
        assert problems(replace(FINE, **fine)) == []  # type: ignore[arg-type]
    [problem] = problems(replace(FINE, **changes))  # type: ignore[arg-type]
    assert says in problem
