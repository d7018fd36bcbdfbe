"""What a run that goes on is told of options that differ from those of its checkpoint."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.config.schema import Config, OptimizerConfig, TrainingConfig
from megatron_llama.train.setup.start import batch_changes

SAVED = asdict(TrainingConfig(global_batch_size=8, micro_batch_size=1))
STATE = TrainState(10, 80)
ITERATIONS = "counts iterations, so each sample meets another rate than it would have; "
WAS = "--global-batch-size was 8 when the checkpoint was saved and is 16: the run goes on at iteration 10, with the sample behind the 80"


@pytest.mark.parametrize(
    ("training", "optimizer", "said"),
    [
        ({"train_iters": 20}, {}, (WAS, ITERATIONS + "the run ends after iteration 20 with 240 samples")),
        (
            {"train_iters": 12, "train_samples": 200},
            {"lr_decay_samples": 200},
            (WAS, "counts samples, so it goes on where it was", "after iteration 12 with 112 samples instead of the 200 of --train-samples"),
        ),
        ({"epochs": 2.0, "train_iters": 20}, {}, (WAS, ITERATIONS + "the run ends with its last pass")),
        (
            {"global_batch_size": 8, "rampup_batch_size": (2, 2, 100), "train_iters": 12},
            {},
            ("--rampup-batch-size was not given when", " and is 2 2 100: ", ITERATIONS + "the run ends after iteration 12 with 92 samples"),
        ),
        ({"global_batch_size": 8, "micro_batch_size": 2}, {}, ("--micro-batch-size was 1 when ", " and is 2: samples and steps are the same")),
        ({"global_batch_size": 8}, {}, ()),
    ],
)
def test_other_batches(training: dict[str, Any], optimizer: dict[str, Any], said: tuple[str, ...]) -> None:
    config = Config(training=TrainingConfig(**{"global_batch_size": 16, **training}), optimizer=OptimizerConfig(**optimizer))
    found = list(batch_changes(SAVED, STATE, config))
    assert len(found) == bool(said) and all(words in line for line in found for words in said)


def test_arguments_of_megatron() -> None:
    """They have None for what is not given, and texts in a ramp."""
    given = {"global_batch_size": 8, "micro_batch_size": 1, "rampup_batch_size": None}
    assert list(batch_changes(given, STATE, Config(training=TrainingConfig(global_batch_size=8)))) == []
    ramp = {**given, "rampup_batch_size": ["2", "2", "100"]}
    now = TrainingConfig(global_batch_size=8, rampup_batch_size=(2, 2, 100))
    assert list(batch_changes(ramp, STATE, Config(training=now))) == []
    assert list(batch_changes({}, STATE, Config())) == []
