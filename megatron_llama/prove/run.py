"""Training runs of a case by the trainer itself, in real processes, with all records that a
comparison needs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_llama.checkpoint.checkpoint_dir import checkpoint_path
from megatron_llama.checkpoint.chunks import is_state, state_key
from megatron_llama.checkpoint.columns import MOMENTS
from megatron_llama.checkpoint.container import Box
from megatron_llama.checkpoint.history import ROLLBACK
from megatron_llama.checkpoint.native_folder import open_native
from megatron_llama.config.schema import Config
from megatron_llama.data.loader import Batch
from megatron_llama.launch.launcher import Place
from megatron_llama.prove.case import STEPS, Case
from megatron_llama.prove.materials import Materials, parsed_options
from megatron_llama.prove.pool import WorkerPool
from megatron_llama.train.api.train import run_training
from megatron_llama.train.run.callbacks import Callback, Run, Step
from megatron_llama.train.setup.deciders import TEXT
from megatron_llama.tune.sft.inputs import EXAMPLES

OUTPUT = "output"
"""Folder of the printed output of a run's ranks."""
SAVED, EXPORTED = "saved", "exported"
LENGTHS = ("train_samples", "epochs")
"""Options that give the length of a run instead of --train-iters."""


@dataclass(frozen=True)
class StepRecord:
    """A rank's record of a step."""

    iteration: int
    loss: float
    """Mean loss over the target tokens of the global batch, fp64; equal on all ranks."""
    grad_norm: float
    """Norm before clipping; equal on all ranks."""
    lr: float
    skipped: bool
    """Whether the step did not change the weights."""
    batches: tuple[Batch, ...]
    """Microbatches that the rank read."""
    seconds: float
    """Time since the step before, including the save of that step."""


@dataclass(frozen=True)
class RankRecord:
    """A rank's record of a run."""

    config: Config
    """The configuration with everything decided."""
    steps: tuple[StepRecord, ...]
    validation_losses: Mapping[int, float]
    """Losses by iteration; 0 is before the first step."""


@dataclass(frozen=True)
class Trained:
    """A run that ended without an error."""

    case: Case
    ranks: tuple[RankRecord, ...]
    checkpoints: Mapping[int, Path]
    """Checkpoints by iteration."""
    export: Path | None
    """HuggingFace folder that the run wrote at its end; None if it stopped before."""
    seconds: float

    @property
    def config(self) -> Config:
        """The configuration with everything decided."""
        return self.ranks[0].config

    @property
    def iterations(self) -> tuple[int, ...]:
        """Steps of this run in order."""
        return tuple(step.iteration for step in self.ranks[0].steps)

    @property
    def losses(self) -> tuple[float, ...]:
        """Training loss of each step on rank 0."""
        return tuple(step.loss for step in self.ranks[0].steps)

    @property
    def grad_norms(self) -> tuple[float, ...]:
        """Norm of each step's gradient before clipping on rank 0."""
        return tuple(step.grad_norm for step in self.ranks[0].steps)

    @property
    def validation_losses(self) -> Mapping[int, float]:
        """Validation losses by iteration on rank 0."""
        return self.ranks[0].validation_losses


@dataclass(frozen=True)
class Tensors:
    """A checkpoint in memory, by HuggingFace's names: whole tensors on the host, including
    adapters."""

    master: Mapping[str, Tensor]
    """Weights as saved, including frozen ones."""
    exp_avg: Mapping[str, Tensor]
    """First moments of trained tensors."""
    exp_avg_sq: Mapping[str, Tensor]
    """Second moments of trained tensors."""
    other: Mapping[str, Tensor]
    """Other tensors of an update rule by key: ZenFlow's columns, and values pending for them."""


