"""The decisions between the words of a user and the first step, in their order.

The functions stand in the order of their calls; above each are the fields that it fills, its needs,
and the ranks that decide. The lists at the end are parts of the way, which commands combine:

- ``WORDS``: what is wrong in the words alone is refused before processes meet.
- ``CONFIGURATION``: rank 0 makes the configuration of the words and of what --load names, and
  refuses what cannot run. Each rank looks whether it sees the same files, and reads the tokenizer.
- what a command reads: ``TEXT`` for ``pretrain``; ``sft`` and ``align`` have deciders of their own.
- ``SAMPLES``: samples are opened, and the position in them is found. Behind the steps of --epochs
  the configuration is final.
- ``OUTPUTS``: what the run will write can be written.

They call ``train/setup/start.py`` (--load), ``train/setup/resolve.py`` (fields of a configuration),
``train/setup/checks`` (problems), ``train/setup/vocabulary.py`` (tokenizers),
``train/setup/inputs.py`` (samples)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from megatron_llama.checkpoint.storage_paths import is_remote
from megatron_llama.config.schema import CheckpointConfig, DataConfig, LogConfig, ModelConfig
from megatron_llama.config.sections import config_sections
from megatron_llama.config.world import dp_size
from megatron_llama.data.loader import found_files
from megatron_llama.data.stream_places import seek
from megatron_llama.engine.offload_options import OffloadConfig
from megatron_llama.engine.plan.buckets import AUTO
from megatron_llama.errors import CheckpointError, ConfigError, listing
from megatron_llama.hooks import layouts
from megatron_llama.metrics.trackers import REQUIRED, require_tracker
from megatron_llama.registry import imported
from megatron_llama.train.setup.build import read_first_step, show_files
from megatron_llama.train.setup.carried_files import carried_files
from megatron_llama.train.setup.checks.model import require_language_model
from megatron_llama.train.setup.checks.ranges import value_problems
from megatron_llama.train.setup.draft import By, Decider, Draft, Need, decides, refuses
from megatron_llama.train.setup.graphs import refuse_graphs_on_hosts
from megatron_llama.train.setup.inputs import (
    TRAINING,
    VALIDATION,
    Reading,
    Ready,
    first_state,
    refuse_other_files,
    require_outputs,
    require_saveable,
    require_weights,
    stream_samples,
    warnings_of_run,
    with_run_length,
)
from megatron_llama.train.setup.kernels import refuse_without_kernels
from megatron_llama.train.setup.layout import Choice, is_layout_open
from megatron_llama.train.setup.prompts import encoded_prompts
from megatron_llama.train.setup.resolve import assemble, check
from megatron_llama.train.setup.start import (
    compare,
    find_start,
    folder_from_elsewhere,
    loaded_model,
    refuse_other_words,
    require_new_folder,
    said_by_source,
    seen_soon,
    with_pad_embedding_as_before,
)
from megatron_llama.train.setup.vocabulary import find_vocabulary, with_vocabulary
from megatron_llama.train.setup.weight_check import files_of_weights


@refuses(needs=Need.WORDS, by=By.EACH_RANK)
def refuse_wrong_words(draft: Draft) -> None:
    """Raise ConfigError with every problem of the words that is known without files."""
    parsed = draft.parsed
    count = draft.processes.count
    options = parsed.get(CheckpointConfig)
    if options.load is None and options.init_from_hf is None and not is_layout_open(parsed):
        check(assemble(parsed), count, needs_data=draft.needs_data)
        return
    # The model's fields come from a folder, and much is derived from them.
    sections = (section for section in config_sections() if section is not ModelConfig)
    problems = [problem for section in sections for problem in value_problems(parsed.get(section))]
    if problems:
        raise ConfigError(listing(f"This configuration cannot run on {count} processes:", problems))


def refuse_without_package(option: str) -> Decider:
    """Return the decider that raises ConfigError if the package of ``option``'s tracker is not
    installed."""

    @refuses(needs=Need.MACHINE, by=By.RANK_0)
    def refuse(draft: Draft) -> None:
        require_tracker(option, draft.parsed.get(LogConfig))

    return refuse


@refuses(needs=Need.FILES, by=By.RANK_0)
def refuse_used_folder(draft: Draft) -> None:
    """Raise CheckpointError if a run that loads nothing would save among checkpoints.
    ``decide_start`` refuses it for a run that loads."""
    options = draft.parsed.get(CheckpointConfig)
    if options.load is None:
        require_new_folder(options)


@decides("start", needs=Need.FILES, by=By.RANK_0)
def decide_start(draft: Draft) -> Draft:
    """Find the start that --load names. It is looked for only here."""
    # This comes before the fields of the model: a user has to hear of a missing checkpoint, not of
    # the missing fields that it would have given.
    options = draft.parsed.get(CheckpointConfig)
    return replace(draft, start=find_start(options) if options.load is not None else None)


@decides("trained", "config", "notes", needs=Need.FILES, by=By.RANK_0)
def decide_model(draft: Draft) -> Draft:
    """Combine preset, folder of weights, YAML and flags."""
    trained = loaded_model(draft.start, draft.parsed)
    config = assemble(draft.parsed, trained=trained)
    return replace(draft, trained=trained, config=config, notes=draft.parsed.notes)


@decides("source", needs=Need.FILES, by=By.RANK_0)
def decide_source(draft: Draft) -> Draft:
    """Note the content of the folder of the first weights, as rank 0 sees it."""
    return replace(draft, source=said_by_source(draft.start, draft.parsed))


@decides("config", "notes", needs=Need.WORDS, by=By.RANK_0)
def decide_padding(draft: Draft) -> Draft:
    """Train the embedding of the padding token if the resumed run has trained it."""
    config, notes = with_pad_embedding_as_before(draft.config, draft.start, draft.parsed.explicit)
    return replace(draft, config=config, notes=(*draft.notes, *notes))


@decides("config", "notes", needs=Need.PROCESSES, by=By.RANK_0)
def decide_layout(draft: Draft) -> Draft:
    """Choose the layout, with --auto-parallel."""
    if not is_layout_open(draft.parsed):
        return draft
    if draft.config.parallel.max_restarts_in_place > 0:
        raise ConfigError(
            "--max-restarts-in-place",
            got="--auto-parallel",
            expected="a layout whose dp alone may change",
            do="give the sizes that --auto-parallel prints",
        )
    choose = imported(layouts().chosen)
    processes = draft.processes
    choice: Choice = choose(
        draft.parsed, draft.config, processes.count, processes.devices, draft.start
    )
    return replace(draft, config=choice.config, notes=(*draft.notes, *choice.notes))


@decides("config", "notes", "warnings", needs=Need.PROCESSES, by=By.RANK_0)
def derive(draft: Draft) -> Draft:
    """Refuse a configuration that cannot run, with all problems; else fill in derived values."""
    valid = check(draft.config, draft.processes.count, needs_data=draft.needs_data)
    return replace(
        draft,
        config=valid.config,
        notes=(*draft.notes, *valid.notes),
        warnings=(*draft.warnings, *valid.warnings),
    )


@refuses(needs=Need.FILES, by=By.EACH_RANK)
def refuse_other_source(draft: Draft) -> None:
    """Raise CheckpointError unless this rank sees the same folder of the first weights as rank 0.
    Each rank reads its part of the weights there: tensors of another model would be taken for this
    one's."""
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
    """Replace rank 0's words about its machine by this rank's own: a dataset, a snapshot of the hub
    or a cache may be elsewhere on each machine, and processors have other numbers."""
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
    """Read the tokenizer, and fill in the model's fields from it."""
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
    """Replace every ``auto`` by a value that fits into memory."""
    # This comes after the vocabulary, which is a large part of a small model.
    parallel = draft.config.parallel
    open_choices = (
        parallel.data_parallel_sharding_strategy,
        parallel.param_slots,
        parallel.recompute_num_layers,
    )
    if AUTO not in open_choices:
        return draft
    # Only such a run computes its memory, and loads the plan.
    decide = imported("train.setup.auto:decide_on_devices")
    config, notes = decide(draft.config, draft.processes)
    return replace(draft, config=config, notes=(*draft.notes, *notes))


