"""The start of a run: the folder of ``--load``, whether the run may start there, and its
content."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from megatron_llama.checkpoint import checkpoint_dir, native
from megatron_llama.checkpoint.bounds import largest_meta, size_of
from megatron_llama.checkpoint.carried import (
    GENERATION,
    Carried,
    derived_generation,
    read_generation,
)
from megatron_llama.checkpoint.checksums import ANOTHER_COPY
from megatron_llama.checkpoint.meta import (
    META,
    CheckpointMeta,
    TrainState,
    model_changes,
    model_differences,
    parse_meta,
)
from megatron_llama.checkpoint.model_folders.formats import (
    SavedRun,
    candidates,
    detect,
    hf_weights,
    open_model,
    saved_run,
)
from megatron_llama.checkpoint.model_folders.optimizer_state import OptimizerState
from megatron_llama.checkpoint.native_folder import read_small_files
from megatron_llama.checkpoint.saver import WARN
from megatron_llama.checkpoint.storage import refuse
from megatron_llama.checkpoint.storage_paths import is_remote, local_copy, storage_path
from megatron_llama.config.batch_ramp import BatchSizes, run_samples
from megatron_llama.config.model_files import read_bounded
from megatron_llama.config.parse import Parsed
from megatron_llama.config.schema import CheckpointConfig, Config, DataConfig, ModelConfig
from megatron_llama.data.tokenizer.load import load_tokenizer
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.engine.options import EIGHT_BIT
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.errors import CheckpointError, ConfigError
from megatron_llama.model.hf import read_hf_config
from megatron_llama.model.init import ResizedEmbeddings, WithScore
from megatron_llama.model.plan.params import padding_idx
from megatron_llama.model.plan.run_params import trains_embedding
from megatron_llama.pipeline.objective import OBJECTIVE

AUTO = "auto"
"""A value of --load: the newest usable checkpoint of --save, or a fresh start."""


@dataclass(frozen=True)
class Start:
    """A folder of weights from which a run starts."""

    path: Path
    meta: CheckpointMeta | None
    """The META of a checkpoint of this program, which also has the optimizer's state and the
    position in the data; None for a folder of another format."""
    ignored: tuple[str, ...] = ()
    """Fields of a HuggingFace ``config.json`` that are not refused."""
    goes_on: bool = False
    """Whether a folder of another format also has the optimizer's state and the position."""
    passed_over: tuple[checkpoint_dir.PassedOver, ...] = ()
    """The newer checkpoints that AUTO has passed over, each with the reason."""
    small: Mapping[str, bytes] | None = None
    """The ``read_small_files`` of a checkpoint of this program."""

    @property
    def native(self) -> bool:
        """Whether this is a checkpoint of this program."""
        return self.meta is not None

    @property
    def resumable(self) -> bool:
        """Whether a run can go on from here, instead of only beginning with the weights."""
        return self.native or self.goes_on

    def model(self, *, vocab_size: int = 0, tokens: int = 0) -> ModelConfig:
        """Return the configuration of the weights. The sizes are for a folder that stores only a
        padded vocabulary; see ``open_model``."""
        if self.meta is not None:
            return self.meta.model
        return open_model(
            self.path, vocab_size=vocab_size, tokens=tokens, ignored=self.ignored
        ).model

    def weights(self, model: ModelConfig, seed: int = 0) -> WeightSource:
        """Open the weights of ``model``, whose vocabulary is known, completed by ``weights_of``."""
        if self.native:
            return weights_of(native.open_weights(self.path), model, seed)
        weights = open_model(self.path, tokens=model.vocab_size, ignored=self.ignored)
        return weights_of(weights, model, seed)

    def carried(self, model: ModelConfig) -> Carried:
        """Return the files that came with the weights of ``model``. Raises CheckpointError."""
        if self.meta is not None:
            with local_copy(self.path.parent / checkpoint_dir.TOKENIZER) as folder:
                generation = read_generation(folder)
            return Carried(self.meta.state.hf_config, generation)
        source = open_model(self.path, tokens=model.vocab_size, ignored=self.ignored)
        beside = {path.parent for path in source.tokenizer_files if path.name == GENERATION}
        generation = read_generation(beside.pop()) if beside else derived_generation(source.extra)
        return Carried(source.extra, generation)

    def optimizer(self, model: ModelConfig) -> OptimizerState:
        """Open the optimizer's state of ``model`` in a folder of another format that has one.
        Raises CheckpointError."""
        return self.saved_run().optimizer(model, self.ignored)

    def saved_run(self) -> SavedRun:
        """Open the run of another program in a folder of another format that ``goes_on``. Raises
        CheckpointError."""
        run = saved_run(self.path)
        assert run is not None
        return run

    def state(self) -> TrainState:
        """Return the position of the run that saved a ``resumable`` folder. Raises
        CheckpointError."""
        if self.meta is not None:
            return self.meta.state
        return TrainState(*self.saved_run().position())


