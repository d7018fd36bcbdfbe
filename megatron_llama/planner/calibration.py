"""A device as the planner knows it: its rates and the coefficients that belong to them, shipped or
measured by ``plan calibrate``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron_llama.errors import ConfigError, describe, listing
from megatron_llama.planner.coefficients import Coefficients
from megatron_llama.planner.fitted import FITTED
from megatron_llama.planner.hardware import CPU, Gpu, gpu_named

FORMAT = 1
AGAIN = "measure again with plan calibrate"


@dataclass(frozen=True)
class Calibration:
    """A device, and how fast its kernels and links are relative to its data sheet."""

    gpu: Gpu
    fit: Coefficients
    precision: str = "bf16"
    """The precision of the measurement: bf16 or fp32."""
    notes: tuple[str, ...] = ()
    """What a user should know about the origin of the times."""


HOST = Calibration(
    CPU,
    # Sockets take long to start a message.
    replace(
        FITTED, latency=2e-4, latency_across=5e-4, hop=5e-5, hop_inside=2e-5, launch=3e-4, step=5e-3
    ),
    "fp32",
    (
        "times are those of a process on one core somewhere; "
        "plan calibrate measures this machine: --coefficients FILE",
    ),
)
"""Processes on CPUs that have not been measured."""


def calibration_of(name: str | None, file: str | None) -> Calibration:
    """Return the device called ``name``, or that of a file of ``plan calibrate``. Raises
    ConfigError."""
    if file is not None and name is not None:
        do = "leave one out: the file says which device it is"
        raise ConfigError("--coefficients, --gpu", got="both", expected="one device", do=do)
    if file is not None:
        return read_calibration(Path(file))
    gpu = gpu_named(name or "h100")
    return HOST if gpu == CPU else Calibration(gpu, FITTED)


def as_json(calibration: Calibration) -> dict[str, Any]:
    """Return the content of a file, without the measured points."""
    gpu = calibration.gpu
    fit = calibration.fit
    return {
        "format": FORMAT,
        "precision": calibration.precision,
        "device": {item.name: getattr(gpu, item.name) for item in fields(Gpu)},
        "coefficients": {item.name: getattr(fit, item.name) for item in fields(Coefficients)},
    }


def read_calibration(path: Path) -> Calibration:
    """Return the content of a file of ``plan calibrate``. Raises ConfigError with every problem."""
    where = f"--coefficients {path}"
    expected = "a file of plan calibrate"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(where, got=error, expected=expected, do="check the path") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        got = f"format {content.get('format')}" if isinstance(content, dict) else "something else"
        raise ConfigError(where, got=got, expected=f"{expected}, format {FORMAT}", do=AGAIN)
    wrong = [*_problems(path, content, "device", Gpu)]
    wrong += _problems(path, content, "coefficients", Coefficients)
    precision = str(content.get("precision"))
    if precision not in ("bf16", "fp32"):
        expected = "bf16 or fp32"
        wrong.append(describe(f"{path} precision", got=precision, expected=expected, do=AGAIN))
    if wrong:
        raise ConfigError(listing(f"--coefficients {path} cannot be used:", wrong))
    gpu = Gpu(**content["device"])
    note = f"times are those of {path}, measured on {gpu.source}"
    return Calibration(gpu, Coefficients(**content["coefficients"]), precision, (note,))


def _problems(path: Path, content: dict[str, Any], name: str, kind: type[Any]) -> Iterator[str]:
    """What is missing, unknown or not a positive number in one part of the file."""
    part = content.get(name)
    where = f"{path} {name}"
    if not isinstance(part, dict):
        yield describe(where, got="nothing", expected="numbers by name", do=AGAIN)
        return
    names = {item.name for item in fields(kind)}
    for key in part:
        if key not in names:
            yield describe(where, got=key, expected="a known name", do=AGAIN)
    for key in sorted(names - part.keys()):
        yield describe(where, got=f"no {key}", expected="all numbers", do=AGAIN)
    for key in (key for key in part if key in names):
        value = part[key]
        if key in ("name", "family", "source"):
            right = isinstance(value, str)
            expected = "text"
        else:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            right = number and math.isfinite(value) and value >= 0
            expected = "a number of 0 or more"
        if not right:
            yield describe(f"{where}.{key}", got=value, expected=expected, do=AGAIN)
