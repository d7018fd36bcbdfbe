"""Samples in each step, and the steps of a run.

A step has --global-batch-size samples, fewer while --rampup-batch-size grows. The last step of
--epochs has those that are left."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_llama.config.schema import Config, OptimizerConfig, TrainingConfig
from megatron_llama.errors import describe


@dataclass(frozen=True)
class BatchSizes:
    """The global batch size as a function of the samples that a run has consumed, as in
    Megatron."""

    full: int
    """``--global-batch-size``."""
    ramp: tuple[int, ...] = ()
    """(first size, increment, samples over which it grows to ``full``); empty: it does not grow."""
    end: int = 0
    """Samples after which the run ends; its last step has those that are left. 0: every step has
    its whole size."""

    @staticmethod
    def from_training(training: TrainingConfig) -> BatchSizes:
        """Return the batch sizes of a run."""
        return BatchSizes(
            training.global_batch_size,
            training.rampup_batch_size,
            training.train_samples if training.epochs else 0,
        )

    def at(self, consumed: int) -> int:
        """Return the number of samples of the step that begins after ``consumed`` samples."""
        size = self.places(consumed)
        return min(size, self.end - consumed) if consumed < self.end else size

    def places(self, consumed: int) -> int:
        """Return the size of that step without regard to ``end``."""
        if not self.ramp:
            return self.full
        start, increment, samples = self.ramp
        rises = (self.full - start) // increment
        # Megatron's float division of the samples by the rises, in whole numbers.
        return (
            self.full
            if consumed > samples or rises == 0
            else start + min(rises, consumed * rises // samples) * increment
        )

    def all(self) -> Iterator[int]:
        """Yield every size that can occur, in ascending order."""
        yield from range(self.ramp[0], self.full, self.ramp[1]) if self.ramp else ()
        yield self.full

    def samples(self, steps: int) -> int:
        """Return the number of samples of the first ``steps`` steps of a run."""
        consumed = 0
        while self.ramp and steps and consumed <= self.ramp[2]:
            consumed += self.places(consumed)
            steps -= 1
        consumed += steps * self.full
        return min(consumed, self.end) if self.end else consumed

    def steps(self, first: int, last: int) -> tuple[int, int]:
        """Count the whole steps that fit between the samples ``first`` and ``last``, and the
        samples that are left after them."""
        steps = 0
        while self.ramp and first <= self.ramp[2]:
            size = self.places(first)
            if first + size > last:
                return steps, max(last - first, 0)
            first = first + size
            steps = steps + 1
        more, left = divmod(max(last - first, 0), self.full)
        return steps + more, left


def with_decay(optimizer: OptimizerConfig, training: TrainingConfig) -> OptimizerConfig:
    """Fill in the end of the learning rate's decay, if the length of the run is known.

    As in Megatron the end is counted in samples if any length of the schedule is given in samples,
    or if the run's length is and no length of the schedule is given in iterations. Otherwise it is
    counted in iterations."""
    in_iterations = (
        optimizer.lr_decay_iters or optimizer.lr_warmup_iters or optimizer.lr_wsd_decay_iters
    )
    in_samples = (
        optimizer.lr_decay_samples or optimizer.lr_warmup_samples or optimizer.lr_wsd_decay_samples
    )
    if in_samples or (training.train_samples and not training.epochs and not in_iterations):
        return replace(
            optimizer, lr_decay_samples=optimizer.lr_decay_samples or training.train_samples
        )
    return replace(optimizer, lr_decay_iters=optimizer.lr_decay_iters or training.train_iters)


def with_epochs(
    config: Config, samples: int, *, steps_done: int = 0, samples_done: int = 0
) -> Config:
    """Fill in the length of a run of --epochs, now that its training samples are counted.

    A resumed run goes on after ``steps_done`` and ``samples_done``."""
    training = config.training
    if not training.epochs:
        return config
    last = max(1, round(training.epochs * samples))
    whole, left = BatchSizes(training.global_batch_size, training.rampup_batch_size).steps(
        samples_done, last
    )
    training = replace(training, train_samples=last, train_iters=steps_done + whole + (left > 0))
    return replace(config, training=training, optimizer=with_decay(config.optimizer, training))


def length_problems(training: TrainingConfig) -> Iterator[str]:
    """Yield problems of the length of a resolved run."""
    iterations = training.train_iters
    samples = training.train_samples
    epochs = training.epochs
    derived = samples > 0 and iterations == planned_iterations(training)
    given = [f"--train-samples {samples}"] * (samples > 0) + [f"--train-iters {iterations}"] * (
        iterations > 0 and not derived
    )
    given += [f"--epochs {epochs:g}"] * (epochs > 0)
    if len(given) > 1:
        yield describe(
            "the length of the run",
            got=" and ".join(given),
            expected="one of them",
            do="leave one out, or give it as 0",
        )
    elif derived and iterations == 0:
        wanted = f"enough for a step of {training.global_batch_size}"
        do = "give more, or lower --global-batch-size"
        yield describe("--train-samples", got=samples, expected=wanted, do=do)
    elif iterations < 0 or not given:
        do = "give --train-iters N, --train-samples N or --epochs N"
        yield describe("--train-iters", got=iterations, expected="a positive number", do=do)


def size_problems(training: TrainingConfig, unit: int) -> Iterator[str]:
    """Yield problems of --rampup-batch-size in a resolved run. ``unit``: samples in one microbatch
    of all data-parallel ranks."""
    full = training.global_batch_size
    ramp = training.rampup_batch_size
    if ramp and full > 0:
        start, increment, samples = ramp if len(ramp) == 3 else (0, 0, 0)
        got = " ".join(map(str, ramp))
        if min(start, increment, samples) <= 0 or start > full or (full - start) % increment:
            wanted = (
                "START INCREMENT SAMPLES with START + n x INCREMENT = global_batch_size "
                f"{full} for a whole n"
            )
            yield describe(
                "--rampup-batch-size",
                got=got,
                expected=wanted,
                do="change these or --global-batch-size",
            )
        elif start % unit or (increment % unit and start < full):
            wanted = f"multiples of micro_batch_size x dp = {unit} for START and INCREMENT"
            yield describe(
                "--rampup-batch-size",
                got=got,
                expected=wanted,
                do="change these, or --micro-batch-size",
            )


def run_samples(training: TrainingConfig) -> int:
    """Return the number of samples of a run as Megatron counts them when it shuffles its datasets:
    a growing batch counts with its full size."""
    return training.train_samples or training.train_iters * training.global_batch_size


def planned_iterations(training: TrainingConfig) -> int:
    """Return the number of steps of a run whose length is given in samples. Otherwise, and for
    invalid sizes, return ``train_iters``."""
    full = training.global_batch_size
    ramp = training.rampup_batch_size
    if (
        full <= 0
        or training.train_samples <= 0
        or len(ramp) not in (0, 3)
        or (ramp and min(ramp) <= 0)
    ):
        return training.train_iters
    return BatchSizes(full, ramp).steps(0, training.train_samples)[0]
