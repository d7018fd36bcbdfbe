"""The options of ZenFlow: their problems, DeepSpeed's configuration file, and the integers that
follow from them. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from megatron_llama.config.parse import without_repeats
from megatron_llama.config.schema import Config
from megatron_llama.engine.offload_options import ZenFlowConfig
from megatron_llama.engine.plan.zenflow import AUTO, longest_window, steps_of
from megatron_llama.errors import ConfigError, describe, listing

PREFIX = "zenflow_"
BLOCK = "zero_optimization.zenflow"


def zenflow_problems(config: Config) -> Iterator[str]:
    """Yield one line for each pair of options that do not fit each other."""
    options = config.zenflow
    strategy = options.zenflow_select_strategy
    chosen = options.zenflow_select_interval
    if strategy != AUTO and chosen == AUTO:
        do = "give --zenflow-select-interval N, or leave --zenflow-select-strategy out"
        yield describe(
            "--zenflow-select-interval", got=AUTO, expected=f"a number of {strategy}s", do=do
        )
    longest = longest_window(options)
    if strategy == "step" and 0 < steps_of(chosen) < longest:
        do = "columns are selected between windows: select more rarely, or make windows shorter"
        yield describe(
            "--zenflow-select-interval",
            got=chosen,
            expected=f"at least the {longest} steps of a window",
            do=do,
        )


@dataclass(frozen=True)
class _Key:
    """A key of DeepSpeed's ``zenflow`` block. ``read`` converts its value to that of our option,
    and raises ValueError with the expected value."""

    read: Callable[[Any], Any]
    note: str = ""
    """Why it has no effect; empty: it sets the option of its name."""


def _ratio(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a number")
    return float(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("a whole number from 0")
    return value


def _interval(value: Any) -> str:
    if value != AUTO and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError("a whole number from 1, or auto")
    return str(value)


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _strategy(value: Any) -> str:
    if value not in (AUTO, "step", "epoch"):
        raise ValueError("auto, step or epoch")
    return str(value)


KEYS: Mapping[str, _Key] = MappingProxyType(
    {
        "topk_ratio": _Key(_ratio),
        "select_strategy": _Key(_strategy),
        "select_interval": _Key(_interval),
        "update_interval": _Key(_interval),
        "full_warm_up_rounds": _Key(_count),
        "overlap_step": _Key(_switch),
        "auto_ratio": _Key(
            _ratio, "a window of update_interval auto closes when 0.99 of the matrices ask"
        ),
        "offload": _Key(_switch, "moments of hot columns stay on the device"),
        "pt_reserved_cores_perc": _Key(_ratio, "--offload-cores says which processors update"),
    }
)
"""All keys of the block."""
INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "gradient_accumulation_steps": "--global-batch-size",
        "train_batch_size": "--global-batch-size",
        "train_micro_batch_size_per_gpu": "--micro-batch-size",
        "gradient_clipping": "--clip-grad",
        "bf16": "--bf16",
        "fp16": "--fp16",
        "optimizer": "--lr, --weight-decay, --adam-beta1 ...",
        "scheduler": "--lr-decay-style, --lr-warmup-iters ...",
        "zero_optimization.stage": "--data-parallel-sharding-strategy",
        "steps_per_print": "--log-interval",
    }
)
"""Our options for keys of a DeepSpeed configuration outside of the block."""


@dataclass(frozen=True)
class Found:
    """The content of a file of DeepSpeed's."""

    values: Mapping[str, Any]
    """Our options and their values."""
    notes: tuple[str, ...]
    """Keys without effect, each with the reason."""


