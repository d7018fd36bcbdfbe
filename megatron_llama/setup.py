"""The parts of a run, each built from the configuration: data, first state, log, evaluation, saving."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_llama.checkpoint import native, series
from megatron_llama.checkpoint.failures import writing
from megatron_llama.checkpoint.hf import HFWeights
from megatron_llama.checkpoint.meta import META, TrainState
from megatron_llama.checkpoint.places import local_folder, place
from megatron_llama.checkpoint.saver import Saver
from megatron_llama.comm.agreement import from_first, together
from megatron_llama.config import CheckpointConfig, Config, ModelConfig
from megatron_llama.data.indexed import IndexedDataset
from megatron_llama.data.loader import BatchLoader, Samples, StreamSamples
from megatron_llama.data.stream import TokenStream, split_documents
from megatron_llama.errors import CheckpointError, ConfigError, TrainingError, describe
from megatron_llama.mesh import Mesh
from megatron_llama.metrics.log import MetricLog
from megatron_llama.model.init import InitialWeights
from megatron_llama.optim.distributed import OverlappedDistributedOptimizer, WeightSource
from megatron_llama.pipeline.runtime import PipelineRuntime

TRAINING, VALIDATION = 0, 1
Source = Callable[[Config, int], Samples]
"""The samples of TRAINING or VALIDATION. Raises DataError; nothing in it may be collective."""
AUTO = "auto"
"""As --load: the newest usable checkpoint of --save, or a fresh start."""


def open_stream(config: Config, part: int) -> TokenStream:
    """The token stream of the training or the validation split. Raises DataError."""
    assert config.data.data_path is not None
    dataset = IndexedDataset(config.data.data_path)
    documents = split_documents(config.data.split, dataset.num_documents)[part]
    stream = TokenStream(dataset, documents, config.training.seq_length, config.model.vocab_size)
    stream.require_samples(("training", "validation")[part])
    return stream


def stream_samples(config: Config, part: int, *, eod: int | None) -> Samples:
    """The samples of an indexed dataset: a Source. ``eod``: the end-of-document id where an option needs one."""
    return StreamSamples(open_stream(config, part), config.data, eod)


def build_loader(config: Config, mesh: Mesh, source: Source) -> BatchLoader:
    """This rank's share of every training step."""
    with together(mesh.world):
        return BatchLoader(
            source(config, TRAINING),
            shuffled=config.data.data_order == "shuffled",
            micro_batch_size=config.training.micro_batch_size,
            global_batch_size=config.training.global_batch_size,
            seed=config.training.seed,
            dp_rank=mesh.data_rank,
            dp_size=mesh.data_size,
        )


def load_or_init(config: Config, optimizer: OverlappedDistributedOptimizer, mesh: Mesh) -> TrainState:
    """The weights and the state a run starts from: a checkpoint, a HuggingFace folder, or the seed. Raises CheckpointError."""
    options = config.checkpoint
    start = None
    with together(mesh.world):
        if mesh.rank == 0:
            start = find_start(options)
            if options.load == AUTO and start is not None:
                for path in [path for path in series.complete(start.parent).values() if path.name > start.name]:
                    print(f" warning: {path} is damaged, going on from {start}; inspect checkpoint {path} --verify says more", flush=True)
    start = from_first(start, mesh.world)
    if start is not None:
        if mesh.rank == 0:
            for line in data_changes(native.read_meta(start).config, config):
                print(f" warning: {line}", flush=True)
        return native.load(start, optimizer, mesh, config.model)
    if options.init_from_hf is not None:
        with together(mesh.world):
            weights = HFWeights(options.init_from_hf)
        optimizer.load_weights(weights)
    else:
        optimizer.load_weights(InitialWeights(config.training.seed, config.model.initializer_range))
    return TrainState(0, 0)


def go_back(config: Config, optimizer: OverlappedDistributedOptimizer, mesh: Mesh, saver: Saver, log: MetricLog) -> TrainState:
    """Return to the newest checkpoint of this run, or to where it started. Collective. Raises CheckpointError."""
    saver.finish(log)
    optimizer.forget()
    newest = saver.newest
    state = native.load(newest, optimizer, mesh, config.model) if newest is not None else load_or_init(config, optimizer, mesh)
    log.rewind(state.iteration)
    log.say(f" back to iteration {state.iteration}")
    return state


def data_changes(saved: Mapping[str, Any], config: Config) -> Iterator[str]:
    """What makes a resumed run read other samples than the run that saved the checkpoint would have."""
    sections = (("training", ("seed", "seq_length")), ("data", ("data_path", "split", "data_order")))
    for section, names in sections:
        for name in names:
            before, now = saved.get(section, {}).get(name), getattr(getattr(config, section), name)
            if before != now:
                yield f"--{name.replace('_', '-')} was {before} when the checkpoint was saved and is {now}: the samples are others"


def trained_model(options: CheckpointConfig) -> ModelConfig | None:
    """The model of the checkpoint that a run is to load, if there is one."""
    named = named_checkpoint(options)
    return native.read_meta(named).model if named is not None else None


