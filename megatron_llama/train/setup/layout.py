"""``--auto-parallel``: its options, whether a layout is to be chosen, and the choice."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_llama.config.parse import Parsed, flag
from megatron_llama.config.schema import Config
from megatron_llama.errors import ConfigError, describe
from megatron_llama.option import left_out, section


@section(changes="messages", small=left_out("a layout is given"))
@dataclass(frozen=True)
class AutoParallelConfig:
    """Let the planner choose the layout; with --dry-run it is only printed."""

    auto_parallel: bool = False
    """Take the fastest layout that is planned to fit: tp, pp with its schedule and virtual stages,
    cp, ep, data-parallel sharding, micro-batch, recomputation. Given values of these stay. Needs
    --global-batch-size."""
    gpu: str | None = None
    """The kind to plan for, as with `plan`. Default: what this machine has."""
    nic_gbit: float = 0.0
    """Gbit/s between nodes for each GPU. 0: what machines with this GPU usually have."""
    coefficients: str | None = None
    """A file of `plan calibrate`: plan with the rates that were measured instead of those that are
    shipped."""


@dataclass(frozen=True)
class Choice:
    """A configuration with its layout."""

    config: Config
    notes: tuple[str, ...]
    """The choices and their reasons, one line each."""


def is_layout_open(parsed: Parsed) -> bool:
    """Whether the layout is to be chosen. Raises ConfigError for options of the choice, if it is
    not."""
    options = parsed.instances.get(AutoParallelConfig, AutoParallelConfig())
    without = [
        flag(name) for name in ("gpu", "nic_gbit", "coefficients") if name in parsed.explicit
    ]
    if not options.auto_parallel and without:
        do = "give --auto-parallel too, or leave them out"
        raise ConfigError(
            describe(
                " ".join(without), got="no --auto-parallel", expected="a layout to choose", do=do
            )
        )
    return bool(options.auto_parallel)
