"""The parts of a run, each built from the configuration: samples, loader, first weights, log and
validation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_llama.checkpoint import native
from megatron_llama.checkpoint.adapters import saved_lora, takes_up
from megatron_llama.checkpoint.failures import writing
from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.checkpoint.saver import Saver
from megatron_llama.checkpoint.storage_paths import local_folder
from megatron_llama.config.batch_ramp import BatchSizes, with_epochs
from megatron_llama.config.blend import read_blend
from megatron_llama.config.schema import Config
from megatron_llama.convert.hf.reader import HFWeights
from megatron_llama.data.indexed import IndexedDataset
from megatron_llama.data.loader import BatchLoader, BlendedSamples, Samples, StreamSamples
from megatron_llama.data.stream import TokenStream, split_documents
from megatron_llama.distributed.comm.object_collectives import (
    broadcast_object,
    on_rank0,
    raise_on_all_ranks,
)
from megatron_llama.distributed.mesh import Mesh
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer, WeightSource
from megatron_llama.errors import ConfigError, DataError, TrainingError, listing
from megatron_llama.loop.bad_steps import ROLLBACK
from megatron_llama.loop.start import (
    AUTO,
    Start,
    begins_anew,
    damaged,
    data_changes,
    find_start,
    resumed,
    sample_changes,
)
from megatron_llama.metrics.log import MetricLog, MetricLogger
from megatron_llama.metrics.tensorboard import TensorBoard
from megatron_llama.metrics.wandb import WandB
from megatron_llama.model.init import InitialWeights, WithAdapters
from megatron_llama.pipeline.runtime import PipelineRuntime
from megatron_llama.plans.checks.optimizer import optimizer_problems

TRAINING = 0
VALIDATION = 1
Source = Callable[[Config, int], Samples]
"""Makes the samples of TRAINING or VALIDATION. Raises DataError. It must not be collective."""


def open_stream(config: Config, prefix: str, part: int) -> TokenStream:
    """Open the training or the validation split of a dataset. Raises DataError."""
    dataset = IndexedDataset(prefix)
    documents = split_documents(config.data.split, dataset.num_documents)[part]
    stream = TokenStream(dataset, documents, config.training.seq_length, config.model.vocab_size)
    stream.require_samples(("training", "validation")[part])
    return stream


def stream_samples(config: Config, part: int, *, eod: int | None) -> Samples:
    """The ``Source`` of --data-path. ``eod`` is the end-of-document id, where an option needs
    one."""
    blend = read_blend(config.data.data_path)
    parts = [
        StreamSamples(open_stream(config, prefix, part), config.data, eod)
        for prefix in blend.prefixes
    ]
    if len(parts) == 1:
        return parts[0]
    return BlendedSamples(parts, blend.weights or [len(samples) for samples in parts])


def open_training_samples(
    config: Config, mesh: Mesh, source: Source, *, same_data: bool
) -> tuple[Config, Samples, Mapping[str, Any]]:
    """Open the training samples. Returns the configuration, with the number of steps that --epochs
    leaves to the samples; the samples; and their identity, which a checkpoint keeps.

    A run that resumes compares the identity with that of its checkpoint. Where they differ it
    prints a warning, or raises DataError with ``same_data``. Collective. Raises DataError,
    ConfigError, CheckpointError."""
    with raise_on_all_ranks(mesh.world):
        samples = source(config, TRAINING)

    def compare_with_checkpoint() -> tuple[Mapping[str, Any], TrainState]:
        identity = samples.identity()
        meta = resumed(config.checkpoint)
        changes = sample_changes(meta.state.data, identity) if meta is not None else ""
        if meta is not None and changes and same_data:
            do = (
                "give the files and options of that run, begin anew with its weights (--finetune), "
                "or --on-changed-data continue"
            )
            got = f"other training samples than those of {meta.folder} ({changes})"
            expected = "the samples in whose order the run goes on"
            raise DataError("--train-data", got=got, expected=expected, do=do)
        if meta is not None and changes:
            print(
                f" warning: other training samples than those of {meta.folder} ({changes})",
                flush=True,
            )
        return identity, meta.state if meta is not None else TrainState(0, 0)

    identity, state = on_rank0(compare_with_checkpoint, mesh.world)
    with raise_on_all_ranks(mesh.world):
        config = _with_run_length(config, mesh, len(samples), state)
    return config, samples, identity


def _with_run_length(config: Config, mesh: Mesh, samples: int, state: TrainState) -> Config:
    """The configuration with the number of steps that --epochs means. Raises ConfigError for
    options that do not fit it."""
    if not config.training.epochs:
        return config
    # A rollback repeats iterations with other samples: those that are left out are consumed, but no
    # step that counts has had them.
    left_out = 0
    if config.training.on_bad_step == ROLLBACK:
        skipped = state.history.skipped
        left_out = sum(one.last_sample + 1 - one.first_sample for one in skipped)
    config = with_epochs(
        config, samples, steps_done=state.iteration, samples_done=state.consumed_samples - left_out
    )
    found = list(optimizer_problems(config.optimizer, config.training))
    steps = config.training.train_iters
    epochs = config.training.epochs
    if found:
        raise ConfigError(
            listing(
                f"These options do not fit a run of {steps} steps (--epochs {epochs:g}):", found
            )
        )
    if mesh.rank == 0:
        print(
            f" --epochs {epochs:g}: {samples:,} samples in a pass, {steps:,} steps in all",
            flush=True,
        )
    return config


def build_loader(config: Config, mesh: Mesh, samples: Samples) -> BatchLoader:
    """The loader of this rank's share of every training step."""
    return BatchLoader(
        samples,
        shuffled=config.data.data_order == "shuffled",
        micro_batch_size=config.training.micro_batch_size,
        global_batch_size=BatchSizes.from_training(config.training),
        seed=config.training.seed,
        dp_rank=mesh.data_rank,
        dp_size=mesh.data_size,
    )


