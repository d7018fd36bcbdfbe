"""The options of ``prove``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ProveConfig:
    """The proof: its processes on this machine, its time, and the runs or logs to compare."""

    world_size: int = 0
    """Processes of the run. 0: the `launch:` block of the YAML, else two data-parallel ranks."""
    ranks: int = 8
    """Most processes here. Axes that do not fit into them together are shown in turn."""
    budget: str = "3m"
    """About how long it may take: `90s`, `3m`, `1h`. Checks for which no time is left are listed as
    not run."""
    output: str | None = None
    """Folder for `prove.json`, and for `prove.html` of a configuration. Default: only print the
    results."""
    fuzz: int = 0
    """Instead of a configuration: draw this many over all options from --seed, and prove each. One
    that fails is made small, and the command that runs it alone is printed."""
    steps_from: tuple[str, ...] = ()
    """Instead of a configuration that shrinks: a finished run's log, `LOG` or `LOG OTHER`
    (`log.jsonl`, Megatron-LM's or torchtitan's text, TensorBoard events), against another log, or
    without one against the first steps of the configuration on one process. Says from which step on
    they differ by more than rounding."""
    log_dtype: Literal["fp32", "tf32", "fp16", "bf16"] | None = None
    """Type of the matrix products of the runs whose logs are compared, or the coarser one of two
    types. Default: that of the configuration, else bf16."""
