"""Parts of a run: loader, samples of evaluations, first weights and log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from megatron_llama.checkpoint import native
from megatron_llama.checkpoint.chunks import is_state, regions
from megatron_llama.checkpoint.failures import writing
from megatron_llama.checkpoint.finite import (
    NotFinite,
    describe_not_finite,
    find_all_not_finite,
    merge_not_finite,
)
from megatron_llama.checkpoint.listed_files import ListedFile
from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.checkpoint.model_folders.formats import hf_weights
from megatron_llama.checkpoint.saver import WARN
from megatron_llama.checkpoint.storage_paths import local_folder
from megatron_llama.config.batch_ramp import BatchSizes
from megatron_llama.config.blend import read_blend
from megatron_llama.config.schema import Config, TrainingConfig
from megatron_llama.data.loader import Batch, BatchLoader, Samples
from megatron_llama.data.stream_places import text_streams
from megatron_llama.data.verification import DatasetCheck, seen_files, share_of
from megatron_llama.engine.comm.object_collectives import all_gather_object, raise_on_all_ranks
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer, WeightSource
from megatron_llama.engine.pieces import shard_pieces
from megatron_llama.errors import CheckpointError
from megatron_llama.launch.join import this_place
from megatron_llama.metrics.events import FAULT, tracked_runs
from megatron_llama.metrics.log import LINES, MetricLog, MetricLogger
from megatron_llama.metrics.trackers import Tracker, open_trackers
from megatron_llama.model.init import InitialWeights, WithAdapters
from megatron_llama.train.setup.draft import Shown
from megatron_llama.train.setup.inputs import Ready, resumes
from megatron_llama.train.setup.start import Start, weights_of
from megatron_llama.train.setup.weight_check import identity


def build_loader(
    config: Config, samples: Samples, *, data_rank: int, data_size: int
) -> BatchLoader:
    """Return the loader of a rank's share of every training step: number ``data_rank`` of
    ``data_size``."""
    return BatchLoader(
        samples,
        # Megatron's samples, and those of a text, are already in their order.
        shuffled=config.data.data_order == "shuffled"
        and not config.data.megatron_data_order
        and not text_streams(samples),
        micro_batch_size=config.training.micro_batch_size,
        global_batch_size=BatchSizes.from_training(config.training),
        seed=config.training.seed,
        dp_rank=data_rank,
        dp_size=data_size,
    )


def show_files(config: Config, listed: Sequence[ListedFile]) -> Shown:
    """Return what this rank shows the others of its files. ``listed``: those of its weights."""
    return Shown(identity(listed), seen_files(_compared_datasets(config)), this_place().local_rank)


def check_datasets(
    config: Config, rank: int, seen: Sequence[Shown], say: Callable[[str], None]
) -> DatasetCheck:
    """Begin to compare the files of --data-path with their sums, on one rank of each machine.
    Machines that share a disk share the work; the other ranks have a check that finds nothing."""
    share = share_of(rank, [shown.samples for shown in seen])
    return DatasetCheck(_compared_datasets(config), share=share, say=say)


def _compared_datasets(config: Config) -> Sequence[str]:
    first_of_machine = this_place().local_rank == 0
    return read_blend(config.data.data_path).prefixes if first_of_machine else ()


class ValidationBatches:
    """A rank's share of the samples of an evaluation, the same ones every time."""

    def __init__(
        self, training: TrainingConfig, samples: Samples, *, data_rank: int, data_size: int
    ) -> None:
        self._unit = training.micro_batch_size * data_size
        # One microbatch per rank and call, so that an evaluation may end anywhere, not only after
        # whole global batches.
        self._loader = BatchLoader(
            samples,
            shuffled=False,
            micro_batch_size=training.micro_batch_size,
            global_batch_size=BatchSizes(self._unit, end=len(samples)),
            seed=training.seed,
            dp_rank=data_rank,
            dp_size=data_size,
        )
        # The last unit may have fewer samples than places; each sample counts once.
        self._units = -(-len(samples) // self._unit)
        self._per_batch = training.global_batch_size // self._unit
        if training.eval_iters:
            self._units = min(self._units, training.eval_iters * self._per_batch)

    def __iter__(self) -> Iterator[list[Batch]]:
        """Yield the microbatches of one call of the runtime after the other. Raises DataError."""
        for first in range(0, self._units, self._per_batch):
            last = min(first + self._per_batch, self._units)
            yield [
                batch
                for unit in range(first, last)
                for batch in self._loader.microbatches(unit * self._unit)
            ]


def read_first_step(inputs: Ready, data_ranks: Iterable[int], data_size: int) -> None:
    """Read and drop the samples of these ranks until the run's first step: those of the evaluation
    before it, and its own. Raises DataError."""
    training = inputs.config.training
    state = inputs.state
    sizes = BatchSizes.from_training(training)
    first_sample = state.history.first_sample(state.consumed_samples, sizes.at)
    for rank in data_ranks:
        if inputs.validation is not None:
            batches = ValidationBatches(
                training, inputs.validation, data_rank=rank, data_size=data_size
            )
            for _ in batches:
                pass
        if state.iteration < training.train_iters:
            build_loader(
                inputs.config, inputs.training, data_rank=rank, data_size=data_size
            ).microbatches(first_sample)


def load_or_init(
    config: Config, optimizer: OverlappedDistributedOptimizer, mesh: Mesh, start: Start | None
) -> TrainState:
    """Load the weights and the state from which the run starts: those of ``start``, or of
    --init-from-hf, or weights drawn from the seed. Collective. Raises CheckpointError."""
    options = config.checkpoint
    weights: WeightSource
    if start is not None and resumes(config, start) and not start.native:
        with raise_on_all_ranks(mesh.world):
            state = start.state()
            saved = start.optimizer(config.model) if options.load_optim else None
            weights = start.weights(config.model, config.training.seed)
        if saved is None:
            optimizer.load_weights(WithAdapters(weights, config.training.seed))
        else:
            # Only a run that goes on with the state of another program loads it.
            from megatron_llama.train.setup.take_over import take_over

            take_over(saved, optimizer, mesh, config)
        return state
    if start is not None and resumes(config, start):
        state = native.load(
            start.path,
            optimizer,
            mesh,
            config.model,
            optimizer=options.load_optim and not options.finetune,
            small=start.small,
        )
        return TrainState(0, 0) if options.finetune else state
    if start is not None:
        with raise_on_all_ranks(mesh.world):
            weights = start.weights(config.model, config.training.seed)
    elif options.init_from_hf is not None:
        _require_one_commit(options.init_from_hf, mesh.world)
        with raise_on_all_ranks(mesh.world):
            folder = hf_weights(options.init_from_hf, ignored=options.ignore_hf_config_fields)
            weights = weights_of(folder, config.model, config.training.seed)
    else:
        weights = InitialWeights.of(config)
    optimizer.load_weights(WithAdapters(weights, config.training.seed))
    return TrainState(0, 0)


def find_not_finite_at_start(
    config: Config, optimizer: OverlappedDistributedOptimizer, mesh: Mesh, start: Start | None
) -> tuple[NotFinite, ...]:
    """Return the loaded tensors with values that are infinite or NaN, the same on all ranks.
    Collective. Raises CheckpointError.

    Neither weights drawn from the seed nor tensors of a checkpoint whose save has looked for such
    values are searched."""
    if start is None and config.checkpoint.init_from_hf is None:
        return ()
    marked = _marked_at_start(config, start)  # all ranks have the start that rank 0 has found
    if marked is not None:
        return marked
    optimizer.settle()
    pieces = (piece for piece in shard_pieces(optimizer) if piece.primary)
    by_rank = all_gather_object(find_all_not_finite(regions(pieces)), mesh.world)
    return merge_not_finite(entry for entries in by_rank for entry in entries)


def _marked_at_start(config: Config, start: Start | None) -> tuple[NotFinite, ...] | None:
    """Return the findings of a checkpoint's save in the tensors that are loaded from it. None if no
    save has looked at them."""
    if start is None or start.meta is None or not resumes(config, start):
        return None
    marked = start.meta.not_finite
    if marked is None:
        return None
    takes_state = config.checkpoint.load_optim and not config.checkpoint.finetune
    return tuple(entry for entry in marked if takes_state or not is_state(entry.name))


def warn_of_start(not_finite: Sequence[NotFinite], config: Config, log: MetricLog) -> None:
    """Warn of first values of the run that were not finite, if there are any."""
    if not not_finite:
        return
    words = f"the run begins with values that are not finite: {describe_not_finite(not_finite)}"
    if config.checkpoint.save is not None and config.checkpoint.on_bad_checkpoint != WARN:
        words += "; its first save will end it (--on-bad-checkpoint warn keeps such checkpoints)"
    log.say(f" warning: {words}")
    log.event(FAULT, words=words)


def _require_one_commit(folder: str, world: Axis) -> None:
    """Raise CheckpointError if a name on the hub is another commit on some ranks: each machine asks
    for itself, and the branch may move in between. Collective."""
    path = Path(folder)
    own = path.name if path.parent.name == "snapshots" else ""
    commits = sorted(set(all_gather_object(own, world)))
    if len(commits) > 1:
        raise CheckpointError(
            "--init-from-hf",
            got=f"{len(commits)} snapshots, {' and '.join(map(repr, commits))}",
            expected="the same one on all machines",
            do="give a commit: org/name@COMMIT",
        )


def open_log(config: Config, mesh: Mesh, state: TrainState) -> MetricLog:
    """Open the log of this run, which rank 0 writes. Raises CheckpointError there if the log cannot
    be written."""
    folder = local_folder(config.checkpoint.save) if config.checkpoint.save is not None else None
    loggers = list[MetricLogger]()
    trackers = list[Tracker]()
    lines = list[str]()
    with writing(Path(config.log.tensorboard_dir or ".")):
        if mesh.rank == 0 and config.log.open_metrics is not None:
            # Only the rank that serves loads the server.
            from megatron_llama.metrics.open_metrics import OpenMetrics

            loggers.append(OpenMetrics(config.log))
        if mesh.rank == 0:
            known = {} if folder is None else tracked_runs(folder)
            trackers, lines = open_trackers(config, state.iteration, known)
    with writing(folder or Path(".")):
        log = MetricLog(
            folder,
            prints=mesh.rank == 0,
            start_iteration=state.iteration,
            train_iters=config.training.train_iters,
            progress_bar=config.log.progress_bar,
            line=LINES[config.log.log_format],
            loggers=loggers,
            trackers=trackers,
        )
    for line in lines:
        log.say(f" {line}")
    if config.log.job_name is not None:
        log.say(f" job {config.log.job_name}")
    return log
