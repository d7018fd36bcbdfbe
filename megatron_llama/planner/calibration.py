"""A device as the planner knows it: its rates and the coefficients that go with them, shipped or
measured by ``plan calibrate``."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron_llama.errors import ConfigError, describe, listing
from megatron_llama.planner.coefficients import Coefficients
from megatron_llama.planner.fitted import FITTED
from megatron_llama.planner.hardware import CPU, Gpu, gpu_named

FORMAT = 1


@dataclass(frozen=True)
class Calibration:
    """A device, and how fast its kernels and links are beside its data sheet."""

    gpu: Gpu
    fit: Coefficients
    precision: str = "bf16"
    """In which it was measured: bf16 or fp32."""
    notes: tuple[str, ...] = ()
    """What a user should know of where the times come from."""


HOST = Calibration(
    CPU,
    replace(
        FITTED, latency=2e-4, latency_across=5e-4, hop=5e-5, hop_inside=2e-5, launch=3e-4, step=5e-3
    ),
    "fp32",
    (
        "times are those of a process on one core somewhere; plan calibrate measures this machine: --coefficients FILE",
    ),
)
"""Processes on CPUs that nobody has measured: sockets take long to start a message."""


def calibration_of(name: str | None, file: str | None) -> Calibration:
    """The device called ``name``, or that of a file of ``plan calibrate``. Raises ConfigError."""
    if file is not None and name is not None:
        do = "leave one out: the file says which device it is"
        raise ConfigError(
            describe("--coefficients, --gpu", got="both", expected="one device", do=do)
        )
    if file is not None:
        return read_calibration(Path(file))
    gpu = gpu_named(name or "h100")
    return HOST if gpu == CPU else Calibration(gpu, FITTED)


def as_json(calibration: Calibration) -> dict[str, Any]:
    """The file's content, but for what was measured."""
    gpu = calibration.gpu
    fit = calibration.fit
    return {
        "format": FORMAT,
        "precision": calibration.precision,
        "device": {item.name: getattr(gpu, item.name) for item in fields(Gpu)},
        "coefficients": {item.name: getattr(fit, item.name) for item in fields(Coefficients)},
    }


def read_calibration(path: Path) -> Calibration:
    """Raises ConfigError for a file that is none, with every problem."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            describe(
                f"--coefficients {path}",
                got=error,
                expected="a file of plan calibrate",
                do="check the path",
            )
        ) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        got = f"format {content.get('format')}" if isinstance(content, dict) else "something else"
        do = "measure again with plan calibrate"
        raise ConfigError(
            describe(
                f"--coefficients {path}",
                got=got,
                expected=f"a file of plan calibrate, format {FORMAT}",
                do=do,
            )
        )
    problems = [
        *_problems(path, content, "device", Gpu),
        *_problems(path, content, "coefficients", Coefficients),
    ]
    if content.get("precision") not in ("bf16", "fp32"):
        do = "measure again with plan calibrate"
        problems.append(
            describe(
                f"{path} precision", got=content.get("precision"), expected="bf16 or fp32", do=do
            )
        )
    if problems:
        raise ConfigError(listing(f"--coefficients {path} cannot be used:", problems))
    gpu = Gpu(**content["device"])
    note = f"times are those of {path}, measured on {gpu.source}"
    return Calibration(gpu, Coefficients(**content["coefficients"]), content["precision"], (note,))


def _problems(path: Path, content: dict[str, Any], name: str, kind: type[Any]) -> list[str]:
    """What is missing, unknown or no positive number in one part of the file."""
    part = content.get(name)
    do = "measure again with plan calibrate"
    if not isinstance(part, dict):
        return [describe(f"{path} {name}", got="nothing", expected="numbers by name", do=do)]
    names = {item.name for item in fields(kind)}
    wrong = [
        describe(f"{path} {name}", got=key, expected="a known name", do=do)
        for key in part
        if key not in names
    ]
    wrong += [
        describe(f"{path} {name}", got=f"no {key}", expected="all numbers", do=do)
        for key in sorted(names - part.keys())
    ]
    words = ("name", "family", "source")
    for key, value in part.items():
        number = (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and math.isfinite(value)
            and value >= 0
        )
        if key in names and (isinstance(value, str) if key in words else number) is False:
            wrong.append(
                describe(
                    f"{path} {name}.{key}",
                    got=value,
                    expected="text" if key in words else "a number of 0 or more",
                    do=do,
                )
            )
    return wrong
