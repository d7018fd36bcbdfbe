"""``plan``: which layout is fastest on a cluster that is not here, and ``plan score``: how good such plans are on published runs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

from megatron_llama.commands.options import PlanConfig
from megatron_llama.config import Config, LaunchConfig, ParallelConfig
from megatron_llama.errors import ConfigError, describe, listing
from megatron_llama.layout import AUTO
from megatron_llama.manual import config_sections
from megatron_llama.memory import gib
from megatron_llama.options import Parsed
from megatron_llama.planner.citations import TABLE
from megatron_llama.planner.fitted import FITTED
from megatron_llama.planner.hardware import gpu_named
from megatron_llama.planner.job import Machine
from megatron_llama.planner.judge import lines
from megatron_llama.planner.nearest import Citation, nearest, read_table
from megatron_llama.planner.odds import USABLE
from megatron_llama.planner.own import Planned
from megatron_llama.planner.published import BITS, read_rows
from megatron_llama.planner.report import as_json, command, details, label, losses, table
from megatron_llama.planner.score import score
from megatron_llama.planner.search import enough_gpus, search, with_ends
from megatron_llama.validate import assemble, problems, resolve

SECTIONS = (PlanConfig, *config_sections())
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
PINNED = (*NUMBERS.values(), *WORDS, "sequence_parallel")
"""Options that a search tries, unless they are given."""


def plan(parsed: Parsed) -> None:
    """Search layouts, explain one, or score the planner. Raises ConfigError."""
    options = parsed.get(PlanConfig)
    if options.action == "score":
        _score(options)
        return
    config, machine = _config(parsed), _machine(parsed)
    pinned = {name: _value(config, name) for name in PINNED if name in parsed.explicit and _value(config, name) != AUTO}
    if options.explain is not None:
        best: tuple[Planned, ...] = (_explained(config, machine, options.explain),)
        tried = 1
    else:
        found = search(config, machine, FITTED, top=options.top, pinned=pinned)
        if not found.best:
            assert found.smallest is not None
            raise ConfigError(_does_not_fit(found.smallest, enough_gpus(config, machine, FITTED, pinned)))
        best, tried = found.best, found.tried
    near = _near(best[0])
    print("\n".join(_lines(best, near, tried, explained=options.explain is not None)))
    if options.json is not None:
        _write(options.json, as_json(best, near, tried))


def _score(options: PlanConfig) -> None:
    if options.file is None:
        raise ConfigError(describe("plan score", got="no file", expected="a CSV file of published runs", do="write plan score FILE.csv"))
    figures = score(read_rows(Path(options.file)), FITTED)
    print("\n".join(lines(figures)))
    if options.json is not None:
        _write(options.json, figures)


def _config(parsed: Parsed) -> Config:
    """What is not searched. Planned in bfloat16 unless another precision is asked for, and with LLaMA's vocabulary where none is given."""
    config, options = assemble(parsed), parsed.get(PlanConfig)
    model, training, parallel = config.model, config.training, config.parallel
    missing = [
        describe(name, got="nothing", expected=expected, do=do)
        for name, given, expected, do in (
            ("--model", model.num_hidden_layers, "a model", "give --model llama2-70b or the model's fields"),
            ("--gpus", options.gpus, "the number of GPUs", "give --gpus 64"),
            ("--global-batch-size", training.global_batch_size, "samples in a step", "give --global-batch-size 1024"),
            ("--top", options.top, "1 or more", "leave it out"),
        )
        if given <= 0
    ]
    if missing:
        raise ConfigError(listing("A plan needs more:", missing))
    unplanned = [
        describe(name, got=got, expected="a run without it", do="leave it out: the planner has no times for it")
        for name, got, given in (
            ("--lora-rank", config.lora.lora_rank, config.lora.lora_rank > 0),
            ("--optimizer-offload", config.offload.optimizer_offload, config.offload.optimizer_offload != "none"),
        )
        if given
    ]
    if unplanned:
        raise ConfigError(listing("This cannot be planned:", unplanned))
    training = replace(training, bf16=not (training.fp16 or training.fp64), train_iters=training.train_iters or 1)
    # What would be decided by memory is searched.
    slots, blocks = ("default" if text == AUTO else text for text in (parallel.param_slots, parallel.recompute_num_layers))
    parallel = replace(parallel, param_slots=slots, recompute_num_layers="all" if blocks == "default" else blocks)
    model = replace(model, vocab_size=model.vocab_size or LLAMA_VOCABULARY)
    config = resolve(replace(config, model=model, training=training, parallel=parallel), 1)
    bare = replace(config, parallel=ParallelConfig(), training=replace(training, micro_batch_size=1, global_batch_size=1))
    if found := problems(bare, 1):
        raise ConfigError(listing("This model cannot be trained:", found))
    return config


