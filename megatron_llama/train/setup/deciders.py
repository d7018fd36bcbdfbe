"""What is decided between the words of a user and the first step, in its order.

The functions stand in the order in which they are called; above each of them is what it fills, what
it needs, and who decides. The lists at the end are parts of the way, for commands to put together:

- ``CONFIGURATION``: rank 0 makes the configuration of the words and of what --load names, and
  refuses what cannot run. Each rank looks whether it sees the same files, and reads the tokenizer.
- what a command reads: ``TEXT`` for ``pretrain``; ``sft`` and ``align`` have deciders of their own.
- ``SAMPLES``: samples are opened, and the position in them is found. Behind the steps of --epochs
  the configuration is final.
- ``OUTPUTS``: what the run will write can be written.

What they decide by is in the rooms before: ``train/setup/start.py`` (--load),
``train/setup/resolve.py`` (fields of a configuration), ``train/setup/checks`` (what cannot run),
``train/setup/vocabulary.py`` (tokenizers), ``train/setup/inputs.py`` (samples)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from megatron_llama.checkpoint.storage_paths import is_remote
from megatron_llama.config.parse import Parsed
from megatron_llama.config.schema import CheckpointConfig, DataConfig, LogConfig, ModelConfig
from megatron_llama.config.sections import config_sections
from megatron_llama.data.stream_places import seek
from megatron_llama.engine.offload_options import OffloadConfig
from megatron_llama.engine.plan.buckets import AUTO
from megatron_llama.errors import CheckpointError, ConfigError, listing
from megatron_llama.hooks import layouts
from megatron_llama.metrics.trackers import require_trackers
from megatron_llama.registry import imported
from megatron_llama.train.setup.carried_files import carried_files
from megatron_llama.train.setup.checks.model import require_language_model
from megatron_llama.train.setup.checks.ranges import value_problems
from megatron_llama.train.setup.draft import By, Draft, Need, decides, refuses
from megatron_llama.train.setup.inputs import (
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
from megatron_llama.train.setup.layout import Choice, is_layout_open
from megatron_llama.train.setup.prompts import encoded_prompts
from megatron_llama.train.setup.resolve import assemble, check
from megatron_llama.train.setup.start import (
    compare,
    find_start,
    loaded_model,
    refuse_other_words,
    require_new_folder,
    said_by_source,
    seen_soon,
    with_pad_embedding_as_before,
)
from megatron_llama.train.setup.vocabulary import find_vocabulary, with_vocabulary


@refuses(needs=Need.MACHINE, by=By.RANK_0)
def refuse_missing_packages(draft: Draft) -> None:
    """Raise ConfigError for a tracker whose package is not installed."""
    require_trackers(draft.parsed.get(LogConfig))


@refuses(needs=Need.FILES, by=By.RANK_0)
def refuse_used_folder(draft: Draft) -> None:
    """Raise CheckpointError if a run that loads nothing would save among checkpoints. Of one that
    loads something ``decide_start`` refuses it."""
    options = draft.parsed.get(CheckpointConfig)
    if options.load is None:
        require_new_folder(options)


@decides("start", needs=Need.FILES, by=By.RANK_0)
def decide_start(draft: Draft) -> Draft:
    """Find what --load names: the only place where it is looked for."""
    # Before the fields of the model: a checkpoint that is missing is what a user has to hear, not
    # that the fields are missing which it would have given.
    options = draft.parsed.get(CheckpointConfig)
    return replace(draft, start=find_start(options) if options.load is not None else None)


@decides("trained", "config", "notes", needs=Need.FILES, by=By.RANK_0)
def decide_model(draft: Draft) -> Draft:
    """Put together preset, folder of weights, YAML and flags."""
    trained = loaded_model(draft.start, draft.parsed)
    config = assemble(draft.parsed, trained=trained)
    return replace(draft, trained=trained, config=config, notes=draft.parsed.notes)


@decides("source", needs=Need.FILES, by=By.RANK_0)
def decide_source(draft: Draft) -> Draft:
    """Note what the folder of the first weights says, as rank 0 sees it."""
    return replace(draft, source=said_by_source(draft.start, draft.parsed))


@decides("config", "notes", needs=Need.WORDS, by=By.RANK_0)
def decide_padding(draft: Draft) -> Draft:
    """Train the embedding of the padding token where the run that goes on has trained it."""
    config, notes = with_pad_embedding_as_before(draft.config, draft.start, draft.parsed.explicit)
    return replace(draft, config=config, notes=(*draft.notes, *notes))


@decides("config", "notes", needs=Need.PROCESSES, by=By.RANK_0)
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


@decides("config", "notes", "warnings", needs=Need.PROCESSES, by=By.RANK_0)
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


@refuses(needs=Need.FILES, by=By.EACH_RANK)
def refuse_other_source(draft: Draft) -> None:
    """Raise CheckpointError unless this rank sees the folder of the first weights that rank 0 has
    found. Each rank reads its part of the weights there: tensors of another model would be taken
    for parts of this one's."""
    start = draft.start
    if start is not None and not is_remote(start.path) and not seen_soon(start.path):
        raise CheckpointError(
            f"--load {start.path}",
            got="no such folder on this machine",
            expected="the folder that rank 0 has found",
            do="put it where all machines see it under this name, or copy it to each of them",
        )
    init = draft.parsed.get(CheckpointConfig).init_from_hf
    where = f"--load {start.path}" if start is not None else f"--init-from-hf {init}"
    refuse_other_words(where, said_by_source(start, draft.parsed), draft.source)