@decides("reading", needs=Need.FILES, by=By.EACH_RANK)
def read_text(draft: Draft) -> Draft:
    """Read --data-path, as ``pretrain`` does."""
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


@decides("training", needs=Need.FILES, by=By.EACH_RANK)
def open_training(draft: Draft) -> Draft:
    """Open the training samples. Each rank looks for itself: a file may be replaced meanwhile, or
    differ between machines."""
    return replace(draft, training=draft.reading.source(draft.config, TRAINING))


@decides("files_of_rank_0", needs=Need.SAMPLES, by=By.RANK_0)
def note_training_files(draft: Draft) -> Draft:
    """Note the files of the training samples, as rank 0 sees them."""
    return replace(draft, files_of_rank_0=tuple(found_files(draft.training)))


@refuses(needs=Need.SAMPLES, by=By.EACH_RANK)
def refuse_other_training(draft: Draft) -> None:
    """Raise DataError unless this rank sees rank 0's files of training samples."""
    refuse_other_files(found_files(draft.training), draft.files_of_rank_0)


@decides("identity", "state", "notes", needs=Need.SAMPLES, by=By.RANK_0)
def decide_position(draft: Draft) -> Draft:
    """Find the first step and sample of the run."""
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


@decides("validation", needs=Need.FILES, by=By.EACH_RANK)
def open_validation(draft: Draft) -> Draft:
    """Open the samples of evaluations, if the run has evaluations."""
    validation = None
    if draft.config.training.eval_interval:
        validation = draft.reading.source(draft.config, VALIDATION)
    return replace(draft, validation=validation)