def _machine(parsed: Parsed) -> Machine:
    options, gpu = parsed.get(PlanConfig), gpu_named(parsed.get(PlanConfig).gpu)
    node = parsed.get(LaunchConfig).gpus_per_node or gpu.node
    if options.gpus > node and options.gpus % node:
        expected, do = f"a multiple of {node}, which are in a node", f"give {-(-options.gpus // node) * node} or --gpus-per-node"
        raise ConfigError(describe("--gpus", got=options.gpus, expected=expected, do=do))
    domain = gpu.domain if gpu.domain > gpu.node else node
    return Machine(gpu, options.gpus, node, domain, options.nic_gbit * BITS if options.nic_gbit > 0 else gpu.nic)


def _value(config: Config, name: str) -> Any:
    return getattr(config.training if name == "micro_batch_size" else config.parallel, name)


def _explained(config: Config, machine: Machine, word: str) -> Planned:
    """The layout of ``tp4/pp4/mbs1/1f1b/optim``: parts in any order, what is left out as in the options."""
    parallel: dict[str, Any] = {}
    training: dict[str, Any] = {}
    kinds = {name: _choices(name) for name in WORDS}
    for part in word.split("/"):
        number = re.fullmatch(r"(tp|pp|cp|dp|v|mbs)(\d+)", part)
        text = part.removeprefix("recompute-")
        if number and number.group(1) in NUMBERS:
            name = NUMBERS[number.group(1)]
            (training if name == "micro_batch_size" else parallel)[name] = int(number.group(2))
        elif not number:
            owner = next((name for name, values in kinds.items() if text in values), None)
            if owner is None:
                expected = "parts such as tp4, pp4, v5, cp2, mbs1, interleaved, optim, recompute-full"
                raise ConfigError(describe("--explain", got=part, expected=expected, do="take a layout from the table"))
            parallel[owner] = text
    tp = parallel.get("tensor_model_parallel_size", config.parallel.tensor_model_parallel_size)
    parallel.setdefault("sequence_parallel", tp > 1)
    whole = with_ends(replace(config.parallel, **parallel), config.model.num_hidden_layers)
    chosen = replace(config, parallel=whole, training=replace(config.training, **training))
    found = problems(chosen, machine.gpus)
    if found:
        raise ConfigError(listing(f"--explain {word} cannot run on {machine.gpus} GPUs:", found))
    return Planned(resolve(chosen, machine.gpus), machine, FITTED)


def _choices(name: str) -> tuple[str, ...]:
    return tuple(get_args(get_type_hints(ParallelConfig)[name]))


def _near(planned: Planned) -> list[Citation]:
    job = planned.job
    numel = (job.block_numel * job.model.num_hidden_layers + job.head.n * job.head.k) * job.tp
    return nearest(read_table(TABLE), known=job.machine.gpu.name, gpus=job.machine.gpus, numel=numel, seq=job.seq)


def _lines(best: tuple[Planned, ...], near: list[Citation], tried: int, *, explained: bool) -> list[str]:
    machine, first = best[0].machine, best[0]
    network = f"{machine.node} in a node, {machine.nic / BITS:.0f} Gbit/s between nodes for each"
    batch = f"{first.config.training.global_batch_size} samples of {first.job.seq} tokens a step"
    title = f"{machine.gpus} x {machine.gpu.name} ({network}), {batch}"
    found = [] if explained else [f"{tried} layouts tried; the fastest that are likelier than not to fit:"]
    reasons = ["", "why the others are slower", *losses(best)] if len(best) > 1 else []
    return [
        *(title, *found, "", *table(best), "", *details(first), *reasons),
        *("", "nearest published runs, of other trainers", *(f"  {citation}" for citation in near)),
        *("", "start it with", f"  {command(first)}"),
    ]


def _does_not_fit(smallest: Planned, enough: Planned | None) -> str:
    """What is missing, and the nearest thing that works: more GPUs."""
    machine, needed = smallest.machine, sum(smallest.fullest.values())
    got = f"{gib(needed)} for each of {machine.gpus} GPUs at least, with {label(smallest)}"
    do = "take GPUs of more memory, or a shorter --seq-length"
    if enough is not None:
        do = f"--gpus {enough.machine.gpus} would do, with {label(enough)}, or {do}"
    return describe("memory", got=got, expected=f"at most {gib(int(USABLE * machine.gpu.memory))} usable of a {machine.gpu.name}", do=do)


def _write(path: str, content: Mapping[str, Any]) -> None:
    try:
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(describe("--json", got=error, expected="a file that can be written", do="check the path")) from None