@decides("config", needs=Need.WORDS, by=By.EACH_RANK)
def use_own_machine(draft: Draft) -> Draft:
    """Put this rank's own words in the place of rank 0's where they are about its machine: a
    dataset, a snapshot of the hub or a cache may be elsewhere on each, and processors have other
    numbers."""
    parsed = draft.parsed
    config = draft.config
    offload = replace(config.offload, offload_cores=parsed.get(OffloadConfig).offload_cores)
    log = replace(config.log, profile_dir=parsed.get(LogConfig).profile_dir)
    own = replace(
        config,
        data=parsed.get(DataConfig),
        checkpoint=parsed.get(CheckpointConfig),
        offload=offload,
        log=log,
    )
    return replace(draft, config=own)


@decides("vocabulary", "config", needs=Need.FILES, by=By.EACH_RANK)
def decide_vocabulary(draft: Draft) -> Draft:
    """Read the tokenizer, and fill in what the model takes from it."""
    vocabulary = find_vocabulary(draft.config, draft.start)
    return replace(draft, vocabulary=vocabulary, config=with_vocabulary(draft.config, vocabulary))


@decides("warnings", needs=Need.WORDS, by=By.EACH_RANK)
def compare_with_start(draft: Draft) -> Draft:
    """Refuse to load weights of another model."""
    changes: list[str] = []
    if draft.start is not None and draft.trained is not None:
        config = draft.config
        changes = compare(config.checkpoint, draft.start, draft.trained, config.model)
    return replace(draft, warnings=(*draft.warnings, *changes, *draft.vocabulary.warnings))


@decides("config", "notes", needs=Need.MEMORY, by=By.EACH_RANK)
def decide_by_device_memory(draft: Draft) -> Draft:
    """Replace every ``auto`` by what fits into memory."""
    # Behind the vocabulary, which is a large part of a small model.
    parallel = draft.config.parallel
    open_choices = (
        parallel.data_parallel_sharding_strategy,
        parallel.param_slots,
        parallel.recompute_num_layers,
    )
    if AUTO not in open_choices:
        return draft
    # Only such a run computes its memory, and loads the plan of it.
    decide = imported("train.setup.auto:decide")
    processes = draft.processes
    config, notes = decide(draft.config, processes.count, processes.memory)
    return replace(draft, config=config, notes=(*draft.notes, *notes))


@decides("reading", needs=Need.FILES, by=By.EACH_RANK)
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


@decides("training", needs=Need.FILES, by=By.ALL_TOGETHER)
def open_training(draft: Draft) -> Draft:
    """Open the training samples on all ranks."""
    world = draft.processes.world
    training = open_samples(draft.reading.source, draft.config, TRAINING, world)
    return replace(draft, training=training)


@decides("identity", "state", "notes", needs=Need.SAMPLES, by=By.RANK_0)
def decide_position(draft: Draft) -> Draft:
    """Find the step and the sample with which the run begins."""
    identity, state, notes = first_state(
        draft.config, draft.training, draft.start, same_data=draft.reading.same_data
    )
    return replace(draft, identity=identity, state=state, notes=(*draft.notes, *notes))