class ModelWeights(Protocol):
    """Weights that know their model."""

    @property
    def model(self) -> ModelConfig: ...

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None: ...


def weights_of(weights: ModelWeights, model: ModelConfig, seed: int) -> WeightSource:
    """Return the weights as those of ``model``. New rows are added for more token ids, and a score
    drawn from ``seed`` for a reward model from a language model. Raises CheckpointError for the
    opposite."""
    stored = weights.model
    if stored.num_labels and not model.num_labels:
        raise CheckpointError(
            "--num-labels",
            got="0, a language model",
            expected="1: the weights are those of a reward model, which has no output head",
            do="give the weights of a language model",
        )
    source: WeightSource = weights
    if stored.vocab_size != model.vocab_size:
        source = ResizedEmbeddings(source, stored.vocab_size)
    if model.num_labels and not stored.num_labels:
        source = WithScore(source, seed, model.initializer_range)
    return source


def named_start(options: CheckpointConfig) -> Start | None:
    """Find the start that ``--load`` names: a checkpoint, the latest one in a folder of
    checkpoints, with AUTO the newest usable one of --save, or a folder of another format. None if
    there is none. Raises ConfigError for AUTO without --save."""
    if options.load is None:
        return None
    if options.load == AUTO:
        if options.save is None:
            do = "give --save FOLDER, or --load FOLDER"
            raise ConfigError(
                "--load auto", got="no --save", expected="the folder in which the run saves", do=do
            )
        newest = checkpoint_dir.newest_usable(
            options.save, takes_marked=options.on_bad_checkpoint == WARN
        )
        if newest is None:
            return None
        return _native_start(newest.path, newest.passed_over)
    named = storage_path(options.load)
    checkpoint = named if (named / META).is_file() else checkpoint_dir.latest(named)
    if checkpoint is not None:
        return _native_start(checkpoint)
    if is_remote(named) or not list(candidates(named)):
        return None
    goes_on = saved_run(named) is not None
    return Start(named, None, options.ignore_hf_config_fields, goes_on)


def _native_start(path: Path, passed_over: tuple[checkpoint_dir.PassedOver, ...] = ()) -> Start:
    small = read_small_files(path)
    return Start(path, parse_meta(path, small[META]), passed_over=passed_over, small=small)


def find_start(options: CheckpointConfig) -> Start | None:
    """Find the weights to start from; None means those of --init-from-hf or the seed.

    Raises CheckpointError rather than guess: a run that begins at iteration 0 does not save into a
    folder that already holds checkpoints, and a run that should resume does not start over."""
    save = options.save
    load = options.load
    named = named_start(options)
    # A run goes on from a folder of another format only once: its own saves are of our format.
    begins = named is not None and (begins_anew(options, named) or not named.native)
    if load is None or begins:
        require_new_folder(options)
        if (
            named is not None
            and not named.native
            and save is not None
            and storage_path(save) == named.path
        ):
            do = "give another --save"
            raise CheckpointError(
                f"--save {save}",
                got="weights of another format",
                expected="a folder of its own",
                do=do,
            )
    elif named is None and load not in (save, AUTO):
        got = "no complete checkpoint" if storage_path(load).is_dir() else "no such folder"
        expected = "iter_* folders, or a model folder of HuggingFace, Megatron or Meta"
        raise CheckpointError(
            f"--load {load}", got=got, expected=expected, do="check the path, or leave --load out"
        )
    return named


def require_new_folder(options: CheckpointConfig) -> None:
    """Raise CheckpointError if a run that begins at iteration 0 would save among checkpoints."""
    load = options.load
    save = options.save
    present = checkpoint_dir.latest(save) if save is not None else None
    if present is None:
        return
    why = (
        "--load is not given"
        if load is None
        else "--finetune is given"
        if options.finetune
        else f"{load} is no checkpoint of it"
    )
    without = " without --finetune" if options.finetune else ""
    do = f"give --load {save}{without} to resume, or another --save"
    raise CheckpointError(
        f"--save {save}", got=present.name, expected=f"no checkpoint, since {why}", do=do
    )