def run(
    pool: WorkerPool,
    case: Case,
    folder: Path,
    materials: Materials,
    *,
    start: Path | None = None,
    steps: int = STEPS,
    until: int | None = None,
    timeout: float = 180.0,
) -> Trained:
    """Train a case for ``steps`` steps, in as many processes as it has, into ``folder``.

    ``start`` is the checkpoint from which the run goes on, of any layout. ``until`` is the step
    after which the run stops; its learning rates remain those of a run of ``steps`` steps. Every
    step is saved. Raises WorkerError with the errors and last printed lines of the ranks, within
    ``timeout`` seconds."""
    began = time.monotonic()
    options: dict[str, object] = {
        **case.options,
        **materials.options,
        "save": str(folder / SAVED),
        "save_interval": 1,
        "log_interval": 1,
        "progress_bar": False,
    }
    if start is not None:
        del options["init_from_hf"]
        options["load"] = str(start)
    # A case may give the length of its run, on which its learning rates depend.
    own_length = any(case.options.get(name) for name in LENGTHS)
    if not own_length:
        options["train_iters"] = steps
    last = steps if until is None else until
    if own_length or last < steps:
        options["exit_interval"] = last
    options["export_hf"] = str(folder / EXPORTED)
    case_here = Case(case.name, options, case.world_size, case.sft)
    ranks = pool.run(case.world_size, _train, case_here, timeout=timeout, output=folder / OUTPUT)
    saved = {
        step.iteration: checkpoint_path(folder / SAVED, step.iteration) for step in ranks[0].steps
    }
    export = folder / EXPORTED
    return Trained(
        case,
        tuple(ranks),
        {iteration: path for iteration, path in saved.items() if path.exists()},
        export if export.exists() else None,
        time.monotonic() - began,
    )


def _train(place: Place, case: Case) -> RankRecord:
    """Train as one rank of a run."""
    recorder = Recorder()
    result = run_training(
        parsed_options(case),
        EXAMPLES if case.sft else TEXT,
        callbacks=[recorder],
        needs_data=not case.sft,
        place=Place(
            place.rank,
            place.world_size,
            place.local_rank,
            local_world_size=place.world_size,
            joined=place.world_size > 1,
        ),
    )
    return recorder.rank_record(result.config)


class Recorder(Callback):
    """Records a run on its rank."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._steps: list[StepRecord] = []
        self._validation_losses: dict[int, float] = {}

    def on_start(self, run: Run) -> None:
        self._at = time.monotonic()

    def on_step(self, run: Run, step: Step) -> None:
        self._steps.append(
            StepRecord(
                step.iteration,
                float(step.loss),
                float(step.grad_norm),
                step.lr,
                bool(step.skipped),
                tuple(step.batches),
                self._since(),
            )
        )

    def on_evaluation(self, run: Run, loss: float) -> None:
        self._validation_losses[run.iteration] = loss

    def rank_record(self, config: Config) -> RankRecord:
        """Return the record of a run with this configuration."""
        steps = tuple(self._steps)
        if config.training.on_bad_step == ROLLBACK:
            # A bad step is repeated with other samples. Only its last run counts.
            steps = tuple({step.iteration: step for step in steps}.values())
        return RankRecord(config, steps, self._validation_losses)

    def _since(self) -> float:
        before = self._at
        self._at = time.monotonic()
        return self._at - before


def states(checkpoint: Path) -> Tensors:
    """Return the whole tensors of a native checkpoint of any layout. Raises CheckpointError."""
    container = open_native(checkpoint)
    tensors = {
        key: torch.empty(stored.shape, dtype=stored.dtype)
        for key, stored in container.tensors.items()
    }
    container.read_boxes(
        Box(key, (0,) * len(values.shape), values) for key, values in tensors.items()
    )
    master = {key: tensor for key, tensor in tensors.items() if not is_state(key)}
    moments = {
        state: {name: tensors[key] for name in master if (key := state_key(state, name)) in tensors}
        for state in MOMENTS
    }
    of_moments = {state_key(state, name) for state in MOMENTS for name in moments[state]}
    other = tensors.keys() - master.keys() - of_moments
    return Tensors(
        master=master,
        exp_avg=moments["exp_avg"],
        exp_avg_sq=moments["exp_avg_sq"],
        other={key: tensors[key] for key in sorted(other)},
    )
