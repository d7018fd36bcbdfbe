"""The runs that a proof compares, each made once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from megatron_llama.config.batch_ramp import BatchSizes
from megatron_llama.errors import CheckpointError, ConfigError
from megatron_llama.prove.case import STEPS, Case
from megatron_llama.prove.compare import History, gradients_of
from megatron_llama.prove.data_check import RankReads, Reads
from megatron_llama.prove.materials import Materials, make_materials
from megatron_llama.prove.pool import PRINTED_LAST, WorkerError, WorkerPool
from megatron_llama.prove.reference import SPREAD, learning_rates
from megatron_llama.prove.run import Tensors, Trained, run, states

TIMEOUT = 180.0
"""Seconds that a run may take."""


class RunError(Exception):
    """A run did not do what it was asked for: it was refused, ended with an error or too early,
    repeated a step, or has not saved one. The message says which run, and what."""

    def __init__(self, case: Case, told: str, *, refused: bool = False) -> None:
        super().__init__(f"{case.name}: {told}")
        self.case = case
        self.told = told
        """What the run has done, without its name."""
        self.refused = refused
        """Whether the options are refused."""


class Runs:
    """Trains cases on the same materials where they can share them, and reads what they have
    written. A run that has failed fails again at once."""

    def __init__(self, pool: WorkerPool, folder: Path, *, steps: int = STEPS) -> None:
        self.pool = pool
        self.folder = folder
        self.steps = steps
        self.longest = 0.0
        """Seconds of the longest run so far."""
        self._numbers = count()
        self._materials: dict[str, Materials] = {}
        self._trained: dict[tuple[str, int], Trained | RunError] = {}
        self._states: dict[Path, Tensors] = {}

    def materials(self, case: Case) -> Materials:
        """What a case is trained on and from; the same for cases that differ in how they are
        spread alone. Raises ConfigError."""
        options = {name: case.options[name] for name in case.options.keys() - SPREAD - LIKE}
        key = repr((sorted(options.items()), case.sft))
        if key not in self._materials:
            folder = self.folder / f"materials-{len(self._materials)}"
            self._materials[key] = make_materials(case, folder, self.steps)
        return self._materials[key]

    def trained(self, case: Case, until: int = 0) -> Trained:
        """The run of a case, or its first ``until`` steps, of which there may be more. Raises
        RunError."""
        until = until or self.steps
        found = self._found(case, until)
        if found is None:
            found = self._trained[self._key(case), until] = self._train(case, until)
        if isinstance(found, RunError):
            raise found
        return found

    def has(self, case: Case, until: int = 0) -> bool:
        """Whether ``trained`` returns, or raises, without a run."""
        return self._found(case, until or self.steps) is not None

    def _found(self, case: Case, until: int) -> Trained | RunError | None:
        key = self._key(case)
        found = (self._trained.get((key, steps)) for steps in range(until, self.steps + 1))
        return next((one for one in found if one is not None), None)

    def _key(self, case: Case) -> str:
        return repr((sorted(case.options.items()), case.world_size, case.sft))

    def gone_on(self, case: Case, begun: Trained, at: int) -> Trained:
        """A run that goes on from step ``at`` of another one, to its last step, as a case that
        may have another layout. Raises RunError."""
        found = self._train(case, begun.iterations[-1], begun.checkpoints[at], at)
        if isinstance(found, RunError):
            raise found
        return found

    def _train(
        self, case: Case, until: int, start: Path | None = None, at: int = 0
    ) -> Trained | RunError:
        began = time.monotonic()
        folder = self.folder / f"run-{next(self._numbers)}"
        try:
            trained = run(
                self.pool,
                case,
                folder,
                self.materials(case),
                start=start,
                steps=self.steps,
                until=until,
                timeout=TIMEOUT,
            )
        except ConfigError as error:
            return RunError(case, f"it is refused: {error}", refused=True)
        except WorkerError as error:
            refused = any(ConfigError.__name__ in text for text in error.errors.values())
            return RunError(case, _told(error), refused=refused)
        finally:
            self.longest = max(self.longest, time.monotonic() - began)
        last = min(until, trained.config.training.train_iters)
        wrong = _not_asked_for(trained, at + 1, last)
        return RunError(case, wrong) if wrong else trained

    def states(self, trained: Trained) -> tuple[Tensors, ...]:
        """What each step has left, in the order of the steps. Raises RunError for a checkpoint that
        cannot be read."""
        for step, path in trained.checkpoints.items():
            if path not in self._states:
                try:
                    self._states[path] = states(path)
                except CheckpointError as error:
                    told = f"its checkpoint of step {step} cannot be read: {error}"
                    raise RunError(trained.case, told) from error
        return tuple(self._states[trained.checkpoints[step]] for step in trained.iterations)

    def history(self, trained: Trained, until: int = 0) -> History:
        """What a run has come to in its steps, or in the first ones."""
        until = until or self.steps
        norms = trained.grad_norms[:until]
        return History(
            trained.losses[:until],
            norms,
            gradients_of(self.states(trained)[:until], trained.config.optimizer, norms),
            {at: loss for at, loss in trained.validation_losses.items() if at <= until},
        )

    def start(self, case: Case) -> Mapping[str, Tensor]:
        """The weights with which a case begins, by HuggingFace's names."""
        weights: dict[str, Tensor] = {}
        for file in sorted(self.materials(case).model.glob("*.safetensors")):
            weights |= load_file(file)
        return weights