def read_zenflow(path: str) -> Found:
    """Read DeepSpeed's configuration, or only its zenflow block. Raises ConfigError with every
    problem."""
    where = f"--zenflow-config {path}"
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file, object_pairs_hook=without_repeats)
    except (OSError, ValueError) as error:
        raise ConfigError(
            describe(
                where,
                got=error,
                expected="a JSON file of DeepSpeed's",
                do="check the path and the file",
            )
        ) from error
    if not isinstance(content, dict):
        do = "give DeepSpeed's configuration, or its zenflow block"
        raise ConfigError(describe(where, got=type(content).__name__, expected="an object", do=do))
    around = content.get("zero_optimization")
    block = (
        around.get("zenflow")
        if isinstance(around, dict)
        else content
        if content.keys() & KEYS.keys()
        else None
    )
    if not isinstance(block, dict):
        do = "give DeepSpeed's configuration, or its zenflow block"
        raise ConfigError(
            describe(where, got=f"no {BLOCK}", expected="a block of that name", do=do)
        )
    values, notes, problems = _read_block(where, block)
    if problems:
        raise ConfigError(listing("This file cannot be used:", problems))
    others = (
        []
        if block is content
        else [*_others(content, ""), *_others(around or {}, "zero_optimization.")]
    )
    notes += [f"{where}: {name} is not acted on{_hint(name)}" for name in others]
    return Found(MappingProxyType(values), tuple(notes))


def _read_block(
    where: str, block: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return values, notes and problems."""
    from difflib import get_close_matches

    values: dict[str, Any] = {}
    notes: list[str] = []
    problems: list[str] = []
    for name, given in block.items():
        key = KEYS.get(name)
        if key is None:
            near = get_close_matches(name, KEYS, 1)
            do = f"did you mean {near[0]}?" if near else "leave it out"
            problems.append(
                describe(
                    f"{where} {name}",
                    got="an unknown key",
                    expected=f"one of {', '.join(KEYS)}",
                    do=do,
                )
            )
            continue
        try:
            value = key.read(given)
        except ValueError as error:
            problems.append(
                describe(
                    f"{where} {name}", got=json.dumps(given), expected=error, do="correct the value"
                )
            )
            continue
        if key.note:
            notes.append(f"{where}: {name} is not acted on: {key.note}")
        else:
            values[PREFIX + name] = value
    return values, notes, problems


def _others(content: Mapping[str, Any], prefix: str) -> list[str]:
    """Return the keys outside of the block, without an optimizer that is offloaded to the CPU,
    which the block implies."""
    meant = ("zero_optimization", "zenflow")
    on_host = {"offload_optimizer"} if _device(content.get("offload_optimizer")) == "cpu" else set()
    return [prefix + name for name in content if name not in meant and name not in on_host]


def _device(value: Any) -> Any:
    return value.get("device") if isinstance(value, dict) else None


def _hint(name: str) -> str:
    return f": give {INSTEAD[name]}" if name in INSTEAD else ""


def with_file(config: Config, explicit: frozenset[str]) -> Config:
    """Return the configuration with the values of its --zenflow-config, where no option on the
    command line (``explicit``) sets them. Raises ConfigError."""
    path = config.zenflow.zenflow_config
    assert path is not None, "the caller has asked"
    values = {
        name: value for name, value in read_zenflow(path).values.items() if name not in explicit
    }
    config = replace(config, zenflow=replace(config.zenflow, **values))
    return (
        config
        if "optimizer_offload" in explicit
        else replace(config, offload=replace(config.offload, optimizer_offload="zenflow"))
    )


def zenflow_notes(config: Config) -> Iterator[str]:
    """Yield one line for each key of --zenflow-config without effect."""
    path = config.zenflow.zenflow_config
    assert path is not None, "the caller has asked"
    yield from read_zenflow(path).notes


def zenflow_warnings(config: Config) -> Iterator[str]:
    """Yield one line for each option without effect."""
    if config.offload.optimizer_offload != "zenflow":
        if config.zenflow != ZenFlowConfig():
            mode = config.offload.optimizer_offload
            yield f"--zenflow options have no effect with --optimizer-offload {mode}"
        return
    if config.lora.lora_rank:
        yield (
            "--optimizer-offload zenflow has no effect with --lora-rank: "
            "low-rank additions are updated by AdamW, on the device"
        )
    if config.offload.offload_speculative:
        yield "--offload-speculative has no effect with zenflow: its updates follow the norm"
    if (
        config.zenflow.zenflow_update_interval == "1"
        and config.zenflow.zenflow_overlap_step is False
    ):
        yield (
            "--zenflow-update-interval 1 without --zenflow-overlap-step is AdamW: "
            "--optimizer-offload exact is faster"
        )
