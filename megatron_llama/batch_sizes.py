"""Samples in each step: one number, or more and more of them at the start of a run (--rampup-batch-size)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_llama.config import TrainingConfig
from megatron_llama.errors import describe


@dataclass(frozen=True)
class BatchSizes:
    """The global batch size as a function of the samples that a run has consumed, as Megatron has it."""

    full: int
    """``--global-batch-size``."""
    ramp: tuple[int, ...] = ()
    """First size, what it grows by, and the samples over which it grows to ``full``. Empty: it does not grow."""

    @staticmethod
    def of(training: TrainingConfig) -> BatchSizes:
        """Those of a run."""
        return BatchSizes(training.global_batch_size, training.rampup_batch_size)

    def at(self, consumed: int) -> int:
        """Of the step that begins when so many samples are consumed."""
        if not self.ramp:
            return self.full
        start, increment, samples = self.ramp
        rises = (self.full - start) // increment
        # Megatron's float division of the samples by the rises, in whole numbers.
        return self.full if consumed > samples or rises == 0 else start + min(rises, consumed * rises // samples) * increment

    def all(self) -> Iterator[int]:
        """Every size that can occur, rising."""
        yield from range(self.ramp[0], self.full, self.ramp[1]) if self.ramp else ()
        yield self.full

    def iterations(self, samples: int) -> int:
        """Whole steps of a run of so many samples; a rest that is too short for one is left out."""
        consumed = steps = 0
        while self.ramp and consumed <= min(self.ramp[2], samples):
            consumed += self.at(consumed)
            steps += 1
        if consumed > samples:  # the last of the ramp does not fit
            return steps - 1
        return steps + (samples - consumed) // self.full


def length_problems(training: TrainingConfig, unit: int) -> Iterator[str]:
    """What is wrong with the sizes of the steps and the length of a resolved run. ``unit``: samples in a microbatch of all
    data-parallel ranks; 0: unknown."""
    full, ramp = training.global_batch_size, training.rampup_batch_size
    if ramp and full > 0:
        start, increment, samples = ramp if len(ramp) == 3 else (0, 0, 0)
        got = " ".join(map(str, ramp))
        if min(start, increment, samples) <= 0 or start > full or (full - start) % increment:
            wanted = f"START INCREMENT SAMPLES with START + n x INCREMENT = global_batch_size {full} for a whole n"
            yield describe("--rampup-batch-size", got=got, expected=wanted, do="change these or --global-batch-size")
        elif unit and (start % unit or (increment % unit and start < full)):
            wanted = f"multiples of micro_batch_size x dp = {unit} for START and INCREMENT"
            yield describe("--rampup-batch-size", got=got, expected=wanted, do="change these, or --micro-batch-size")
    if training.train_samples and training.train_iters not in (0, planned_iterations(training)):
        got = f"--train-samples {training.train_samples} and --train-iters {training.train_iters}"
        yield describe("the length of the run", got=got, expected="one of them", do="leave one out")


def planned_iterations(training: TrainingConfig) -> int:
    """Steps of a run whose length is given in samples; 0 where that cannot be told from wrong values."""
    full, ramp = training.global_batch_size, training.rampup_batch_size
    if full <= 0 or training.train_samples <= 0 or len(ramp) not in (0, 3) or (ramp and min(ramp) <= 0):
        return training.train_iters
    return BatchSizes(full, ramp).iterations(training.train_samples)
