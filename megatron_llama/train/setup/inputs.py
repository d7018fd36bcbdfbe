"""The inputs of a run before it has an engine: samples, the start position, weights.

Every refusal that depends on files is made here, before anything is built or written.
``train/setup`` calls these functions in its order, also in a dry run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol

from megatron_llama.checkpoint import native
from megatron_llama.checkpoint.adapters import saved_lora, takes_up
from megatron_llama.checkpoint.carried import NO_FILES, Carried
from megatron_llama.checkpoint.checkpoint_dir import TOKENIZER
from megatron_llama.checkpoint.failures import require_writable
from megatron_llama.checkpoint.history import ROLLBACK
from megatron_llama.checkpoint.listed_files import ListedFile
from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.checkpoint.model_folders.formats import hf_weights, weight_folders
from megatron_llama.checkpoint.storage_paths import is_remote, local_folder, storage_path
from megatron_llama.config.batch_ramp import BatchSizes, with_epochs
from megatron_llama.config.blend import Blend, read_blend
from megatron_llama.config.schema import CheckpointConfig, Config, LoraConfig, TrainingConfig
from megatron_llama.data.datasets import open_dataset
from megatron_llama.data.loader import BlendedSamples, Samples, StreamSamples, found_files
from megatron_llama.data.stream import TokenStream, megatron_split, split_documents
from megatron_llama.data.stream_places import fits, text_streams
from megatron_llama.data.tokenizer.base import Tokenizer
from megatron_llama.data.words import is_stream
from megatron_llama.engine.comm.object_collectives import broadcast_object, raise_on_all_ranks
from megatron_llama.engine.mesh import Axis
from megatron_llama.errors import ConfigError, DataError, listing
from megatron_llama.metrics.log import LANGUAGE_MODEL, LossNames
from megatron_llama.pipeline.objective import Objective
from megatron_llama.registry import Registry
from megatron_llama.train.setup.checks.optimizer import optimizer_problems
from megatron_llama.train.setup.draft import Shown
from megatron_llama.train.setup.prompts import Prompt
from megatron_llama.train.setup.start import (
    AUTO,
    Start,
    batch_changes,
    begins_anew,
    damaged,
    data_changes,
    order_changes,
    padding_changes,
    sample_changes,
    update_changes,
)

TRAINING = 0
VALIDATION = 1
USUAL_PASSES = 4
"""Passes over the samples. More are rarely meant, unless --epochs asks for them."""
Source = Callable[[Config, int], Samples]
"""A maker of the samples of TRAINING or VALIDATION. Raises DataError. It must not be collective."""


class OpenSamples(Protocol):
    """A maker of the samples of a part of a blend, otherwise as ``stream_samples``."""

    def __call__(
        self,
        config: Config,
        blend: Blend,
        part: int,
        *,
        eod: int | None,
        tokenizer: Tokenizer | None,
        share: tuple[int, int],
    ) -> Samples: ...


OTHER_SAMPLES: Registry[OpenSamples] = Registry(
    {
        "text": "train.setup.text_inputs:text_samples",
        "megatron": "train.setup.megatron_inputs:megatron_samples",
    }
)
"""The openers of samples of --data-path other than those of indexed datasets in file order."""


@dataclass(frozen=True)
class Reading:
    """The samples of a command, and how it reads them: the differences between commands."""

    source: Source
    tokenizer: Tokenizer | None = None
    """The tokenizer, copied into each checkpoint."""
    prompt: Prompt | None = None
    """The encoder of --sample-prompt."""
    same_data: bool = False
    """Whether a run must not resume from a checkpoint of other samples. Otherwise that is a
    warning."""
    objective: Objective | None = None
    """The minimized loss; None: the mean loss of the target tokens."""
    names: LossNames = LANGUAGE_MODEL
    """The names of the loss in the log."""


@dataclass(frozen=True)
class Ready:
    """A run with all decisions. Nothing changes its configuration any more."""

    config: Config
    training: Samples
    validation: Samples | None
    """None in a run that never evaluates."""
    identity: Mapping[str, Any]
    """The identity of the training samples; a checkpoint keeps it."""
    start: Start | None
    """The start that --load names; None: the run begins with other weights."""
    state: TrainState
    """The position from which the run starts."""
    tokenizer: Tokenizer | None
    """The tokenizer, copied into each checkpoint."""
    prompts: tuple[tuple[int, ...], ...]
    """The tokens of --sample-prompt."""
    notes: tuple[str, ...] = ()
    """Decisions made for the user."""
    warnings: tuple[str, ...] = ()
    """Options that can run but are probably not meant."""
    objective: Objective | None = None
    """The minimized loss; None: the mean loss of the target tokens."""
    names: LossNames = LANGUAGE_MODEL
    """The names of the loss in the log."""
    carried: Carried = NO_FILES
    """The files that came with the model; they go into checkpoints and exports."""
    listed: Sequence[ListedFile] = ()
    """See ``Draft.listed``."""
    seen: Sequence[Shown] = ()
    """The files that each rank sees; empty if the ranks have not shown them yet."""


def open_stream(
    config: Config,
    prefix: str,
    part: int,
    *,
    keep_tail: bool = False,
    tokenizer: Tokenizer | None = None,
    share: tuple[int, int] = (0, 1),
) -> TokenStream:
    """Open the training or the validation split of a dataset. If the ``tokenizer`` has tokens that
    the model lacks, this rank's ``share`` (r, n) of the split is searched for them: a run would
    stop at the first, maybe after days. A remote dataset is not searched, since all of it would be
    read. Raises DataError."""
    dataset = open_dataset(prefix, config.data)
    split = megatron_split if config.data.megatron_data_order else split_documents
    documents = split(config.data.split, dataset.num_documents)[part]
    stream = TokenStream(
        dataset,
        documents,
        config.training.seq_length,
        config.model.vocab_size,
        keep_tail=keep_tail,
        tokenizer=tokenizer,
    )
    stream.require_samples(("training", "validation")[part])
    unknown = tokenizer is not None and tokenizer.vocab_size > config.model.vocab_size
    if unknown and not dataset.is_remote:
        stream.require_ids(share)
    return stream


def stream_samples(
    config: Config,
    part: int,
    *,
    eod: int | None,
    keep_tail: bool = False,
    tokenizer: Tokenizer | None = None,
    share: tuple[int, int] = (0, 1),
) -> Samples:
    """Return the ``Source`` of --data-path. ``eod`` is the end-of-document id, if an option needs
    one. With ``keep_tail`` the tokens after the last whole sample of a dataset are a shorter
    sample. ``tokenizer`` and ``share`` are as for ``open_stream``."""
    blend = read_blend(config.data.data_path)
    if any(map(is_stream, blend.prefixes)):
        return OTHER_SAMPLES["text"](config, blend, part, eod=eod, tokenizer=tokenizer, share=share)
    if part == TRAINING and config.data.megatron_data_order:
        return OTHER_SAMPLES["megatron"](
            config, blend, part, eod=eod, tokenizer=tokenizer, share=share
        )
    parts = [
        StreamSamples(
            open_stream(
                config, prefix, part, keep_tail=keep_tail, tokenizer=tokenizer, share=share
            ),
            config.data,
            eod,
        )
        for prefix in blend.prefixes
    ]
    if len(parts) == 1:
        return parts[0]
    return BlendedSamples(parts, blend.weights or [len(samples) for samples in parts])


def open_samples(source: Source, config: Config, part: int, world: Axis) -> Samples:
    """Open the samples of TRAINING or VALIDATION on all ranks. Collective. Raises DataError on
    every rank, also if one has found other files than the first: each looks for itself, and a file
    may be replaced meanwhile, or differ between machines."""
    with raise_on_all_ranks(world):
        samples = source(config, part)
    files = found_files(samples)
    with raise_on_all_ranks(world):
        refuse_other_files(files, broadcast_object(files, world))
    return samples


def refuse_other_files(own: Sequence[tuple[str, str]], first: Sequence[tuple[str, str]]) -> None:
    """Raise DataError if a rank has found other files of samples than the first rank."""
    for (name, mark), (_, expected) in zip_longest(
        own, first, fillvalue=("--data-path", "nothing")
    ):
        if mark != expected:
            raise DataError(
                name,
                got=mark,
                expected=f"what rank 0 has found: {expected}",
                do="wait until the files are the same for all machines, and start again",
            )


def warnings_of_run(config: Config, samples: int) -> Iterator[str]:
    """Yield warnings of a run of these training samples that is probably not meant."""
    training = config.training
    options = config.checkpoint
    passes = passes_over(training, samples)
    if passes > USUAL_PASSES and not training.epochs:
        yield (
            f"warning: {training.train_iters:,} iterations of {training.global_batch_size:,} "
            f"samples read the {samples:,} training samples {passes:.3g} times"
        )
    if options.save is None and options.export_hf is None:
        yield "warning: without --save and --export-hf the trained model is lost when the run ends"


def passes_over(training: TrainingConfig, samples: int) -> float:
    """Return how often a run reads each of its training samples, on average."""
    return BatchSizes.from_training(training).samples(training.train_iters) / samples


def first_state(
    config: Config, samples: Samples, start: Start | None, *, same_data: bool
) -> tuple[Mapping[str, Any], TrainState, list[str]]:
    """Return the identity of the samples, the position at which the run starts, and lines to print.

    The samples are compared with those of the checkpoint from which the run resumes. Raises
    DataError for others with ``same_data``."""
    options = config.checkpoint
    identity = samples.identity()
    lines = list(_start_lines(options, start))
    if start is None or begins_anew(options, start):
        return identity, TrainState(0, 0), lines
    if start.meta is None:
        if text_streams(samples):
            raise DataError(
                "--data-path",
                got=f"a text, for a run that goes on from {start.path}",
                expected="an indexed dataset, in which the position of that run means something",
                do="begin anew with its weights (--finetune)",
            )
        if same_data:
            raise DataError(
                "--train-data",
                got=f"other training samples than those of {start.path}, a run of Megatron-LM",
                expected="the samples in whose order the run goes on",
                do="begin anew with its weights (--finetune)",
            )
        state = start.state()
        run = start.saved_run()
        lines += run.sample_lines(state.consumed_samples, config)
        lines += batch_changes(run.args, state, config)
        if options.load_optim:
            # Loaded by a run that goes on with the state of another program.
            from megatron_llama.train.setup.take_over import update_lines

            lines += update_lines(start.optimizer(config.model), config)
        return identity, state, lines
    meta = start.meta
    changes = sample_changes(meta.state.data, identity)
    if text_streams(samples) and (
        changes or meta.state.places is None or not fits(samples, meta.state.places)
    ):
        raise DataError(
            "--data-path",
            got=f"other text than that of {meta.folder} ({changes or 'an indexed dataset'})",
            expected="the same files and options: where the run has come to in a text is a place "
            "in these files",
            do="give those of that run, or begin anew with its weights (--finetune)",
        )
    if changes and same_data:
        do = (
            "give the files and options of that run, begin anew with its weights (--finetune), "
            "or --on-changed-data continue"
        )
        got = f"other training samples than those of {meta.folder} ({changes})"
        expected = "the samples in whose order the run goes on"
        raise DataError("--train-data", got=got, expected=expected, do=do)
    if changes:
        lines.append(f"warning: other training samples than those of {meta.folder} ({changes})")
    others = (
        *data_changes(meta.config, config),
        *order_changes(meta, config),
        *update_changes(meta.config, config),
        *padding_changes(meta, config),
    )
    lines += [f"warning: {text}" for text in others]
    lines += batch_changes(meta.config.get("training", {}), meta.state, config)
    return identity, meta.state, lines


def _start_lines(options: CheckpointConfig, start: Start | None) -> Iterator[str]:
    """Yield lines for the user about the start of the run."""
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
    elif options.load == AUTO:
        yield from (f"warning: {text}" for text in damaged(start))


def with_run_length(config: Config, samples: int, state: TrainState) -> tuple[Config, list[str]]:
    """Return the configuration with the number of steps of --epochs, and lines that say so. Raises
    ConfigError for options that do not fit it."""
    if not config.training.epochs:
        return config, []
    # A rollback repeats iterations with other samples. Samples that are left out are consumed, but
    # no step that counts has had them. They are subtracted, so that the learning rate is that of an
    # uninterrupted run. Those that are still to come are not consumed yet.
    left_out = 0
    if config.training.on_bad_step == ROLLBACK:
        left_out = sum(
            interval.last_sample + 1 - interval.first_sample
            for interval in state.history.skipped
            if interval.first_sample < state.consumed_samples
        )
    config = with_epochs(
        config, samples, steps_done=state.iteration, samples_done=state.consumed_samples - left_out
    )
    problems = list(optimizer_problems(config.optimizer, config.training))
    steps = config.training.train_iters
    epochs = config.training.epochs
    if problems:
        raise ConfigError(
            listing(
                f"These options do not fit a run of {steps} steps (--epochs {epochs:g}):", problems
            )
        )
    return config, [f"--epochs {epochs:g}: {samples:,} samples in a pass, {steps:,} steps in all"]


def resumes(config: Config, start: Start) -> bool:
    """Whether the run takes up all of a checkpoint, and not only the weights of a folder. Raises
    CheckpointError where either would be wrong."""
    where = f"--load {start.path}"
    anew = config.checkpoint.finetune
    if start.goes_on and not anew:
        return takes_up(where, LoraConfig(), config.lora, anew=False)
    if start.meta is None:
        return False
    saved = start.meta.model
    # --resize-embeddings, or a reward model that begins with a language model.
    if saved.vocab_size != config.model.vocab_size or saved.num_labels != config.model.num_labels:
        return False
    return takes_up(where, saved_lora(start.meta.config), config.lora, anew=anew)


def require_weights(config: Config, start: Start | None) -> None:
    """Raise CheckpointError if the run's first weights are not all there."""
    options = config.checkpoint
    if start is not None and resumes(config, start) and start.native:
        native.require_complete(
            start.path, config, optimizer=options.load_optim and not options.finetune
        )
    elif start is not None:
        if resumes(config, start) and options.load_optim:
            # Loaded by a run that goes on with the state of another program.
            from megatron_llama.train.setup.take_over import require_adam

            require_adam(start.path, config)
        start.weights(config.model)
    elif options.init_from_hf is not None:
        hf_weights(options.init_from_hf, ignored=options.ignore_hf_config_fields)


