"""The runs that a proof compares. Each is made once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path

from torch import Tensor

from megatron_llama.config.batch_ramp import BatchSizes
from megatron_llama.errors import CheckpointError, ConfigError
from megatron_llama.model.hf import read_hf_config
from megatron_llama.prove.case import STEPS, Case
from megatron_llama.prove.compare import History, gradients_of
from megatron_llama.prove.data_check import RankReads, Reads
from megatron_llama.prove.materials import Materials, folder_weights, make_materials
from megatron_llama.prove.pool import PRINTED_LAST, WorkerError, WorkerPool
from megatron_llama.prove.reference import SPREAD, learning_rates
from megatron_llama.prove.run import Tensors, Trained, run, states

TIMEOUT = 180.0
"""Seconds that a run may take."""


class RunError(Exception):
    """Raised for a failed run: it was refused, ended with an error or too early, repeated a step,
    or did not save one. The message names the run and the problem."""

    def __init__(self, case: Case, told: str, *, refused: bool = False) -> None:
        super().__init__(f"{case.name}: {told}")
        self.case = case
        self.told = told
        """The problem, without the run's name."""
        self.refused = refused
        """Whether the options are refused."""


class Runs:
    """Trains cases, on shared materials where possible, and reads their checkpoints. A run that has
    failed fails again at once."""

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
        """Return the data, tokenizer and weights of a case. Cases that differ only in their layout
        share them. Raises ConfigError."""
        options = {name: case.options[name] for name in case.options.keys() - SPREAD - LIKE}
        key = repr((sorted(options.items()), case.sft))
        if key not in self._materials:
            folder = self.folder / f"materials-{len(self._materials)}"
            self._materials[key] = make_materials(case, folder, self.steps)
        return self._materials[key]

    def trained(self, case: Case, until: int = 0) -> Trained:
        """Return the run of a case with at least its first ``until`` steps; 0 for all. Raises
        RunError."""
        until = until or self.steps
        outcome = self._found(case, until)
        if outcome is None:
            outcome = self._trained[self._key(case), until] = self._train(case, until)
        if isinstance(outcome, RunError):
            raise outcome
        return outcome

    def has(self, case: Case, until: int = 0) -> bool:
        """Whether ``trained`` returns, or raises, without a run."""
        return self._found(case, until or self.steps) is not None

    def _found(self, case: Case, until: int) -> Trained | RunError | None:
        key = self._key(case)
        outcomes = (self._trained.get((key, steps)) for steps in range(until, self.steps + 1))
        return next((outcome for outcome in outcomes if outcome is not None), None)

    def _key(self, case: Case) -> str:
        return repr((sorted(case.options.items()), case.world_size, case.sft))

    def gone_on(self, case: Case, begun: Trained, at: int) -> Trained:
        """Return a run of ``case`` that goes on from step ``at`` of ``begun`` to its last step. The
        case may have another layout. Raises RunError."""
        outcome = self._train(case, begun.iterations[-1], begun.checkpoints[at], at)
        if isinstance(outcome, RunError):
            raise outcome
        return outcome

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
        """Return the checkpoint of each step, in the order of steps. Raises RunError for a
        checkpoint that cannot be read."""
        for step, path in trained.checkpoints.items():
            if path not in self._states:
                try:
                    self._states[path] = states(path)
                except CheckpointError as error:
                    told = f"its checkpoint of step {step} cannot be read: {error}"
                    raise RunError(trained.case, told) from error
        return tuple(self._states[trained.checkpoints[step]] for step in trained.iterations)

    def history(self, trained: Trained, until: int = 0) -> History:
        """Return losses, norms and gradients of a run's first ``until`` steps; 0 for all."""
        until = until or self.steps
        norms = trained.grad_norms[:until]
        return History(
            trained.losses[:until],
            norms,
            gradients_of(self.states(trained)[:until], trained.config.optimizer, norms),
            {at: loss for at, loss in trained.validation_losses.items() if at <= until},
        )

    def start(self, case: Case) -> Mapping[str, Tensor]:
        """Return the initial weights of a case, by HuggingFace's names."""
        folder = self.materials(case).model
        return folder_weights(folder, read_hf_config(folder))


def _told(error: WorkerError) -> str:
    """Return the last line of the error of the first rank that failed."""
    rank, text = next(iter(error.errors.items()))
    raised = text.partition(PRINTED_LAST)[0]
    lines = [line for line in raised.splitlines() if line.strip()]
    return f"rank {rank}: {lines[-1].strip()}" if lines else f"rank {rank}"


def _not_asked_for(trained: Trained, first: int, last: int) -> str:
    """Return why a run has not trained and saved ``first`` to ``last``; empty if it has."""
    asked = tuple(range(first, last + 1))
    for rank, record in enumerate(trained.ranks):
        steps = tuple(step.iteration for step in record.steps)
        if steps != asked:
            done = ", ".join(map(str, steps)) or "none"
            return f"rank {rank} has trained the steps {done} instead of {first} to {last}"
    missing = [str(step) for step in asked if step not in trained.checkpoints]
    return f"it has not saved the steps {', '.join(missing)}" if missing else ""


LIKE = frozenset(
    {
        *(
            "bf16",
            "fp16",
            "fp64",
            "fp8",
            "fp8_gather",
            "fp8_bf16_layers",
            "initial_loss_scale",
            "min_loss_scale",
            "loss_scale_window",
        ),
        *("hysteresis", "clip_grad", "freeze", "z_loss_weight", "lora_rank", "lora_alpha"),
        *("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff"),
        *("optimizer_offload", "optimizer_offload_fraction", "offload_speculative"),
        *("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "global_batch_size"),
        "adam_eps",
    }
)
"""Options that do not change the materials, in addition to those of the layout (SPREAD)."""


def batch_sizes(trained: Trained) -> tuple[int, ...]:
    """Return the number of samples of each step."""
    sizes = BatchSizes.from_training(trained.config.training)
    samples: list[int] = []
    for _ in trained.iterations:
        samples.append(sizes.at(sum(samples)))
    return tuple(samples)


def rates_of(trained: Trained) -> tuple[float, ...]:
    """Return the learning rates that the steps of a run must have."""
    config = trained.config
    return learning_rates(config.optimizer, config.training.train_iters, batch_sizes(trained))


def reads_of(trained: Trained) -> Reads:
    """Return the samples that each rank of a run has read."""
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