@decides("config", "notes", needs=Need.SAMPLES, by=By.EACH_RANK)
def decide_length(draft: Draft) -> Draft:
    """Count the steps of --epochs. With this the configuration is final."""
    seek(draft.training, draft.state.places)
    config, notes = with_run_length(draft.config, len(draft.training), draft.state)
    return replace(draft, config=config, notes=(*draft.notes, *notes))


@decides("validation", needs=Need.FILES, by=By.ALL_TOGETHER)
def open_validation(draft: Draft) -> Draft:
    """Open the samples of evaluations on all ranks, if the run has evaluations."""
    validation = None
    if draft.config.training.eval_interval:
        world = draft.processes.world
        validation = open_samples(draft.reading.source, draft.config, VALIDATION, world)
    return replace(draft, validation=validation)


@decides("prompts", needs=Need.FILES, by=By.EACH_RANK)
def decide_prompts(draft: Draft) -> Draft:
    """Make tokens of --sample-prompt."""
    reading = draft.reading
    prompts = encoded_prompts(draft.config, reading.tokenizer, reading.prompt)
    return replace(draft, prompts=prompts)


@refuses(needs=Need.FILES, by=By.RANK_0)
def refuse_incomplete_weights(draft: Draft) -> None:
    """Raise CheckpointError if the weights that the run loads are not all there."""
    require_weights(draft.config, draft.start)


@refuses(needs=Need.FILES, by=By.RANK_0)
def refuse_unsavable_run(draft: Draft) -> None:
    """Raise UserError if the run will save or export what cannot be written."""
    require_saveable(draft.config.checkpoint, draft.reading.tokenizer, draft.start)


@decides("carried", "notes", needs=Need.FILES, by=By.RANK_0)
def decide_carried(draft: Draft) -> Draft:
    """Read what came with the weights and goes into checkpoints and exports."""
    carried, notes = carried_files(draft.config, draft.start, draft.reading.tokenizer)
    return replace(draft, carried=carried, notes=(*draft.notes, *notes))


@decides("notes", needs=Need.SAMPLES, by=By.EACH_RANK)
def warn_of_run(draft: Draft) -> Draft:
    """Warn of a run that reads its samples too often, or keeps nothing."""
    lines = warnings_of_run(draft.config, len(draft.training))
    return replace(draft, notes=(*draft.notes, *lines))


@refuses(needs=Need.MACHINE, by=By.RANK_0)
def refuse_unwritable_outputs(draft: Draft) -> None:
    """Raise UserError unless the run can write where its options say."""
    require_outputs(draft.config)


def refuse_wrong_words(parsed: Parsed, count: int, *, needs_data: bool) -> None:
    """Raise ConfigError for what is wrong in the words, whatever files say: all of it that can be
    known without them. Each of ``count`` processes calls it before they have met, and raises the
    same."""
    options = parsed.get(CheckpointConfig)
    if options.load is None and options.init_from_hf is None and not is_layout_open(parsed):
        check(assemble(parsed), count, needs_data=needs_data)
        return
    # The model's fields come from a folder, and much follows from them.
    sections = (section for section in config_sections() if section is not ModelConfig)
    problems = [problem for section in sections for problem in value_problems(parsed.get(section))]
    if problems:
        raise ConfigError(listing(f"This configuration cannot run on {count} processes:", problems))


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


MODEL = (decide_start, decide_model)
"""From words to the options and the model that they name, with much that is not yet derived."""

CONFIGURATION = (
    refuse_missing_packages,
    refuse_used_folder,
    *MODEL,
    decide_padding,
    decide_layout,
    derive,
    decide_source,
    refuse_other_source,
    use_own_machine,
    decide_vocabulary,
    compare_with_start,
    decide_by_device_memory,
)
"""From words to a configuration."""

TEXT = (read_text,)
"""What ``pretrain`` reads."""

SAMPLES = (
    open_training,
    decide_position,
    decide_length,
    open_validation,
    decide_prompts,
    refuse_incomplete_weights,
    refuse_unsavable_run,
    decide_carried,
    warn_of_run,
)
"""From a configuration and what a command reads to a run."""

OUTPUTS = (refuse_unwritable_outputs,)
"""What the run will write can be written."""