def named_checkpoint(options: CheckpointConfig) -> Path | None:
    """What ``--load`` names: a checkpoint, the latest one in a folder of them, or with AUTO the newest usable one of --save;
    None without any. Raises ConfigError for AUTO without --save."""
    if options.load is None:
        return None
    if options.load == AUTO:
        if options.save is None:
            do = "give --save FOLDER, or --load FOLDER"
            raise ConfigError(describe("--load auto", got="no --save", expected="the folder in which the run saves", do=do))
        return series.newest_usable(options.save)
    named = place(options.load)
    return named if (named / META).is_file() else series.latest(named)


def trained_weights(config: Config) -> tuple[TrainState, WeightSource]:
    """The weights to evaluate, and the iteration they are of. Raises CheckpointError, ConfigError."""
    load, folder = config.checkpoint.load, config.checkpoint.init_from_hf
    if load is not None:
        meta = native.read_meta(load)
        return meta.state, native.open_weights(meta.folder)
    if folder is not None:
        return TrainState(0, 0), HFWeights(folder)
    do = "give --load FOLDER or --init-from-hf FOLDER"
    raise ConfigError(describe("--load, --init-from-hf", got="neither", expected="the weights to evaluate", do=do))


def find_start(options: CheckpointConfig) -> Path | None:
    """The checkpoint to resume from; None for a fresh start. Raises CheckpointError rather than guess: a fresh run never
    continues in a folder that already holds somebody's checkpoints, and a resumed one never starts over."""
    save, load = options.save, options.load
    if load is None:
        present = series.latest(save) if save is not None else None
        if present is not None:
            do = f"give --load {save} to resume, or another --save"
            raise CheckpointError(describe(f"--save {save}", got=present.name, expected="no checkpoint, since --load is not given", do=do))
        return None
    newest = named_checkpoint(options)
    if newest is None and load not in (save, AUTO):
        found = "no complete checkpoint" if place(load).is_dir() else "no such folder"
        raise CheckpointError(describe(f"--load {load}", got=found, expected="iter_* folders", do="check the path, or leave --load out"))
    return newest


def open_log(config: Config, mesh: Mesh, state: TrainState) -> MetricLog:
    """The log of this run; rank 0 writes it. Raises CheckpointError if it cannot."""
    folder = local_folder(config.checkpoint.save) if config.checkpoint.save is not None else None
    with together(mesh.world), writing(folder or Path(".")):
        return MetricLog(
            folder,
            prints=mesh.rank == 0,
            start_iteration=state.iteration,
            train_iters=config.training.train_iters,
            progress_bar=config.log.progress_bar,
        )


class Validation:
    """The mean loss over the same validation samples every time."""

    def __init__(self, config: Config, mesh: Mesh, runtime: PipelineRuntime, source: Source) -> None:
        self._training, self._runtime = config.training, runtime
        self._unit = config.training.micro_batch_size * mesh.data_size
        if self._training.eval_interval == 0:
            return
        with together(mesh.world):
            samples = source(config, VALIDATION)
            # One microbatch per rank and call, so that an evaluation may end anywhere, not only after whole global batches.
            self._loader = BatchLoader(
                samples,
                shuffled=False,
                micro_batch_size=self._training.micro_batch_size,
                global_batch_size=self._unit,
                seed=self._training.seed,
                dp_rank=mesh.data_rank,
                dp_size=mesh.data_size,
            )
        units = max(1, len(samples) // self._unit)
        self._per_batch = self._training.global_batch_size // self._unit
        self._units = min(units, self._training.eval_iters * self._per_batch) if self._training.eval_iters else units

    def due(self, state: TrainState) -> bool:
        """Whether the run evaluates after this step."""
        return _due(self._training.eval_interval, state.iteration, self._training.train_iters)

    def run(self, state: TrainState, log: MetricLog) -> float | None:
        """Evaluate, log and return the loss, unless this run never evaluates. Raises TrainingError, on every rank, if it is not finite."""
        if self._training.eval_interval == 0:
            return None
        loss, tokens = self.measure()
        if not math.isfinite(loss):
            where, do = f"validation loss at iteration {state.iteration}", "look at the weights, or go back to an earlier checkpoint"
            raise TrainingError(describe(where, got=loss, expected="a finite number", do=do))
        log.write_validation(state.iteration, state.consumed_samples, loss, tokens)
        return loss

    def measure(self) -> tuple[float, int]:
        """Mean loss and number of target tokens."""
        total, tokens = 0.0, 0.0
        for first in range(0, self._units, self._per_batch):
            last = min(first + self._per_batch, self._units)
            batches = [batch for unit in range(first, last) for batch in self._loader.microbatches(unit * self._unit)]
            loss, count = self._runtime.evaluate(batches)
            total, tokens = total + float(loss) * float(count), tokens + float(count)
        return total / max(tokens, 1.0), int(tokens)


def _due(interval: int, iteration: int, last: int) -> bool:
    return interval > 0 and (iteration % interval == 0 or iteration == last)
