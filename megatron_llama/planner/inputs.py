"""The meaning of the options of ``plan`` for all its actions: the run without searched options,
the machine, one layout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

from megatron_llama.config.parse import Parsed
from megatron_llama.config.schema import Config, LaunchConfig, ParallelConfig, TrainingConfig
from megatron_llama.engine.offload_options import MODES
from megatron_llama.errors import ConfigError, describe, listing
from megatron_llama.model.plan.fp8 import BLOCKWISE, TENSORWISE
from megatron_llama.model.presets import LLAMA_VOCABULARY
from megatron_llama.planner.calibration import Calibration, calibration_of
from megatron_llama.planner.candidate import Candidate
from megatron_llama.planner.choice import searchable
from megatron_llama.planner.coefficients import Coefficients
from megatron_llama.planner.configs import PlanConfig
from megatron_llama.planner.hardware import GBIT, Gpu
from megatron_llama.planner.search import with_ends
from megatron_llama.planner.training_job import Machine
from megatron_llama.train.setup.checks.ranges import refuse_values
from megatron_llama.train.setup.resolve import assemble, problems, resolve

NUMBERS: Mapping[str, str] = MappingProxyType(
    {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size",
        "v": "virtual_pipeline_model_parallel_size",
    }
)
"""Prefixes of numbers in a layout's name (``tp4/pp2``), and their options."""
CHOICES = (
    "pipeline_schedule",
    "cp_comm_type",
    "moe_token_dispatcher_type",
    "data_parallel_sharding_strategy",
    "recompute_granularity",
)
"""Options whose values are parts of that name without a prefix."""
TOKENS_A_STEP = 4 * 2**20
"""Tokens of a step if no batch is given, as in the pretraining of LLaMA 2."""
MODEL_HINT = "give --model llama2-70b or the model's fields"


def with_cluster(parsed: Parsed) -> Parsed:
    """Return the options with the GPUs of the ``launch:`` block, unless --gpus is given."""
    options = parsed.get(PlanConfig)
    launch = parsed.get(LaunchConfig)
    if options.gpus or not launch.nodes * launch.gpus_per_node:
        return parsed
    options = replace(options, gpus=launch.nodes * launch.gpus_per_node)
    return replace(parsed, instances={**parsed.instances, PlanConfig: options})


def assumed(parsed: Parsed, config: Config) -> str | None:
    """Return words with the options that a plan assumes because they were not given; None if all
    were given."""
    training = config.training
    given = parsed.explicit
    taken = []
    if not given & {"gpu", "coefficients"}:
        taken.append(f"--gpu {parsed.get(PlanConfig).gpu}")
    if "seq_length" not in given:
        taken.append(f"--seq-length {training.seq_length}")
    if parsed.get(TrainingConfig).global_batch_size <= 0:
        tokens = training.global_batch_size * training.seq_length
        taken.append(f"--global-batch-size {training.global_batch_size} ({tokens:,} tokens a step)")
    return f"not given, so planned with {', '.join(taken)}" if taken else None