def _told(error: WorkerError) -> str:
    """The last line of what the first rank that failed has raised."""
    rank, text = next(iter(error.errors.items()))
    raised = text.partition(PRINTED_LAST)[0]
    lines = [line for line in raised.splitlines() if line.strip()]
    return f"rank {rank}: {lines[-1].strip()}" if lines else f"rank {rank}"


def _not_asked_for(trained: Trained, first: int, last: int) -> str:
    """Say how a run is not that of the steps ``first`` to ``last``; empty where it is."""
    asked = tuple(range(first, last + 1))
    for rank, record in enumerate(trained.ranks):
        steps = tuple(step.iteration for step in record.steps)
        if steps != asked:
            found = ", ".join(map(str, steps)) or "none"
            return f"rank {rank} has trained the steps {found} instead of {first} to {last}"
    missing = [str(step) for step in asked if step not in trained.checkpoints]
    return f"it has not saved the steps {', '.join(missing)}" if missing else ""


LIKE = frozenset(
    {
        *("bf16", "fp16", "fp64", "initial_loss_scale", "min_loss_scale", "loss_scale_window"),
        *("hysteresis", "clip_grad", "freeze", "z_loss_weight", "lora_rank", "lora_alpha"),
        *("optimizer_offload", "optimizer_offload_fraction", "offload_speculative"),
        *("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "global_batch_size"),
        "adam_eps",
    }
)
"""Options that change nothing of the materials, beside those that say how a run is spread."""


def batch_sizes(trained: Trained) -> tuple[int, ...]:
    """The samples of each step."""
    sizes = BatchSizes.from_training(trained.config.training)
    found: list[int] = []
    for _ in trained.iterations:
        found.append(sizes.at(sum(found)))
    return tuple(found)


def rates_of(trained: Trained) -> tuple[float, ...]:
    """The learning rates that the steps of a run must have."""
    config = trained.config
    return learning_rates(config.optimizer, config.training.train_iters, batch_sizes(trained))


def reads_of(trained: Trained) -> Reads:
    """What each rank of a run has read."""
    case = trained.case
    tp, cp, pp = (
        case.options.get(f"{axis}_parallel_size", 1)
        for axis in ("tensor_model", "context", "pipeline_model")
    )
    assert isinstance(tp, int) and isinstance(cp, int) and isinstance(pp, int)
    dp = case.world_size // (tp * cp * pp)
    return {
        step: [
            RankReads(rank // (tp * cp) % dp, record.steps[index].batches)
            for rank, record in enumerate(trained.ranks)
        ]
        for index, step in enumerate(trained.iterations)
    }
