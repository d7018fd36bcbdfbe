"""``evaluate``: loss and perplexity of a model, on an indexed dataset or on text."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_llama.api.common.configs import ModelFolderConfig
from megatron_llama.commands import pretrain
from megatron_llama.commands.common.configs import EvaluateConfig
from megatron_llama.config.parse import Parsed
from megatron_llama.config.parts import completed, part_of
from megatron_llama.config.schema import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    TrainingConfig,
)
from megatron_llama.errors import ConfigError, describe

if TYPE_CHECKING:
    from megatron_llama.conversion.formats import ModelReader

SECTIONS = (
    EvaluateConfig,
    part_of(
        ModelFolderConfig,
        "The model to measure, and its tokenizer.",
        "load",
        "init_from_hf",
        "tokenizer_model",
        "vocab_size",
        "ignore_hf_config_fields",
    ),
    part_of(
        DataConfig,
        "The dataset.",
        "data_path",
        "split",
        "tokenizer_type",
        "reset_position_ids",
        "reset_attention_mask",
        "eod_mask_loss",
    ),
    part_of(
        TrainingConfig,
        "Batches and precision.",
        "micro_batch_size",
        "bf16",
        "fp16",
        "fp64",
        "compile",
    ),
    part_of(
        ParallelConfig,
        "How the model is spread over processes. dp = processes / (tp x cp x pp).",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "pipeline_layer_split",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "context_parallel_size",
        "cp_comm_type",
        "sequence_parallel",
        "pipeline_schedule",
        "distributed_timeout_minutes",
    ),
    part_of(
        ModelConfig,
        "What the weights are to be computed with, where the folder says something else.",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
    ),
)
"""What a measurement uses of a run's options. Any other option is refused."""
LONGEST = TrainingConfig().seq_length
"""Tokens of a sample, unless the model has fewer positions or --seq-length says otherwise."""


def evaluate(parsed: Parsed) -> None:
    """Print loss and perplexity of --load or --init-from-hf."""
    from megatron_llama.commands.common.trained import open_folder
    from megatron_llama.plans.checks.model import require_language_model

    options = parsed.get(EvaluateConfig)
    run = _run_of(parsed, options)
    data = run.get(DataConfig)
    _refuse_data(run, options)
    weights = run.get(CheckpointConfig)
    model = run.get(ModelConfig)
    tokens = 0
    if data.tokenizer_model is not None and not model.vocab_size:
        from megatron_llama.tokenizer.load import load_tokenizer

        tokens = load_tokenizer(data.tokenizer_model, data.tokenizer_type).vocab_size
    source = open_folder(
        weights.load,
        weights.init_from_hf,
        vocab_size=model.vocab_size,
        tokens=tokens,
        ignored=weights.ignore_hf_config_fields,
    )
    require_language_model(source.model, str(source.folder))
    positions = model.max_position_embeddings or source.model.max_position_embeddings
    length = options.seq_length or min(LONGEST, positions)
    if not options.text:
        _measure(_with(run, replace(run.get(TrainingConfig), seq_length=length)), options)
        return
    with _tokens_of(options.text, data, source) as (prefix, count):
        if not options.seq_length:
            # No longer than the text, but a multiple of what the layout divides a sequence into.
            parallel = run.get(ParallelConfig)
            unit = parallel.tensor_model_parallel_size * 2 * parallel.context_parallel_size
            length = min(length, max(1, -(-(count - 1) // unit)) * unit)
        training = replace(run.get(TrainingConfig), seq_length=length)
        all_of_it = replace(data, data_path=(str(prefix),), split="0,100,0")
        _measure(_with(run, training, all_of_it), options)


def _run_of(parsed: Parsed, options: EvaluateConfig) -> Parsed:
    """Return the command line as that of a run which does nothing but evaluate once: its other
    options have their defaults."""
    instances: dict[type[Any], Any] = {
        section: completed(section, parsed) for section in pretrain.SECTIONS
    }
    training: TrainingConfig = instances[TrainingConfig]
    instances[TrainingConfig] = replace(
        training, train_iters=1, eval_interval=1, eval_iters=options.eval_iters or 0
    )
    return replace(parsed, instances=instances)


def _with(run: Parsed, *sections: object) -> Parsed:
    """Return the command line with these sections instead of its own."""
    changed = {type(section): section for section in sections}
    return replace(run, instances={**run.instances, **changed})


def _refuse_data(run: Parsed, options: EvaluateConfig) -> None:
    """Raise ConfigError unless exactly one of --text and --data-path says what to measure on."""
    if not options.text:
        if not run.get(DataConfig).data_path:
            do = "give --data-path PREFIX of a dataset, or --text FILE"
            raise ConfigError(
                describe("--data-path, --text", got="neither", expected="one of them", do=do)
            )
        return
    given = [name for name in ("data_path", "split") if name in run.explicit]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(
            describe(
                names, got="given with --text", expected="one or the other", do="leave one out"
            )
        )


@contextmanager
def _tokens_of(
    text: tuple[str, ...], data: DataConfig, source: ModelReader
) -> Iterator[tuple[Path, int]]:
    """Make a dataset of the text in a temporary folder, with the tokenizer that is given or lies
    with the weights; give its prefix and its number of tokens."""
    from megatron_llama.api.common.trained import tokenizer_folder
    from megatron_llama.checkpoint.storage_paths import local_copy
    from megatron_llama.data.preprocess import preprocess
    from megatron_llama.data.preprocess_config import PreprocessConfig
    from megatron_llama.tokenizer.load import load_tokenizer

    # Every process makes its own dataset: the tokens are the same, and machines need not share a
    # disk.
    with tempfile.TemporaryDirectory() as folder, local_copy(tokenizer_folder(source)) as own:
        prefix = Path(folder) / "text"
        tokenizer = data.tokenizer_model or str(own)
        made = preprocess(
            PreprocessConfig(
                input=text,
                output_prefix=str(prefix),
                tokenizer_model=tokenizer,
                tokenizer_type=data.tokenizer_type,
                append_eod=load_tokenizer(tokenizer, data.tokenizer_type).eos_id is not None,
            )
        )
        yield prefix, made.tokens


def _measure(run: Parsed, options: EvaluateConfig) -> None:
    """Join the other processes, and print the loss on the validation split: on every token of it,
    or on the samples that --eval-iters leaves."""
    from megatron_llama.api.train import prepared
    from megatron_llama.distributed.mesh import this_place

    with prepared(run, this_place()) as (ready, mesh):
        from megatron_llama.loop.inputs import stream_samples
        from megatron_llama.training import evaluate_only

        config = ready.config
        if config.training.eval_interval == 0:  # `check` switched it off
            expected = "a share of documents for validation"
            do = "give --split 0,100,0 to evaluate on all of them"
            raise ConfigError(describe("--split", got=config.data.split, expected=expected, do=do))
        source = partial(
            stream_samples,
            eod=ready.vocabulary.eod,
            keep_tail=options.eval_iters is None,
            tokenizer=ready.vocabulary.tokenizer,
            share=(mesh.world.rank, mesh.world.size),
        )
        evaluate_only(config, mesh, source)