def load_or_init(
    config: Config, optimizer: OverlappedDistributedOptimizer, mesh: Mesh
) -> TrainState:
    """Load the weights and the state from which the run starts: a checkpoint, a folder of another
    format, or weights drawn from the seed. Collective. Raises CheckpointError."""
    options = config.checkpoint
    weights: WeightSource
    start = on_rank0(lambda: find_start(options), mesh.world)
    with raise_on_all_ranks(mesh.world):
        for line in _start_lines(config, start) if mesh.rank == 0 else ():
            print(f" {line}", flush=True)
    resumes = (
        start is not None
        and start.native
        and takes_up(
            f"--load {start.path}",
            saved_lora(native.read_meta(start.path).config),
            config.lora,
            anew=options.finetune,
        )
    )
    if start is not None and resumes:
        state = native.load(
            start.path,
            optimizer,
            mesh,
            config.model,
            optimizer=options.load_optim and not options.finetune,
        )
        return TrainState(0, 0) if options.finetune else state
    if start is not None:
        with raise_on_all_ranks(mesh.world):
            weights = start.weights(config.model)
    elif options.init_from_hf is not None:
        with raise_on_all_ranks(mesh.world):
            weights = HFWeights(options.init_from_hf)
    else:
        weights = InitialWeights(config.training.seed, config.model.initializer_range)
    optimizer.load_weights(WithAdapters(weights, config.training.seed))
    return TrainState(0, 0)


def _start_lines(config: Config, start: Start | None) -> Iterator[str]:
    """What the user should know about the place from which the run starts."""
    options = config.checkpoint
    if start is None:
        if options.load is not None:
            begins = (
                "a fresh start"
                if options.init_from_hf is None
                else f"the weights of {options.init_from_hf}"
            )
            yield f"--load {options.load}: no checkpoint there yet, {begins}"
    elif begins_anew(options, start):
        yield f"--load {options.load}: the weights of {start.path}; the run begins at iteration 0"
    else:
        if options.load == AUTO:
            yield from (f"warning: {text}" for text in damaged(start))
        yield from (
            f"warning: {text}" for text in data_changes(native.read_meta(start.path).config, config)
        )


def roll_back(
    config: Config,
    optimizer: OverlappedDistributedOptimizer,
    mesh: Mesh,
    saver: Saver,
    log: MetricLog,
) -> TrainState:
    """Return to the newest checkpoint of this run, or to its start where there is none. Collective.
    Raises CheckpointError."""
    saver.finish(log)
    optimizer.reset()
    newest = saver.newest
    state = (
        native.load(newest, optimizer, mesh, config.model)
        if newest is not None
        else load_or_init(config, optimizer, mesh)
    )
    log.rewind(state.iteration)
    log.say(f" back to iteration {state.iteration}")
    return state