@decides("files_of_rank_0", needs=Need.SAMPLES, by=By.RANK_0)
def note_validation_files(draft: Draft) -> Draft:
    """Note the files of the samples of evaluations, as rank 0 sees them."""
    files = found_files(draft.validation) if draft.validation is not None else ()
    return replace(draft, files_of_rank_0=tuple(files))


@refuses(needs=Need.SAMPLES, by=By.EACH_RANK)
def refuse_other_validation(draft: Draft) -> None:
    """Raise DataError unless this rank sees rank 0's files of evaluations."""
    if draft.validation is not None:
        refuse_other_files(found_files(draft.validation), draft.files_of_rank_0)


@decides("prompts", needs=Need.FILES, by=By.EACH_RANK)
def decide_prompts(draft: Draft) -> Draft:
    """Encode --sample-prompt."""
    reading = draft.reading
    prompts = encoded_prompts(draft.config, reading.tokenizer, reading.prompt)
    return replace(draft, prompts=prompts)


@refuses(needs=Need.FILES, by=By.RANK_0)
def refuse_incomplete_weights(draft: Draft) -> None:
    """Raise CheckpointError if the run's first weights are not all there."""
    require_weights(draft.config, draft.start)


@refuses(needs=Need.FILES, by=By.RANK_0)
def refuse_unsavable_run(draft: Draft) -> None:
    """Raise UserError if the run will save or export objects that cannot be written."""
    require_saveable(draft.config.checkpoint, draft.reading.tokenizer, draft.start)


@decides("carried", "notes", needs=Need.FILES, by=By.RANK_0)
def decide_carried(draft: Draft) -> Draft:
    """Read the files that came with the weights and go into checkpoints and exports."""
    carried, notes = carried_files(draft.config, draft.start, draft.reading.tokenizer)
    return replace(draft, carried=carried, notes=(*draft.notes, *notes))


@decides("notes", needs=Need.SAMPLES, by=By.EACH_RANK)
def warn_of_run(draft: Draft) -> Draft:
    """Warn of a run that reads its samples too often, or keeps nothing."""
    lines = warnings_of_run(draft.config, len(draft.training))
    return replace(draft, notes=(*draft.notes, *lines))


@decides("listed", "shown", needs=Need.FILES, by=By.EACH_RANK)
def look_at_files(draft: Draft) -> Draft:
    """List the files that are compared with their sums while the run trains. The ranks that share a
    disk share them out, as soon as each knows what the others see."""
    folder = folder_from_elsewhere(draft.config.checkpoint, draft.start)
    listed = files_of_weights(Path(folder) if folder is not None else None)
    return replace(draft, listed=listed, shown=show_files(draft.config, listed))


@refuses(needs=Need.SAMPLES, by=By.EACH_RANK)
def refuse_unreadable_samples(draft: Draft) -> None:
    """Raise DataError if this rank cannot read its samples until the first step."""
    size = dp_size(draft.config, draft.processes.count)
    parallel = draft.config.parallel
    inner = parallel.context_parallel_size * parallel.tensor_model_parallel_size
    read_first_step(ready_of(draft), (draft.processes.world.rank // inner % size,), size)


@refuses(needs=Need.MACHINE, by=By.RANK_0)
def refuse_unwritable_outputs(draft: Draft) -> None:
    """Raise UserError unless the run can write where its options say."""
    require_outputs(draft.config)


def ready_of(draft: Draft) -> Ready:
    """Return the run with all decisions."""
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
        draft.listed,
        [shown for shown in draft.seen if shown is not None],
    )


WORDS = (refuse_wrong_words,)
"""Refusals by each process before it waits for others. All processes find the same."""

MODEL = (decide_start, decide_model)
"""From words to the options and the model that they name, before most derivations."""

DERIVED = (
    decide_padding,
    decide_layout,
    derive,
    refuse_without_kernels,
    refuse_graphs_on_hosts,
    decide_source,
    refuse_other_source,
    use_own_machine,
    decide_vocabulary,
    compare_with_start,
    decide_by_device_memory,
)
"""From the options and the model to a configuration."""

CONFIGURATION = (
    # One decider for each tracker: the driver reports all refusals of neighbours at once.
    *map(refuse_without_package, REQUIRED),
    refuse_used_folder,
    *MODEL,
    *DERIVED,
)
"""From words to a configuration."""

TEXT = (read_text,)
"""The inputs of ``pretrain``."""

SAMPLES = (
    open_training,
    note_training_files,
    refuse_other_training,
    decide_position,
    decide_length,
    open_validation,
    note_validation_files,
    refuse_other_validation,
    decide_prompts,
    refuse_incomplete_weights,
    refuse_unsavable_run,
    decide_carried,
    warn_of_run,
    look_at_files,
)
"""From a configuration and a command's inputs to a run."""

FIRST_STEP = (refuse_unreadable_samples,)
"""What only the run itself does: a dry run reads the samples of all its ranks."""

OUTPUTS = (refuse_unwritable_outputs,)
"""Refusals of outputs that cannot be written."""
