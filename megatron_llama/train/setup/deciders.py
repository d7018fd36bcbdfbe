"""What is decided between the words of a user and the first step, in its order.

The lists at the end say it top to bottom; the functions before them stand in the same order.

- ``CONFIGURATION``: rank 0 makes the configuration of the words and of what --load names, and
  refuses what cannot run. Each rank looks whether it sees the same files, and reads the tokenizer.
- what a command reads: ``TEXT`` for ``pretrain``; ``sft`` and ``align`` have deciders of their own.
- ``SAMPLES``: samples are opened, and the position in them is found. Behind the steps of --epochs
  the configuration is final.
- ``OUTPUTS``: what the run will write can be written.

What they decide by is in the rooms before: ``loop/start.py`` (--load), ``plans/resolve.py`` (fields
of a configuration), ``plans/checks`` (what cannot run), ``loop/vocabulary.py`` (tokenizers),
``loop/inputs.py`` (samples)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from megatron_llama.checkpoint.storage_paths import is_remote
from megatron_llama.config.schema import CheckpointConfig, DataConfig, LogConfig, ModelConfig
from megatron_llama.conversion.formats import detect
from megatron_llama.data.text_stream import seek
from megatron_llama.errors import CheckpointError
from megatron_llama.hooks import imported, layouts
from megatron_llama.loop.carried_files import carried_files
from megatron_llama.loop.inputs import (
    TRAINING,
    VALIDATION,
    Reading,
    Ready,
    first_state,
    open_samples,
    require_outputs,
    require_saveable,
    require_weights,
    stream_samples,
    warnings_of_run,
    with_run_length,
)
from megatron_llama.loop.prompts import encoded_prompts
from megatron_llama.loop.start import Start, compare, find_start, with_pad_embedding_as_before
from megatron_llama.loop.vocabulary import find_vocabulary, with_vocabulary
from megatron_llama.metrics.mlflow import require_mlflow
from megatron_llama.metrics.tensorboard import require_tensorboard
from megatron_llama.metrics.trackio import require_trackio
from megatron_llama.metrics.wandb import require_wandb
from megatron_llama.plans.auto import decide as decide_by_memory
from megatron_llama.plans.checks.model import require_language_model
from megatron_llama.plans.resolve import assemble, check
from megatron_llama.tokenizer.load import load_tokenizer
from megatron_llama.train.setup.draft import By, Decider, Draft, Need
from megatron_llama.train.setup.layout import Choice, is_layout_open


def refuse_missing_packages(draft: Draft) -> None:
    """Raise ConfigError for a tracker whose package is not installed."""
    log = draft.parsed.get(LogConfig)
    require_tensorboard(log)
    require_wandb(log)
    require_mlflow(log)
    require_trackio(log)


def decide_start(draft: Draft) -> Draft:
    """Find what --load names: the only place where it is looked for."""
    options = draft.parsed.get(CheckpointConfig)
    return replace(draft, start=find_start(options) if options.load is not None else None)


def decide_model(draft: Draft) -> Draft:
    """Put together preset, folder of weights, YAML and flags."""
    trained = loaded_model(draft)
    config = assemble(draft.parsed, trained=trained)
    return replace(draft, trained=trained, config=config, notes=draft.parsed.notes)


def loaded_model(draft: Draft) -> ModelConfig | None:
    """Read the model's fields from what --load names; None if nothing is loaded.

    A folder that stores only a padded vocabulary gets the size of --vocab-size, or of the tokenizer
    that is given. Raises CheckpointError or DataError."""
    start = draft.start
    if start is None:
        return None
    data = draft.parsed.get(DataConfig)
    vocab_size = draft.parsed.get(ModelConfig).vocab_size
    if draft.parsed.get(CheckpointConfig).resize_embeddings and not start.native:
        return _resizable_model(start)
    if start.native or data.tokenizer_model is None or vocab_size:
        return start.model(vocab_size=vocab_size)
    return start.model(tokens=load_tokenizer(data.tokenizer_model, data.tokenizer_type).vocab_size)


def _resizable_model(start: Start) -> ModelConfig:
    """Read the model of a folder that is to get more rows, to which --vocab-size says nothing.
    Raises CheckpointError for a format that stores padding."""
    if (kind := detect(start.path)) != "hf":
        raise CheckpointError(
            "--resize-embeddings",
            got=f"--load {start.path}, a {kind} folder",
            expected="a HuggingFace folder or a checkpoint, which store no padding",
            do="convert it first: convert SRC DST --to hf",
        )
    return start.model()


def decide_padding(draft: Draft) -> Draft:
    """Train the embedding of the padding token where the run that goes on has trained it."""
    config, notes = with_pad_embedding_as_before(draft.config, draft.start, draft.parsed.explicit)
    return replace(draft, config=config, notes=(*draft.notes, *notes))


def decide_layout(draft: Draft) -> Draft:
    """Choose the layout, with --auto-parallel."""
    if not is_layout_open(draft.parsed):
        return draft
    choose = imported(layouts().chosen)
    processes = draft.processes
    choice: Choice = choose(
        draft.parsed, draft.config, processes.count, processes.devices, draft.start
    )
    return replace(draft, config=choice.config, notes=(*draft.notes, *choice.notes))


def derive(draft: Draft) -> Draft:
    """Refuse a configuration that cannot run, with all problems; else fill in what follows from
    it."""
    valid = check(draft.config, draft.processes.count, needs_data=draft.needs_data)
    return replace(
        draft,
        config=valid.config,
        notes=(*draft.notes, *valid.notes),
        warnings=(*draft.warnings, *valid.warnings),
    )


def use_own_folders(draft: Draft) -> Draft:
    """Put this rank's own words for folders and files in the place of rank 0's: a dataset, a
    snapshot of the hub or a cache may be elsewhere on each machine."""
    data = draft.parsed.get(DataConfig)
    checkpoint = draft.parsed.get(CheckpointConfig)
    return replace(draft, config=replace(draft.config, data=data, checkpoint=checkpoint))


def refuse_unseen_start(draft: Draft) -> None:
    """Raise CheckpointError if this rank does not see the folder that rank 0 has found. Each rank
    reads its part of the weights there."""
    start = draft.start
    if start is None or is_remote(start.path) or start.path.exists():
        return
    raise CheckpointError(
        f"--load {start.path}",
        got="no such folder on this machine",
        expected="the folder that rank 0 has found",
        do="put it where all machines see it under this name, or copy it to each of them",
    )


def decide_vocabulary(draft: Draft) -> Draft:
    """Read the tokenizer, and fill in what the model takes from it."""
    vocabulary = find_vocabulary(draft.config, draft.start)
    return replace(draft, vocabulary=vocabulary, config=with_vocabulary(draft.config, vocabulary))


def compare_with_start(draft: Draft) -> Draft:
    """Refuse to load weights of another model."""
    changes: list[str] = []
    if draft.start is not None and draft.trained is not None:
        config = draft.config
        changes = compare(config.checkpoint, draft.start, draft.trained, config.model)
    return replace(draft, warnings=(*draft.warnings, *changes, *draft.vocabulary.warnings))


def decide_by_device_memory(draft: Draft) -> Draft:
    """Replace every ``auto`` by what fits into memory."""
    processes = draft.processes
    config, notes = decide_by_memory(draft.config, processes.count, processes.memory)
    return replace(draft, config=config, notes=(*draft.notes, *notes))


def read_text(draft: Draft) -> Draft:
    """Read --data-path: what ``pretrain`` does."""
    require_language_model(draft.config.model, "training on --data-path")
    vocabulary = draft.vocabulary
    world = draft.processes.world
    source = partial(
        stream_samples,
        eod=vocabulary.eod,
        tokenizer=vocabulary.tokenizer,
        share=(world.rank, world.size),
    )
    return replace(draft, reading=Reading(source, vocabulary.tokenizer))


def open_training(draft: Draft) -> Draft:
    """Open the training samples on all ranks."""
    world = draft.processes.world
    training = open_samples(draft.reading.source, draft.config, TRAINING, world)
    return replace(draft, training=training)


def decide_position(draft: Draft) -> Draft:
    """Find the step and the sample with which the run begins."""
    identity, state, notes = first_state(
        draft.config, draft.training, draft.start, same_data=draft.reading.same_data
    )
    return replace(draft, identity=identity, state=state, notes=(*draft.notes, *notes))


def decide_length(draft: Draft) -> Draft:
    """Count the steps of --epochs. With this the configuration is final."""
    seek(draft.training, draft.state.places)
    config, notes = with_run_length(draft.config, len(draft.training), draft.state)
    return replace(draft, config=config, notes=(*draft.notes, *notes))


def open_validation(draft: Draft) -> Draft:
    """Open the samples of evaluations on all ranks, if the run has evaluations."""
    validation = None
    if draft.config.training.eval_interval:
        world = draft.processes.world
        validation = open_samples(draft.reading.source, draft.config, VALIDATION, world)
    return replace(draft, validation=validation)


def decide_prompts(draft: Draft) -> Draft:
    """Make tokens of --sample-prompt."""
    reading = draft.reading
    prompts = encoded_prompts(draft.config, reading.tokenizer, reading.prompt)
    return replace(draft, prompts=prompts)


def refuse_incomplete_weights(draft: Draft) -> None:
    """Raise CheckpointError if the weights that the run loads are not all there."""
    require_weights(draft.config, draft.start)


def refuse_unsavable_run(draft: Draft) -> None:
    """Raise UserError if the run will save or export what cannot be written."""
    require_saveable(draft.config.checkpoint, draft.reading.tokenizer, draft.start)


def decide_carried(draft: Draft) -> Draft:
    """Read what came with the weights and goes into checkpoints and exports."""
    carried, notes = carried_files(draft.config, draft.start, draft.reading.tokenizer)
    return replace(draft, carried=carried, notes=(*draft.notes, *notes))


def warn_of_run(draft: Draft) -> Draft:
    """Warn of a run that reads its samples too often, or keeps nothing."""
    lines = warnings_of_run(draft.config, len(draft.training))
    return replace(draft, notes=(*draft.notes, *lines))


def refuse_unwritable_outputs(draft: Draft) -> None:
    """Raise UserError unless the run can write where its options say."""
    require_outputs(draft.config)


MODEL = (
    # Before the fields of the model: a checkpoint that is missing is what a user has to hear, not
    # that the fields are missing which it would have given.
    Decider(Need.FILES, By.RANK_0, fills=("start",), decide=decide_start),
    Decider(Need.FILES, By.RANK_0, fills=("trained", "config", "notes"), decide=decide_model),
)
"""From words to the options and the model that they name, with much that is not yet derived."""

CONFIGURATION = (
    Decider(Need.MACHINE, By.RANK_0, refuses=refuse_missing_packages),
    *MODEL,
    Decider(Need.WORDS, By.RANK_0, fills=("config", "notes"), decide=decide_padding),
    Decider(Need.PROCESSES, By.RANK_0, fills=("config", "notes"), decide=decide_layout),
    Decider(Need.PROCESSES, By.RANK_0, fills=("config", "notes", "warnings"), decide=derive),
    Decider(
        Need.FILES,
        By.EACH_RANK,
        fills=("config",),
        decide=use_own_folders,
        refuses=refuse_unseen_start,
    ),
    Decider(Need.FILES, By.EACH_RANK, fills=("vocabulary", "config"), decide=decide_vocabulary),
    Decider(Need.WORDS, By.EACH_RANK, fills=("warnings",), decide=compare_with_start),
    # Behind the vocabulary, which is a large part of a small model.
    Decider(Need.MEMORY, By.EACH_RANK, fills=("config", "notes"), decide=decide_by_device_memory),
)
"""From words to a configuration."""

TEXT = (Decider(Need.FILES, By.EACH_RANK, fills=("reading",), decide=read_text),)
"""What ``pretrain`` reads."""

OUTPUTS = (Decider(Need.MACHINE, By.RANK_0, refuses=refuse_unwritable_outputs),)
"""Checks of the places into which a run writes."""

SAMPLES = (
    Decider(Need.FILES, By.ALL_TOGETHER, fills=("training",), decide=open_training),
    Decider(Need.SAMPLES, By.RANK_0, fills=("identity", "state", "notes"), decide=decide_position),
    Decider(Need.SAMPLES, By.EACH_RANK, fills=("config", "notes"), decide=decide_length),
    Decider(Need.FILES, By.ALL_TOGETHER, fills=("validation",), decide=open_validation),
    Decider(Need.FILES, By.EACH_RANK, fills=("prompts",), decide=decide_prompts),
    Decider(Need.FILES, By.RANK_0, refuses=refuse_incomplete_weights),
    Decider(Need.FILES, By.RANK_0, refuses=refuse_unsavable_run),
    Decider(Need.FILES, By.RANK_0, fills=("carried", "notes"), decide=decide_carried),
    Decider(Need.SAMPLES, By.EACH_RANK, fills=("notes",), decide=warn_of_run),
)
"""From a configuration and what a command reads to a run."""


def ready_of(draft: Draft) -> Ready:
    """Return the run for which everything has been decided."""
    reading = draft.reading
    return Ready(
        draft.config,
        draft.training,
        draft.validation,
        draft.identity,
        draft.start,
        draft.state,
        reading.tokenizer,
        draft.prompts,
        draft.notes,
        draft.warnings,
        reading.objective,
        reading.names,
        draft.carried,
    )
