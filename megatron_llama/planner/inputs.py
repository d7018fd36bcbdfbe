"""What the options of ``plan`` mean, for all its actions: the run without what is searched, the
machine, one layout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

from megatron_llama.config.limits import LARGEST_RANKS
from megatron_llama.config.parse import Parsed
from megatron_llama.config.schema import Config, LaunchConfig, ParallelConfig, TrainingConfig
from megatron_llama.engine.plan.offload import MODES
from megatron_llama.errors import ConfigError, describe, listing
from megatron_llama.model.presets import LLAMA_VOCABULARY
from megatron_llama.planner.calibration import Calibration, calibration_of
from megatron_llama.planner.candidate import Candidate
from megatron_llama.planner.choice import searchable
from megatron_llama.planner.coefficients import Coefficients
from megatron_llama.planner.configs import PlanConfig
from megatron_llama.planner.hardware import GBIT, Gpu
from megatron_llama.planner.search import with_ends
from megatron_llama.planner.training_job import Machine
from megatron_llama.train.setup.resolve import assemble, problems, resolve

NUMBERS: Mapping[str, str] = MappingProxyType(
    {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "v": "virtual_pipeline_model_parallel_size",
    }
)
"""Numbers in the word for a layout (``tp4/pp2``), and their options."""
CHOICES = ("pipeline_schedule", "data_parallel_sharding_strategy", "recompute_granularity")
"""Options whose values stand in that word by themselves."""
SMALLEST_GBIT = 1e-6
LARGEST_GBIT = 1e6
"""Networks beyond these are none."""
TOKENS_A_STEP = 4 * 2**20
"""Tokens of a step where no batch is given: what LLaMA 2 was pretrained with."""
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
    """Say what a plan takes that nobody gave, as the options that would change it, or return
    None if everything was given."""
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
    """Return the run without what is searched: in bfloat16 unless another precision is asked for or
    was measured, with LLaMA's vocabulary and a usual batch if none is given. Raises ConfigError."""
    config = assemble(parsed)
    options = parsed.get(PlanConfig)
    model = config.model
    training = config.training
    if training.global_batch_size <= 0 < options.gpus:
        # Of a multiple of the GPUs every number of data-parallel ranks gets equal shares.
        samples = max(1, TOKENS_A_STEP // max(1, training.seq_length))
        batch = -(-samples // options.gpus) * options.gpus
        config = replace(config, training=replace(training, global_batch_size=batch))
    needs = (
        ("--model", model.num_hidden_layers, "a model", MODEL_HINT),
        ("--gpus", options.gpus, "the number of GPUs", "give --gpus 64"),
        ("--top", options.top, "1 or more", "leave it out"),
    )
    missing = [
        describe(name, got="nothing", expected=expected, do=do)
        for name, given, expected, do in needs
        if given <= 0
    ]
    if missing:
        raise ConfigError(listing("A plan needs more:", missing))
    if options.gpus > LARGEST_RANKS:
        expected = f"at most {LARGEST_RANKS:,}"
        raise ConfigError("--gpus", got=options.gpus, expected=expected, do="give fewer")
    if not 0 <= options.nic_gbit <= LARGEST_GBIT or 0 < options.nic_gbit < SMALLEST_GBIT:
        expected = f"0, or a number from {SMALLEST_GBIT:g} to {LARGEST_GBIT:,.0f}"
        do = "leave it out"
        raise ConfigError("--nic-gbit", got=options.nic_gbit, expected=expected, do=do)
    other = training.fp16 or training.fp64 or calibrated(parsed).precision == "fp32"
    config = with_precision(config, bf16=not other)
    alone = replace(config.training, micro_batch_size=1, global_batch_size=1)
    config = searchable(config)
    if found := problems(replace(config, parallel=ParallelConfig(), training=alone), 1):
        raise ConfigError(listing("This model cannot be trained:", found))
    return config


def with_precision(config: Config, *, bf16: bool) -> Config:
    """Return the run in bfloat16 if ``bf16``, with a length and LLaMA's vocabulary if it has
    none."""
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
    """Return the kind of GPU and how fast it is. Raises ConfigError for a GPU that is not known,
    and for a file that has no coefficients."""
    options = parsed.get(PlanConfig)
    # The default of --gpu counts for nothing where a file says which device it is.
    named = options.coefficients is None or "gpu" in parsed.explicit
    return calibration_of(options.gpu if named else None, options.coefficients)


def machine_of(parsed: Parsed) -> Machine:
    """Return the GPUs and their links. Raises ConfigError for a GPU that is not known, and for
    nodes that are not full."""
    options = parsed.get(PlanConfig)
    gpu = calibrated(parsed).gpu
    node = parsed.get(LaunchConfig).gpus_per_node or gpu.node
    if options.gpus > node and options.gpus % node:
        expected = f"a multiple of {node}, which are in a node"
        do = f"give {-(-options.gpus // node) * node} or --gpus-per-node"
        raise ConfigError("--gpus", got=options.gpus, expected=expected, do=do)
    return machine_with(gpu, options.gpus, node, options.nic_gbit)


def machine_with(gpu: Gpu, gpus: int, node: int, nic_gbit: float) -> Machine:
    """Return ``gpus`` GPUs, ``node`` of them in a node. ``nic_gbit`` replaces the usual network if
    it is above 0. NVLink joins a rack where the GPU has that, else a node."""
    domain = gpu.domain if gpu.domain > gpu.node else node
    return Machine(gpu, gpus, node, domain, nic_gbit * GBIT if nic_gbit > 0 else gpu.nic)


def layout_named(config: Config, machine: Machine, fit: Coefficients, word: str) -> Candidate:
    """Return the layout of a word such as ``tp4/pp4/mbs1/1f1b/optim``: parts in any order, and what
    is left out as in the options. Raises ConfigError."""
    parallel: dict[str, Any] = {}
    training = config.training
    offload = config.offload
    kinds = get_type_hints(ParallelConfig)
    for part in word.split("/"):
        number = re.fullmatch(r"(tp|pp|cp|dp|v|mbs)(\d+)", part)
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
    found = problems(chosen, machine.gpus)
    if found:
        raise ConfigError(listing(f"--explain {word} cannot run on {machine.gpus} GPUs:", found))
    return Candidate(resolve(chosen, machine.gpus), machine, fit)