def loaded_model(start: Start | None, parsed: Parsed) -> ModelConfig | None:
    """Read the model's fields from the folder of --load; None if nothing is loaded.

    A folder that stores only a padded vocabulary gets the size of --vocab-size, or of the tokenizer
    that is given. Raises CheckpointError or DataError."""
    if start is None:
        return None
    data = parsed.get(DataConfig)
    vocab_size = parsed.get(ModelConfig).vocab_size
    if parsed.get(CheckpointConfig).resize_embeddings and not start.native:
        return _resizable_model(start)
    if start.native or data.tokenizer_model is None or vocab_size:
        return start.model(vocab_size=vocab_size)
    return start.model(tokens=load_tokenizer(data.tokenizer_model, data.tokenizer_type).vocab_size)


Source = ModelConfig | bytes | None
"""The identity of a folder of weights: the META of a checkpoint of ours, else the model."""


def said_by_source(start: Start | None, parsed: Parsed) -> Source:
    """Read the identity of the folder of the first weights on this rank's disk; None if the weights
    come from the seed. Raises CheckpointError or DataError."""
    if start is not None and start.native:
        path = start.path / META
        return read_bounded(path, limit=largest_meta(start.path, size_of(path)), do=ANOTHER_COPY)
    if start is not None:
        return loaded_model(start, parsed)
    options = parsed.get(CheckpointConfig)
    if options.init_from_hf is None:
        return None
    return read_hf_config(options.init_from_hf, ignored=options.ignore_hf_config_fields)


def refuse_other_words(where: str, own: Source, first: Source) -> None:
    """Raise CheckpointError unless a folder is the same for this rank and for rank 0. ``where``
    names it."""
    if own == first:
        return
    names = (
        [item.name for item in fields(own) if getattr(own, item.name) != getattr(first, item.name)]
        if isinstance(own, ModelConfig) and isinstance(first, ModelConfig)
        else []
    )
    differing = [
        f"{name} {getattr(own, name)}, and rank 0 {getattr(first, name)}" for name in names
    ]
    raise CheckpointError(
        where,
        got=", ".join(differing) or "another checkpoint on this machine than on that of rank 0",
        expected="the same on all machines",
        do="put it where all machines see it, or copy the same one to each of them",
    )


def seen_soon(path: Path) -> bool:
    """Whether a folder is there, or appears within seconds: a machine may see a shared folder in a
    state that is some seconds old."""
    for pause in (0.5, 1.0, 2.0, 0.0):
        if path.exists():
            return True
        time.sleep(pause)
    return False


def _resizable_model(start: Start) -> ModelConfig:
    """Read the model of a folder that is to get more rows, regardless of --vocab-size. Raises
    CheckpointError for a format that stores padding."""
    if (kind := detect(start.path)) != "hf":
        raise CheckpointError(
            "--resize-embeddings",
            got=f"--load {start.path}, a {kind} folder",
            expected="a HuggingFace folder or a checkpoint, which store no padding",
            do="convert it first: convert SRC DST --to hf",
        )
    return start.model()


def begins_anew(options: CheckpointConfig, start: Start) -> bool:
    """Whether the run loads only the weights and begins at iteration 0."""
    return options.finetune or not start.resumable


def compare(
    options: CheckpointConfig, start: Start, saved: ModelConfig, model: ModelConfig
) -> list[str]:
    """Compare the configuration of the loaded weights (``saved``) with that of the run (``model``,
    derived fields filled in). Returns a warning for each difference that changes what the weights
    compute. Raises CheckpointError with every field that must not differ."""
    resumes = options.load_optim and not begins_anew(options, start)
    if model.num_labels != saved.num_labels and not begins_anew(options, start):
        raise CheckpointError(
            f"{start.path} num_labels",
            got=saved.num_labels,
            expected=f"{model.num_labels}, as in this run",
            do="load the run's own checkpoints; a reward model begins with the weights of a "
            "language model (--finetune)",
        )
    if options.resize_embeddings and model.vocab_size > saved.vocab_size:
        if not begins_anew(options, start):
            do = "give --finetune to begin anew with its weights, or leave --resize-embeddings out"
            raise CheckpointError(
                "--resize-embeddings",
                got=f"a run to resume, whose optimizer has {saved.vocab_size} rows",
                expected="weights with which a run begins",
                do=do,
            )
        saved = replace(saved, vocab_size=model.vocab_size)
    where = str(start.path / META) if start.native else str(start.path)
    title = (
        f"{start.path} is a checkpoint of another model:"
        if start.native
        else f"The weights of {start.path} have other shapes:"
    )
    refuse(title, model_differences(where, saved, model, resumes=resumes))
    return model_changes(str(start.path), saved, model)


