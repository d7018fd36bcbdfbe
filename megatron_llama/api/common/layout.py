"""``--auto-parallel``: whether the layout of a run is to be chosen, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_llama.api.common.configs import AutoParallelConfig
from megatron_llama.config.parse import Parsed, flag
from megatron_llama.config.schema import Config
from megatron_llama.errors import ConfigError, describe


@dataclass(frozen=True)
class Choice:
    """A configuration with its layout."""

    config: Config
    notes: tuple[str, ...]
    """What was chosen and why, one line each."""


def wanted(parsed: Parsed) -> bool:
    """Return whether the layout is to be chosen. Raises ConfigError for options that say how to
    choose it, if it is not."""
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
