"""``evaluate``: loss and perplexity of a model, on an indexed dataset or on text, and its results
in tasks of lm-evaluation-harness."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_llama.config.parse import Parsed, flag
from megatron_llama.config.parts import completed, part_of
from megatron_llama.config.schema import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    TrainingConfig,
)
from megatron_llama.errors import ConfigError, describe, listing
from megatron_llama.train.api.common.configs import ModelFolderConfig
from megatron_llama.train.commands import pretrain
from megatron_llama.train.commands.common.configs import EvaluateConfig

if TYPE_CHECKING:
    from megatron_llama.checkpoint.model_folders.formats import ModelReader
    from megatron_llama.data.tokenizer.hf import HFTokenizer
    from megatron_llama.train.commands.common.harness import Report

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
UNUSED_BY_TASKS = (
    "text",
    "data_path",
    "split",
    "eval_iters",
    "global_batch_size",
    "reset_position_ids",
    "reset_attention_mask",
    "eod_mask_loss",
)
"""What --tasks refuses of these."""
LONGEST = TrainingConfig().seq_length
"""Tokens of a sample, unless the model has fewer positions or --seq-length says otherwise."""


def evaluate(parsed: Parsed) -> None:
    """Print loss and perplexity of --load or --init-from-hf, or its results in --tasks."""
    from megatron_llama.train.commands.common.trained import open_folder
    from megatron_llama.train.setup.checks.model import require_language_model

    options = parsed.get(EvaluateConfig)
    run = _run_of(parsed, options)
    data = run.get(DataConfig)
    _refuse_data(run, options)
    weights = run.get(CheckpointConfig)
    model = run.get(ModelConfig)
    tokens = 0
    if data.tokenizer_model is not None and not model.vocab_size:
        from megatron_llama.data.tokenizer.load import load_tokenizer

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
    if options.tasks:
        _run_tasks(run, options, source, positions)
        return
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
    """Raise ConfigError unless exactly one of --tasks, --text and --data-path says what to measure
    on, without options of the others."""
    if options.tasks:
        _refuse_given(run, UNUSED_BY_TASKS, "with --tasks")
        _require_tasks(options)
        return
    _refuse_given(run, ("num_fewshot", "limit", "output"), "without --tasks")
    if options.text:
        _refuse_given(run, ("data_path", "split"), "with --text")
    elif not run.get(DataConfig).data_path:
        do = "give --data-path PREFIX of a dataset, --text FILE, or --tasks NAME"
        raise ConfigError(
            describe("--data-path, --text", got="neither", expected="one of them", do=do)
        )


def _refuse_given(run: Parsed, names: tuple[str, ...], where: str) -> None:
    """Raise ConfigError if any of these options is given."""
    given = [flag(name) for name in names if name in run.explicit]
    if given:
        raise ConfigError(
            describe(
                ", ".join(given),
                got=f"given {where}",
                expected="one or the other",
                do="leave one out",
            )
        )


@contextmanager
def _tokens_of(
    text: tuple[str, ...], data: DataConfig, source: ModelReader
) -> Iterator[tuple[Path, int]]:
    """Make a dataset of the text in a temporary folder, with the tokenizer that is given or lies
    with the weights; give its prefix and its number of tokens."""
    from megatron_llama.checkpoint.storage_paths import local_copy
    from megatron_llama.data.preprocess import preprocess
    from megatron_llama.data.preprocess_config import PreprocessConfig
    from megatron_llama.data.tokenizer.load import load_tokenizer
    from megatron_llama.train.api.common.trained import tokenizer_folder

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
    from megatron_llama.launch.join import this_place
    from megatron_llama.train.api.train import set_up

    with set_up(run, this_place()) as (draft, mesh):
        from megatron_llama.train.run.forward import evaluate_only
        from megatron_llama.train.setup.inputs import stream_samples

        config = draft.config
        if config.training.eval_interval == 0:  # `check` switched it off
            expected = "a share of documents for validation"
            do = "give --split 0,100,0 to evaluate on all of them"
            raise ConfigError(describe("--split", got=config.data.split, expected=expected, do=do))
        source = partial(
            stream_samples,
            eod=draft.vocabulary.eod,
            keep_tail=options.eval_iters is None,
            tokenizer=draft.vocabulary.tokenizer,
            share=(mesh.world.rank, mesh.world.size),
        )
        evaluate_only(config, mesh, draft.start, source)


def _run_tasks(run: Parsed, options: EvaluateConfig, source: ModelReader, positions: int) -> None:
    """Open the tokenizer, and print the results of --tasks. ``positions``: those of the model."""
    from megatron_llama.checkpoint.storage_paths import local_copy
    from megatron_llama.data.tokenizer.hf import as_hf_tokenizer
    from megatron_llama.data.tokenizer.load import load_tokenizer
    from megatron_llama.train.api.common.trained import tokenizer_folder
    from megatron_llama.train.setup.checks.parallel import sequence_unit

    unit = sequence_unit(run.get(ParallelConfig))
    length = options.seq_length or max(1, positions // unit) * unit
    training = replace(run.get(TrainingConfig), seq_length=length, eval_interval=0, eval_iters=0)
    data = run.get(DataConfig)
    with local_copy(tokenizer_folder(source)) as own:
        tokenizer = load_tokenizer(data.tokenizer_model or own, data.tokenizer_type)
        reader = as_hf_tokenizer(tokenizer)
    _measure_tasks(_with(run, training), options, reader)


def _require_tasks(options: EvaluateConfig) -> None:
    """Raise ConfigError for what lm-evaluation-harness would not understand, or if it is not
    installed."""
    problems = []
    if find_spec("lm_eval") is None:
        do = "pip install '.[lm-eval]' in the clone"
        problems.append(
            describe("--tasks", got="no package lm_eval", expected="it installed", do=do)
        )
    if options.num_fewshot is not None and options.num_fewshot < 0:
        expected = "0 or more"
        got = options.num_fewshot
        problems.append(describe("--num-fewshot", got=got, expected=expected, do="correct it"))
    limit = options.limit
    if limit < 0 or (limit >= 1 and limit != int(limit)):
        expected = "a number of questions, or a share of them below 1"
        problems.append(describe("--limit", got=f"{limit:g}", expected=expected, do="correct it"))
    if options.output is not None and Path(options.output).is_dir():
        do = "give the name of a file"
        problems.append(
            describe("--output", got=f"the folder {options.output}", expected="a JSON file", do=do)
        )
    if problems:
        raise ConfigError(
            problems[0]
            if len(problems) == 1
            else listing("These options cannot be used:", problems)
        )


def _measure_tasks(run: Parsed, options: EvaluateConfig, tokenizer: HFTokenizer) -> None:
    """Join the other processes, and print the results of --tasks."""
    from megatron_llama.launch.join import this_place
    from megatron_llama.train.api.train import set_up

    with set_up(run, this_place(), needs_data=False) as (draft, mesh):
        from megatron_llama.checkpoint.failures import writing
        from megatron_llama.engine.comm.object_collectives import on_rank0
        from megatron_llama.files import replace_file
        from megatron_llama.train.run.forward import forward_runtime
        from megatron_llama.train.setup.scoring import Ask, Scorer, serve

        config = draft.config
        runtime, state = forward_runtime(config, mesh, draft.start)
        loaded = config.checkpoint.load or config.checkpoint.init_from_hf
        info = {"model": loaded, "iteration": state.iteration, "processes": mesh.world.size}

        def program(ask: Ask) -> Report:
            # Imported by rank 0 alone: it takes seconds.
            from megatron_llama.train.commands.common.harness import TaskOptions, report

            return report(
                ask,
                TaskOptions(options.tasks, options.num_fewshot, options.limit),
                tokenizer,
                longest=config.training.seq_length,
                vocab_size=config.model.vocab_size,
                info=info,
            )

        found = serve(program, Scorer(config, mesh, runtime), mesh)

        def show() -> None:
            assert found is not None
            # First what cannot fail: the results may have taken hours.
            print(found.text, flush=True)
            if options.output is not None:
                path = Path(options.output)
                with writing(path):
                    replace_file(path, found.json)

        on_rank0(show, mesh.world)