def resumed(options: CheckpointConfig, start: Start | None) -> CheckpointMeta | None:
    """Return the checkpoint of ours from which the run resumes; None if it begins at iteration 0,
    or goes on from another format."""
    return None if start is None or begins_anew(options, start) else start.meta


def sample_changes(before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> str:
    """Describe how training samples differ from those of a checkpoint. Empty if they do not differ,
    or if the checkpoint does not identify its samples."""
    if before is None:
        return ""
    # The objective belongs to the run, not to its samples.
    known, current = (
        {name: value for name, value in run.items() if name != OBJECTIVE} for run in (before, now)
    )
    if known == current:
        return ""
    counts = [
        (name, before.get(name), value)
        for name, value in now.items()
        if isinstance(value, int) and before.get(name) != value
    ]
    changes = [
        f"{name} {f'{was:,}' if isinstance(was, int) else 'unknown'}, now {value:,}"
        for name, was, value in counts
    ]
    return "; ".join(changes) or "as many examples and tokens, with other content"


def data_changes(saved: Mapping[str, Any], config: Config) -> Iterator[str]:
    """Yield the options with which a resumed run reads other samples than the saved run would
    have."""
    sections = (
        ("training", ("seed", "seq_length")),
        ("data", ("data_path", "split", "data_order", "megatron_data_order")),
    )
    for section, names in sections:
        options = getattr(config, section)
        for name in names:
            # A checkpoint older than an option was saved by a run without it.
            absent = getattr(type(options)(), name)
            before = _words(saved.get(section, {}).get(name, absent))
            now = _words(getattr(options, name))
            if name in ("data_path", "split") and not saved.get("data", {}).get("data_path"):
                continue  # converted from a folder that does not name its datasets
            if before != now:
                flag = f"--{name.replace('_', '-')}"
                moved = name == "data_path"
                yield (
                    f"{flag} was {before} when the checkpoint was saved and is {now}: the samples "
                    f"are others{', unless this is the same dataset' if moved else ''}"
                )


def batch_changes(before: Mapping[str, Any], state: TrainState, config: Config) -> Iterator[str]:
    """Yield the effects of other batch sizes on a run that goes on at ``state``. ``before`` has the
    batch sizes of the checkpoint by the names of their options."""
    now = config.training
    sizes = [
        (name, _words(before[name] or ()), _words(getattr(now, name)))
        for name in ("global_batch_size", "rampup_batch_size")
        if name in before
    ]
    changed = [
        f"--{name.replace('_', '-')} was {old or 'not given'} when the checkpoint was saved and "
        f"is {new or 'not given'}"
        for name, old, new in sizes
        if old != new
    ]
    if changed:
        schedule = (
            "counts samples, so it goes on where it was"
            if config.optimizer.lr_decay_samples
            else "counts iterations, so each sample meets another rate than it would have"
        )
        yield (
            f"warning: {'; '.join(changed)}: the run goes on at iteration {state.iteration:,}, "
            f"with the sample behind the {state.consumed_samples:,} that are consumed; the "
            f"learning rate's schedule {schedule}; {_end(state, config)}"
        )
    name = "micro_batch_size"
    if before.get(name, now.micro_batch_size) != now.micro_batch_size:
        yield (
            f"--micro-batch-size was {before[name]} when the checkpoint was saved and is "
            f"{now.micro_batch_size}: samples and steps are the same, sums are rounded differently"
        )


def _end(state: TrainState, config: Config) -> str:
    """Return words on the end of a run that goes on at ``state``."""
    training = config.training
    if training.epochs:
        return "the run ends with its last pass"
    sizes = BatchSizes.from_training(training)
    consumed = state.consumed_samples
    for _ in range(state.iteration, training.train_iters):
        consumed += sizes.at(consumed)
    asked = training.train_samples
    missed = f" instead of the {asked:,} of --train-samples" if asked not in (0, consumed) else ""
    return (
        f"the run ends after iteration {training.train_iters:,} with {consumed:,} samples{missed}"
    )


def update_changes(saved: Mapping[str, Any], config: Config) -> Iterator[str]:
    """Yield a line if a resumed run has other --param-group than the saved run, or another
    precision of the moments."""
    optimizer = saved.get("optimizer", {})
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype") if config.checkpoint.load_optim else ():
        then = optimizer.get(name, "fp32")
        now = getattr(config.optimizer, name)
        # Loading refuses a change from or to 8 bits.
        if then != now and EIGHT_BIT not in (then, now):
            yield (
                f"--{name.replace('_', '-')} was {then} when the checkpoint was saved and is "
                f"{now}: the moments are converted"
            )
    before = tuple(optimizer.get("param_group", ()))
    now = config.optimizer.param_group
    if before != now:
        yield (
            f"--param-group was {'; '.join(before) or 'not given'} when the checkpoint was saved "
            f"and is {'; '.join(now) or 'not given'}: updates go on with other rates or decay"
        )


def padding_changes(meta: CheckpointMeta, config: Config) -> Iterator[str]:
    """Yield a line if lookups of a resumed run train other rows of the embedding than before."""
    if not trains_embedding(config):
        return
    optimizer = replace(config.optimizer, train_pad_embedding=_trained_pad_embedding(meta))
    saved = replace(config, model=meta.model, optimizer=optimizer)
    before, now = (
        "all rows" if row is None else f"all rows but {row}"
        for row in (padding_idx(saved), padding_idx(config))
    )
    if before != now:
        yield (
            f"lookups trained {before} of the embedding when the checkpoint was saved and train "
            f"{now} (--pad-token-id, --train-pad-embedding)"
        )


def with_pad_embedding_as_before(
    config: Config, start: Start | None, explicit: Collection[str]
) -> tuple[Config, list[str]]:
    """Return the configuration with --train-pad-embedding if the resumed run's lookups trained all
    rows, unless the option was given; and a line that says so."""
    padding = config.model.pad_token_id
    given = "train_pad_embedding" in explicit
    if padding is None or given or start is None or begins_anew(config.checkpoint, start):
        return config, []
    # Megatron trains all rows.
    if start.meta is not None and not _trained_pad_embedding(start.meta):
        return config, []
    line = (
        f"--train-pad-embedding: the embedding of pad_token_id {padding} stays trained, as in the "
        f"run that saved {start.path} (--no-train-pad-embedding: from now on as in transformers)"
    )
    optimizer = replace(config.optimizer, train_pad_embedding=True)
    return replace(config, optimizer=optimizer), [line]


def _trained_pad_embedding(meta: CheckpointMeta) -> bool:
    """Whether the run that saved a checkpoint had --train-pad-embedding; runs older than the option
    always trained all rows."""
    return bool(meta.config.get("optimizer", {}).get("train_pad_embedding", True))


def order_changes(meta: CheckpointMeta, config: Config) -> Iterator[str]:
    """Yield a line if Megatron's order changes, which depends on the length of the run. A
    checkpoint of a run in that order has the number of its samples, and one converted from
    Megatron's has the options of that run."""
    saved = meta.config.get("training", {})
    if not config.data.megatron_data_order or meta.state.data is not None:
        return
    before = saved.get("train_samples") or saved.get("train_iters", 0) * saved.get(
        "global_batch_size", 0
    )
    now = run_samples(config.training)
    if before != now:
        yield (
            f"--megatron-data-order: the run was one of {before:,} samples when the checkpoint was "
            f"saved and is one of {now:,}: the samples are others"
        )


def _words(value: Any) -> Any:
    """Return a list (JSON's form of a tuple) as the words of a command line."""
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else value


def damaged(start: Start) -> Iterator[str]:
    """Yield a warning of each checkpoint that is newer than the one that AUTO has taken."""
    for newer in start.passed_over:
        yield f"{newer.path} {newer.problem}, going on from {start.path}; {newer.remedy}"


class TrainedWeights(NamedTuple):
    """Weights to evaluate."""

    weights: WeightSource
    state: TrainState
    """The position of the run that trained them."""
    folder: str | Path | None
    """The folder by ``folder_from_elsewhere``."""


def folder_from_elsewhere(options: CheckpointConfig, start: Start | None) -> str | Path | None:
    """Return the folder of another format from which a run takes its weights. None if they are
    drawn from the seed, or are of a checkpoint of ours, whose reader compares it with its own
    list."""
    if start is None:
        return options.init_from_hf
    return None if start.native else start.path


def trained_weights(config: Config, start: Start | None) -> TrainedWeights:
    """Open the weights to evaluate. Raises CheckpointError, ConfigError."""
    options = config.checkpoint
    folder = folder_from_elsewhere(options, start)
    if start is not None:
        state = start.state() if start.resumable else TrainState(0, 0)
        return TrainedWeights(start.weights(config.model), state, folder)
    if options.init_from_hf is not None:
        weights = hf_weights(options.init_from_hf, ignored=options.ignore_hf_config_fields)
        return TrainedWeights(
            weights_of(weights, config.model, config.training.seed), TrainState(0, 0), folder
        )
    do = "give --load FOLDER or --init-from-hf FOLDER"
    raise ConfigError(
        "--load, --init-from-hf", got="neither", expected="the weights to evaluate", do=do
    )
