"""``evaluate``: loss and perplexity of a model, on an indexed dataset or on text, and its results
in tasks of lm-evaluation-harness."""

from __future__ import annotations

import tempfile
from dataclasses import replace
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
from megatron_llama.train.setup.checks.ranges import value_problems

if TYPE_CHECKING:
    from megatron_llama.engine.mesh import Mesh
    from megatron_llama.train.commands.common.harness import Report
    from megatron_llama.train.setup.draft import Draft

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
        "hierarchical_context_parallel_sizes",
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
"""The options of a run that a measurement uses. Any other option is refused."""
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
"""Those of them that --tasks refuses."""


def evaluate(parsed: Parsed) -> None:
    """Print loss and perplexity of --load or --init-from-hf, or its results in --tasks."""
    from megatron_llama.launch.join import this_place
    from megatron_llama.train.api.train import set_up
    from megatron_llama.train.commands.common.measured import decide_measured, read_measured
    from megatron_llama.train.commands.common.trained import require_one_folder
    from megatron_llama.train.setup.deciders import DERIVED, MODEL

    options = parsed.get(EvaluateConfig)
    run = _run_of(parsed, options)
    _refuse_data(run, options)
    weights = run.get(CheckpointConfig)
    require_one_folder(weights.load, weights.init_from_hf)
    with tempfile.TemporaryDirectory() as folder:
        if options.text:
            # Every process makes its own dataset: the tokens are the same, and machines need not
            # share a disk.
            data = replace(run.get(DataConfig), data_path=(f"{folder}/text",), split="0,100,0")
            run = replace(run, instances={**run.instances, DataConfig: data})
        with set_up(
            run,
            this_place(),
            (read_measured(options),),
            needs_data=not options.tasks,
            configuration=(*MODEL, decide_measured(options), *DERIVED),
        ) as (draft, mesh):
            if options.tasks:
                _measure_tasks(draft, mesh, options)
                return
            from megatron_llama.train.run.forward import evaluate_only

            evaluate_only(draft.config, mesh, draft.start, draft.reading.source)


def _run_of(parsed: Parsed, options: EvaluateConfig) -> Parsed:
    """Return the command line as that of a run that only evaluates once: its other options have
    their defaults."""
    instances: dict[type[Any], Any] = {
        section: completed(section, parsed) for section in pretrain.SECTIONS
    }
    training: TrainingConfig = instances[TrainingConfig]
    instances[TrainingConfig] = replace(
        training,
        # The model's limit on the length of a sample is not known yet.
        seq_length=options.seq_length or TrainingConfig().seq_length,
        train_iters=1,
        eval_interval=0 if options.tasks else 1,
        eval_iters=options.eval_iters or 0,
    )
    return replace(parsed, instances=instances)


def _refuse_data(run: Parsed, options: EvaluateConfig) -> None:
    """Raise ConfigError unless exactly one of --tasks, --text and --data-path is given, without
    options of the others."""
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


def _require_tasks(options: EvaluateConfig) -> None:
    """Raise ConfigError for options that lm-evaluation-harness would not understand, or if it is
    not installed."""
    problems = []
    if find_spec("lm_eval") is None:
        do = "pip install '.[lm-eval]' in the clone"
        problems.append(
            describe("--tasks", got="no package lm_eval", expected="it installed", do=do)
        )
    problems += value_problems(options)
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


def _measure_tasks(draft: Draft, mesh: Mesh, options: EvaluateConfig) -> None:
    """Print the results of --tasks. Collective."""
    from megatron_llama.checkpoint.failures import writing
    from megatron_llama.data.tokenizer.hf import as_hf_tokenizer
    from megatron_llama.engine.comm.object_collectives import on_rank0
    from megatron_llama.files import replace_file
    from megatron_llama.train.run.forward import forward_runtime
    from megatron_llama.train.setup.scoring import Ask, Scorer, serve

    config = draft.config
    tokenizer = draft.reading.tokenizer
    assert tokenizer is not None
    runtime, state = forward_runtime(config, mesh, draft.start)
    loaded = config.checkpoint.load or config.checkpoint.init_from_hf
    info = {"model": loaded, "iteration": state.iteration, "processes": mesh.world.size}

    def program(ask: Ask) -> Report:
        # Only rank 0 imports it, which takes seconds.
        from megatron_llama.train.commands.common.harness import TaskOptions, report

        return report(
            ask,
            TaskOptions(options.tasks, options.num_fewshot, options.limit),
            as_hf_tokenizer(tokenizer),
            longest=config.training.seq_length,
            vocab_size=config.model.vocab_size,
            info=info,
        )

    results = serve(program, Scorer(config, mesh, runtime), mesh)

    def show() -> None:
        assert results is not None
        # The output that cannot fail comes first: the results may have taken hours.
        print(results.text, flush=True)
        if options.output is not None:
            path = Path(options.output)
            with writing(path):
                replace_file(path, results.json)

    on_rank0(show, mesh.world)
