"""The decisions of ``evaluate`` beside those of a run: its samples and their length."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatron_llama.checkpoint.storage_paths import local_copy
from megatron_llama.config.schema import CheckpointConfig, DataConfig
from megatron_llama.data.preprocess import preprocess
from megatron_llama.data.preprocess_config import PreprocessConfig
from megatron_llama.data.tokenizer.hf import as_hf_tokenizer
from megatron_llama.data.tokenizer.load import load_tokenizer
from megatron_llama.errors import ConfigError
from megatron_llama.train.api.common.trained import open_reader, tokenizer_folder
from megatron_llama.train.commands.common.configs import EvaluateConfig
from megatron_llama.train.setup.checks.model import require_language_model
from megatron_llama.train.setup.checks.parallel import sequence_unit
from megatron_llama.train.setup.draft import By, Decider, Draft, Need, decides
from megatron_llama.train.setup.inputs import Reading, stream_samples


def decide_measured(options: EvaluateConfig) -> Decider:
    """Return the decider of the samples' length, which makes a dataset of --text at --data-path."""

    @decides("config", needs=Need.FILES, by=By.EACH_RANK)
    def decide_length(draft: Draft) -> Draft:
        config = draft.config
        require_language_model(config.model, _weights(draft))
        positions = config.model.max_position_embeddings
        length = min(config.training.seq_length, positions)
        if options.tasks:
            unit = sequence_unit(config.parallel)
            length = max(1, positions // unit) * unit
        if options.text:
            # No longer than the text, but a multiple of the layout's divisor of a sequence.
            parallel = config.parallel
            unit = parallel.tensor_model_parallel_size * 2 * parallel.context_parallel_size
            count = _write_dataset(options.text, draft)
            length = min(length, max(1, -(-(count - 1) // unit)) * unit)
        training = replace(config.training, seq_length=options.seq_length or length)
        return replace(draft, config=replace(config, training=training))

    return decide_length


def read_measured(options: EvaluateConfig) -> Decider:
    """Return the decider of the samples, and of the tokenizer of --tasks."""

    @decides("reading", needs=Need.FILES, by=By.EACH_RANK)
    def read(draft: Draft) -> Draft:
        config = draft.config
        vocabulary = draft.vocabulary
        tokenizer = vocabulary.tokenizer
        if options.tasks:
            with _tokenizer_path(draft) as path:
                tokenizer = as_hf_tokenizer(load_tokenizer(path, config.data.tokenizer_type))
        elif config.training.eval_interval == 0:  # `check` switched it off
            raise ConfigError(
                "--split",
                got=config.data.split,
                expected="a share of documents for validation",
                do="give --split 0,100,0 to evaluate on all of them",
            )
        world = draft.processes.world
        source = partial(
            stream_samples,
            eod=vocabulary.eod,
            keep_tail=options.eval_iters is None,
            tokenizer=tokenizer,
            share=(world.rank, world.size),
        )
        return replace(draft, reading=Reading(source, tokenizer))

    return read


def _weights(draft: Draft) -> str:
    """Return the name of the measured folder, as this rank sees it."""
    own = draft.parsed.get(CheckpointConfig)
    return str(own.init_from_hf if draft.start is None else draft.start.path)


@contextmanager
def _tokenizer_path(draft: Draft) -> Iterator[Path | str]:
    """Yield the path of the tokenizer that is given, or lies with the weights."""
    config = draft.config
    given = draft.parsed.get(DataConfig).tokenizer_model
    source = open_reader(
        _weights(draft),
        vocab_size=config.model.vocab_size,
        ignored=config.checkpoint.ignore_hf_config_fields,
    )
    with local_copy(tokenizer_folder(source)) as own:
        yield given or own


def _write_dataset(text: tuple[str, ...], draft: Draft) -> int:
    """Make a dataset of the text, and return its number of tokens."""
    data = draft.parsed.get(DataConfig)
    [prefix] = data.data_path
    with _tokenizer_path(draft) as path:
        made = preprocess(
            PreprocessConfig(
                input=text,
                output_prefix=prefix,
                tokenizer_model=str(path),
                tokenizer_type=data.tokenizer_type,
                append_eod=load_tokenizer(path, data.tokenizer_type).eos_id is not None,
            )
        )
    return made.tokens
