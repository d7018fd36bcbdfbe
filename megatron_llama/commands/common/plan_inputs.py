"""What the options of ``plan`` say, for all its actions: the run without what is searched, the
machine, what is given, one layout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

from megatron_llama.commands.common.configs import PlanConfig
from megatron_llama.config.parse import Parsed
from megatron_llama.config.schema import Config, LaunchConfig, ParallelConfig
from megatron_llama.errors import ConfigError, describe, listing
from megatron_llama.planner.calibration import Calibration, calibration_of
from megatron_llama.planner.candidate import Planned
from megatron_llama.planner.choice import searchable
from megatron_llama.planner.coefficients import Coefficients
from megatron_llama.planner.job import Machine
from megatron_llama.planner.published import BITS
from megatron_llama.planner.search import with_ends
from megatron_llama.plans.offload import MODES
from megatron_llama.plans.resolve import assemble, problems, resolve

NUMBERS: Mapping[str, str] = MappingProxyType(
    {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "v": "virtual_pipeline_model_parallel_size",
        "mbs": "micro_batch_size",
    }
)
"""Numbers of a layout in one word, and their options."""
WORDS = ("pipeline_schedule", "data_parallel_sharding_strategy", "recompute_granularity")
LLAMA_VOCABULARY = 32000


def config_of(parsed: Parsed) -> Config:
    """What is not searched. Planned in bfloat16 unless another precision is asked for or was
    measured, and with LLaMA's vocabulary where none is given."""
    config = assemble(parsed)
    options = parsed.get(PlanConfig)
    model = config.model
    training = config.training
    missing = [
        describe(name, got="nothing", expected=expected, do=do)
        for name, given, expected, do in (
            (
                "--model",
                model.num_hidden_layers,
                "a model",
                "give --model llama2-70b or the model's fields",
            ),
            ("--gpus", options.gpus, "the number of GPUs", "give --gpus 64"),
            (
                "--global-batch-size",
                training.global_batch_size,
                "samples in a step",
                "give --global-batch-size 1024",
            ),
            ("--top", options.top, "1 or more", "leave it out"),
        )
        if given <= 0
    ]
    if missing:
        raise ConfigError(listing("A plan needs more:", missing))
    wide = training.fp16 or training.fp64 or calibrated(parsed).precision == "fp32"
    training = replace(
        training, bf16=training.bf16 or not wide, train_iters=training.train_iters or 1
    )
    model = replace(model, vocab_size=model.vocab_size or LLAMA_VOCABULARY)
    config = searchable(replace(config, model=model, training=training))
    bare = replace(
        config,
        parallel=ParallelConfig(),
        training=replace(training, micro_batch_size=1, global_batch_size=1),
    )
    if found := problems(bare, 1):
        raise ConfigError(listing("This model cannot be trained:", found))
    return config


def calibrated(parsed: Parsed) -> Calibration:
    """The kind of GPU, and how fast it is. Raises ConfigError for one that nobody knows, and for a
    file of coefficients that is none."""
    options = parsed.get(PlanConfig)
    return calibration_of(
        options.gpu if options.coefficients is None or "gpu" in parsed.explicit else None,
        options.coefficients,
    )


def machine_of(parsed: Parsed) -> Machine:
    """The GPUs and their wires. Raises ConfigError for a GPU that nobody knows, and for nodes that
    are not whole."""
    options = parsed.get(PlanConfig)
    gpu = calibrated(parsed).gpu
    node = parsed.get(LaunchConfig).gpus_per_node or gpu.node
    if options.gpus > node and options.gpus % node:
        expected = f"a multiple of {node}, which are in a node"
        do = f"give {-(-options.gpus // node) * node} or --gpus-per-node"
        raise ConfigError(describe("--gpus", got=options.gpus, expected=expected, do=do))
    domain = gpu.domain if gpu.domain > gpu.node else node
    return Machine(
        gpu,
        options.gpus,
        node,
        domain,
        options.nic_gbit * BITS if options.nic_gbit > 0 else gpu.nic,
    )


def layout_named(config: Config, machine: Machine, fit: Coefficients, word: str) -> Planned:
    """The layout of ``tp4/pp4/mbs1/1f1b/optim``: parts in any order, what is left out as in the
    options."""
    parallel: dict[str, Any] = {}
    training: dict[str, Any] = {}
    offload = config.offload
    kinds = {name: _choices(name) for name in WORDS}
    for part in word.split("/"):
        number = re.fullmatch(r"(tp|pp|cp|dp|v|mbs)(\d+)", part)
        text = part.removeprefix("recompute-")
        mode = part.removeprefix("offload-")
        if number and number.group(1) in NUMBERS:
            name = NUMBERS[number.group(1)]
            (training if name == "micro_batch_size" else parallel)[name] = int(number.group(2))
        elif mode in MODES and mode != part:
            offload = replace(offload, optimizer_offload=mode)  # type: ignore[arg-type]
        elif not number:
            owner = next((name for name, values in kinds.items() if text in values), None)
            if owner is None:
                expected = (
                    "parts such as tp4, pp4, v5, cp2, mbs1, interleaved, optim, recompute-full"
                )
                raise ConfigError(
                    describe(
                        "--explain", got=part, expected=expected, do="take a layout from the table"
                    )
                )
            parallel[owner] = text
    tp = parallel.get("tensor_model_parallel_size", config.parallel.tensor_model_parallel_size)
    parallel.setdefault("sequence_parallel", tp > 1)
    whole = with_ends(replace(config.parallel, **parallel), config.model.num_hidden_layers)
    chosen = replace(
        config, parallel=whole, training=replace(config.training, **training), offload=offload
    )
    found = problems(chosen, machine.gpus)
    if found:
        raise ConfigError(listing(f"--explain {word} cannot run on {machine.gpus} GPUs:", found))
    return Planned(resolve(chosen, machine.gpus), machine, fit)


def _choices(name: str) -> tuple[str, ...]:
    return tuple(get_args(get_type_hints(ParallelConfig)[name]))