def require_saveable(
    options: CheckpointConfig, tokenizer: Tokenizer | None, start: Start | None
) -> None:
    """Raise DataError if the run will save its tokenizer and no file can express it, and
    CheckpointError if the folder to export into holds anything else."""
    if options.export_hf is not None:
        # A run loads only the writers that it needs, as with readers.
        from megatron_llama.checkpoint.model_folders.hf.writer import require_export

        sources = weight_folders(vars(options))
        if start is not None and start.meta is not None:
            # A resumed run no longer names its first model.
            sources += weight_folders(start.meta.config.get("checkpoint", {}))
        require_export(Path(options.export_hf).resolve(), sources)
    saves = options.save is not None and not (storage_path(options.save) / TOKENIZER).exists()
    if tokenizer is not None and (saves or options.export_hf is not None):
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_hf(folder)


def require_outputs(config: Config) -> None:
    """Raise CheckpointError unless the run can write where its options say, and ConfigError unless
    it can serve its numbers there: at the start, not after days. Nothing stays there."""
    options = config.checkpoint
    log = config.log
    if options.save is not None:
        folder = storage_path(options.save)
        require_writable(local_folder(options.save) if is_remote(folder) else folder)
    if log.tensorboard_dir is not None:
        require_writable(Path(log.tensorboard_dir, log.job_name or ""))
    if log.open_metrics is not None:
        # Only a run that serves loads the server.
        from megatron_llama.metrics.open_metrics import require_port

        require_port(log)
    if log.record_timeline is not None:
        require_writable(Path(log.record_timeline).parent)
    if log.profile:
        require_writable(Path(log.profile_dir))
    if options.export_hf is not None:
        require_writable(Path(options.export_hf).resolve().parent)
