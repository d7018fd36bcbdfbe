"""The parts of a run, each built from the configuration: data, first state, log, evaluation,
saving."""

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
from megatron_llama.convert.hf.files import HFWeights
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
from megatron_llama.errors import ConfigError, DataError, TrainingError, describe, listing
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
from megatron_llama.plans.checks.run import optimizer_problems

TRAINING = 0
VALIDATION = 1
Source = Callable[[Config, int], Samples]
"""The samples of TRAINING or VALIDATION. Raises DataError; nothing in it may be collective."""


def open_stream(config: Config, prefix: str, part: int) -> TokenStream:
    """The token stream of the training or the validation split of a dataset. Raises DataError."""
    dataset = IndexedDataset(prefix)
    documents = split_documents(config.data.split, dataset.num_documents)[part]
    stream = TokenStream(dataset, documents, config.training.seq_length, config.model.vocab_size)
    stream.require_samples(("training", "validation")[part])
    return stream


def stream_samples(config: Config, part: int, *, eod: int | None) -> Samples:
    """The samples of --data-path: a Source. ``eod``: the end-of-document id where an option needs
    one."""
    blend = read_blend(config.data.data_path)
    parts = [
        StreamSamples(open_stream(config, prefix, part), config.data, eod)
        for prefix in blend.prefixes
    ]
    return (
        parts[0]
        if len(parts) == 1
        else BlendedSamples(parts, blend.weights or [len(samples) for samples in parts])
    )


def begin(
    config: Config, mesh: Mesh, source: Source, *, same_data: bool
) -> tuple[Config, Samples, Mapping[str, Any]]:
    """The configuration with the length of the run, which --epochs leaves to the training samples;
    these samples; and what they say of themselves, which is compared with what the checkpoint knows
    where the run goes on. Where that differs, ``same_data`` refuses, otherwise a warning is
    printed. Collective. Raises DataError, ConfigError, CheckpointError."""
    with raise_on_all_ranks(mesh.world):
        samples = source(config, TRAINING)

    def compared() -> tuple[Mapping[str, Any], TrainState]:
        identity = samples.identity()
        meta = resumed(config.checkpoint)
        changes = sample_changes(meta.state.data, identity) if meta is not None else ""
        if meta is not None and changes and same_data:
            do = "give the files and options of that run, begin anew with its weights (--finetune), or --on-changed-data continue"
            got = f"other training samples than those of {meta.folder} ({changes})"
            expected = "the samples in whose order the run goes on"
            raise DataError(describe("--train-data", got=got, expected=expected, do=do))
        if meta is not None and changes:
            print(
                f" warning: other training samples than those of {meta.folder} ({changes})",
                flush=True,
            )
        return identity, meta.state if meta is not None else TrainState(0, 0)

    identity, state = on_rank0(compared, mesh.world)
    with raise_on_all_ranks(mesh.world):
        config = _with_length(config, mesh, len(samples), state)
    return config, samples, identity


def _with_length(config: Config, mesh: Mesh, samples: int, state: TrainState) -> Config:
    """See ``with_epochs``. Raises ConfigError for what does not fit the length."""
    if not config.training.epochs:
        return config
    again = config.training.on_bad_step == ROLLBACK
    left_out = (
        sum(one.last_sample + 1 - one.first_sample for one in state.history.skipped) if again else 0
    )
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
    """This rank's share of every training step."""
    return BatchLoader(
        samples,
        shuffled=config.data.data_order == "shuffled",
        micro_batch_size=config.training.micro_batch_size,
        global_batch_size=BatchSizes.of(config.training),
        seed=config.training.seed,
        dp_rank=mesh.data_rank,
        dp_size=mesh.data_size,
    )


def load_or_init(
    config: Config, optimizer: OverlappedDistributedOptimizer, mesh: Mesh
) -> TrainState:
    """The weights and the state a run starts from: a checkpoint, a HuggingFace folder, or the seed.
    Raises CheckpointError."""
    options = config.checkpoint
    weights: WeightSource
    start = on_rank0(lambda: find_start(options), mesh.world)
    with raise_on_all_ranks(mesh.world):
        for line in _start_lines(config, start) if mesh.rank == 0 else ():
            print(f" {line}", flush=True)
    if start is not None and start.native and _takes_up(config, start):
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


def _takes_up(config: Config, start: Start) -> bool:
    """See ``takes_up``."""
    return takes_up(
        f"--load {start.path}",
        saved_lora(native.read_meta(start.path).config),
        config.lora,
        anew=config.checkpoint.finetune,
    )


def _start_lines(config: Config, start: Start | None) -> Iterator[str]:
    """What the user should know of where the run starts."""
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


def go_back(
    config: Config,
    optimizer: OverlappedDistributedOptimizer,
    mesh: Mesh,
    saver: Saver,
    log: MetricLog,
) -> TrainState:
    """Return to the newest checkpoint of this run, or to where it started. Collective. Raises
    CheckpointError."""
    saver.finish(log)
    optimizer.forget()
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
    """The log of this run; rank 0 writes it. Raises CheckpointError if it cannot."""
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
    """The mean loss over the same validation samples every time."""

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
        units = -(
            -len(samples) // self._unit
        )  # the last may have fewer samples than places: each counts once
        self._per_batch = self._training.global_batch_size // self._unit
        self._units = (
            min(units, self._training.eval_iters * self._per_batch)
            if self._training.eval_iters
            else units
        )

    def due(self, state: TrainState) -> bool:
        """Whether the run evaluates after this step."""
        return _due(self._training.eval_interval, state.iteration, self._training.train_iters)

    def hopeless(self, log: MetricLog) -> str | None:
        """Why the run should end, if no evaluation has been better for as long as
        --early-stop-patience says. Collective."""
        patience = self._training.early_stop_patience
        if patience == 0:
            return None
        losses = broadcast_object(sorted(log.evaluated.items()), self._world)
        best, least = min(losses, key=lambda entry: (entry[1], entry[0]))
        behind = sum(iteration > best for iteration, _ in losses)
        if behind < patience:
            return None
        return f"{behind} evaluations without a lower loss than {least:.6E} of iteration {best} (--early-stop-patience)"

    def run(self, state: TrainState, log: MetricLog) -> float | None:
        """Evaluate, log and return the loss, unless this run never evaluates. Raises TrainingError,
        on every rank, if it is not finite."""
        if self._training.eval_interval == 0:
            return None
        loss, tokens = self.measure()
        if not math.isfinite(loss):
            where = f"validation loss at iteration {state.iteration}"
            do = "look at the weights, or go back to an earlier checkpoint"
            raise TrainingError(describe(where, got=loss, expected="a finite number", do=do))
        log.write_validation(state.iteration, state.consumed_samples, loss, tokens)
        return loss

    def measure(self) -> tuple[float, int]:
        """Mean loss and number of target tokens."""
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
            total = total + float(loss) * float(count)
            tokens = tokens + float(count)
        return total / max(tokens, 1.0), int(tokens)


def _due(interval: int, iteration: int, last: int) -> bool:
    return interval > 0 and (iteration % interval == 0 or iteration == last)