def config_of(parsed: Parsed) -> Config:
    """Return the run without searched options. It is in bfloat16 unless another precision was given
    or measured, with LLaMA's vocabulary and a usual batch if none is given. Raises ConfigError."""
    options = parsed.get(PlanConfig)
    refuse_values(options)
    config = assemble(parsed)
    model = config.model
    training = config.training
    if training.global_batch_size <= 0 < options.gpus:
        # Any number of data-parallel ranks divides a batch that is a multiple of the GPUs.
        samples = max(1, TOKENS_A_STEP // max(1, training.seq_length))
        batch = -(-samples // options.gpus) * options.gpus
        config = replace(config, training=replace(training, global_batch_size=batch))
    needs = (
        ("--model", model.num_hidden_layers, "a model", MODEL_HINT),
        ("--gpus", options.gpus, "the number of GPUs", "give --gpus 64"),
    )
    missing = [
        describe(name, got="nothing", expected=expected, do=do)
        for name, given, expected, do in needs
        if given <= 0
    ]
    if missing:
        raise ConfigError(listing("A plan needs more:", missing))
    other_precision = training.fp16 or training.fp64 or calibrated(parsed).precision == "fp32"
    config = with_precision(config, bf16=not other_precision)
    gpu = calibrated(parsed).gpu
    recipe = config.training.fp8
    hopper = "a GPU of the Hopper generation, whose products take a scale for each tile"
    able = {
        "none": (True, ""),
        BLOCKWISE: (gpu.family == "h100", hopper),
        TENSORWISE: (gpu.fp8 > 1.0, "a GPU with products in FP8"),
    }
    is_able, expected = able[recipe]
    if not is_able and options.coefficients is not None:
        expected = "a GPU of the data sheets: plan calibrate measures no products in FP8"
        do = "give --gpu in place of --coefficients, or leave --fp8 out"
        raise ConfigError(
            f"--fp8 {recipe}",
            got=f"--coefficients {options.coefficients}",
            expected=expected,
            do=do,
        )
    if not is_able:
        raise ConfigError(
            f"--fp8 {recipe}", got=f"--gpu {options.gpu}", expected=expected, do="leave --fp8 out"
        )
    alone = replace(config.training, micro_batch_size=1, global_batch_size=1)
    config = searchable(config)
    if refused := problems(replace(config, parallel=ParallelConfig(), training=alone), 1):
        raise ConfigError(listing("This model cannot be trained:", refused))
    return config


def with_precision(config: Config, *, bf16: bool) -> Config:
    """Return the run, in bfloat16 if ``bf16``, with a length and LLaMA's vocabulary if it lacks
    them."""
    training = config.training
    model = config.model
    return replace(
        config,
        model=replace(model, vocab_size=model.vocab_size or LLAMA_VOCABULARY),
        training=replace(
            training, bf16=training.bf16 or bf16, train_iters=training.train_iters or 1
        ),
    )


def calibrated(parsed: Parsed) -> Calibration:
    """Return the GPU and its speed. Raises ConfigError for a GPU that is not known, and for a file
    without coefficients."""
    options = parsed.get(PlanConfig)
    # A file of coefficients names its device, so the default of --gpu is ignored.
    named = options.coefficients is None or "gpu" in parsed.explicit
    return calibration_of(options.gpu if named else None, options.coefficients)


def machine_of(parsed: Parsed) -> Machine:
    """Return the GPUs and their links. Raises ConfigError for an unknown GPU, and if the last node
    is not full."""
    options = parsed.get(PlanConfig)
    gpu = calibrated(parsed).gpu
    node = parsed.get(LaunchConfig).gpus_per_node or gpu.node
    if options.gpus > node and options.gpus % node:
        expected = f"a multiple of {node}, which are in a node"
        do = f"give {-(-options.gpus // node) * node} or --gpus-per-node"
        raise ConfigError("--gpus", got=options.gpus, expected=expected, do=do)
    return machine_with(gpu, options.gpus, node, options.nic_gbit)


def machine_with(gpu: Gpu, gpus: int, node: int, nic_gbit: float) -> Machine:
    """Return a machine of ``gpus`` GPUs with ``node`` in a node. ``nic_gbit`` replaces the usual
    network if it is above 0. NVLink joins a rack if the GPU supports that, else a node."""
    domain = gpu.domain if gpu.domain > gpu.node else node
    return Machine(gpu, gpus, node, domain, nic_gbit * GBIT if nic_gbit > 0 else gpu.nic)


def layout_named(config: Config, machine: Machine, fit: Coefficients, word: str) -> Candidate:
    """Return the layout of a name such as ``tp4/pp4/mbs1/1f1b/optim``. Parts may come in any order;
    omitted parts are as in the options. Raises ConfigError."""
    parallel: dict[str, Any] = {}
    training = config.training
    offload = config.offload
    kinds = get_type_hints(ParallelConfig)
    for part in word.split("/"):
        number = re.fullmatch(r"(tp|pp|cp|dp|ep|v|mbs)(\d+)", part)
        text = part.removeprefix("recompute-")
        mode = part.removeprefix("offload-")
        owner = next((name for name in CHOICES if text in get_args(kinds[name])), None)
        if number and number[1] == "mbs":
            training = replace(training, micro_batch_size=int(number[2]))
        elif number and number[1] in NUMBERS:
            parallel[NUMBERS[number[1]]] = int(number[2])
        elif mode in MODES and mode != part:
            offload = replace(offload, optimizer_offload=mode)  # type: ignore[arg-type]
        elif owner is not None:
            parallel[owner] = text
        elif not number:  # dp follows from the others
            expected = "parts such as tp4, pp4, v5, cp2, mbs1, interleaved, optim, recompute-full"
            do = "take a layout from the table"
            raise ConfigError("--explain", got=part, expected=expected, do=do)
    tp = parallel.get("tensor_model_parallel_size", config.parallel.tensor_model_parallel_size)
    parallel.setdefault("sequence_parallel", tp > 1)
    whole = with_ends(replace(config.parallel, **parallel), config.model.num_hidden_layers)
    chosen = replace(config, parallel=whole, training=training, offload=offload)
    refused = problems(chosen, machine.gpus)
    if refused:
        raise ConfigError(listing(f"--explain {word} cannot run on {machine.gpus} GPUs:", refused))
    return Candidate(resolve(chosen, machine.gpus), machine, fit)