def open_log(config: Config, mesh: Mesh, state: TrainState) -> MetricLog:
    """Open the log of this run, which rank 0 writes. Collective. Raises CheckpointError if the log
    cannot be written."""
    folder = local_folder(config.checkpoint.save) if config.checkpoint.save is not None else None
    loggers = list[MetricLogger]()
    with raise_on_all_ranks(mesh.world), writing(Path(config.log.tensorboard_dir or ".")):
        if mesh.rank == 0 and config.log.tensorboard_dir is not None:
            loggers.append(TensorBoard(config.log, state.iteration))
        if mesh.rank == 0 and config.log.wandb_project is not None:
            loggers.append(WandB(config))
    with raise_on_all_ranks(mesh.world), writing(folder or Path(".")):
        log = MetricLog(
            folder,
            prints=mesh.rank == 0,
            start_iteration=state.iteration,
            train_iters=config.training.train_iters,
            progress_bar=config.log.progress_bar,
            loggers=loggers,
        )
    if config.log.job_name is not None:
        log.say(f" job {config.log.job_name}")
    return log


class Validation:
    """Evaluates the mean loss over the validation samples, the same ones every time."""

    def __init__(
        self, config: Config, mesh: Mesh, runtime: PipelineRuntime, source: Source
    ) -> None:
        self._training = config.training
        self._runtime = runtime
        self._world = mesh.world
        self._unit = config.training.micro_batch_size * mesh.data_size
        if self._training.eval_interval == 0:
            return
        with raise_on_all_ranks(mesh.world):
            samples = source(config, VALIDATION)
            # One microbatch per rank and call, so that an evaluation may end anywhere, not only
            # after whole global batches.
            self._loader = BatchLoader(
                samples,
                shuffled=False,
                micro_batch_size=self._training.micro_batch_size,
                global_batch_size=BatchSizes(self._unit, end=len(samples)),
                seed=self._training.seed,
                dp_rank=mesh.data_rank,
                dp_size=mesh.data_size,
            )
        # The last unit may have fewer samples than places; each sample counts once.
        self._units = -(-len(samples) // self._unit)
        self._per_batch = self._training.global_batch_size // self._unit
        if self._training.eval_iters:
            self._units = min(self._units, self._training.eval_iters * self._per_batch)

    def due(self, state: TrainState) -> bool:
        """Whether the run evaluates after this step."""
        interval = self._training.eval_interval
        last = self._training.train_iters
        return interval > 0 and (state.iteration % interval == 0 or state.iteration == last)

    def early_stop_reason(self, log: MetricLog) -> str | None:
        """Why the run should end, if the last --early-stop-patience evaluations have brought no
        lower loss; else None. Collective."""
        patience = self._training.early_stop_patience
        if patience == 0:
            return None
        losses = broadcast_object(sorted(log.evaluated.items()), self._world)
        best, least = min(losses, key=lambda entry: (entry[1], entry[0]))
        since = sum(iteration > best for iteration, _ in losses)
        if since < patience:
            return None
        return (
            f"{since} evaluations without a lower loss than {least:.6E} of iteration {best} "
            "(--early-stop-patience)"
        )

    def run(self, state: TrainState, log: MetricLog) -> float | None:
        """Evaluate, log the loss and return it; None in a run that never evaluates. Collective.
        Raises TrainingError, on every rank, if the loss is not finite."""
        if self._training.eval_interval == 0:
            return None
        loss, tokens = self._evaluate()
        if not math.isfinite(loss):
            where = f"validation loss at iteration {state.iteration}"
            do = "look at the weights, or go back to an earlier checkpoint"
            raise TrainingError(where, got=loss, expected="a finite number", do=do)
        log.write_validation(state.iteration, state.consumed_samples, loss, tokens)
        return loss

    def _evaluate(self) -> tuple[float, int]:
        """Mean loss, and number of target tokens."""
        total = 0.0
        tokens = 0.0
        for first in range(0, self._units, self._per_batch):
            last = min(first + self._per_batch, self._units)
            batches = [
                batch
                for unit in range(first, last)
                for batch in self._loader.microbatches(unit * self._unit)
            ]
            loss, count = self._runtime.evaluate(batches)
            total += float(loss) * float(count)
            tokens += float(count)
        return total / max(tokens, 1.0), int(tokens)
