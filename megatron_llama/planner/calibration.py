"""The rates and coefficients of a device, shipped or measured by ``plan calibrate``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_llama.config.fields import finite_number, shown
from megatron_llama.config.limits import LARGEST_INTEGER, LARGEST_RANKS, LARGEST_RATE, SMALLEST_RATE
from megatron_llama.config.lines import parse_json, require_regular
from megatron_llama.errors import ConfigError, describe, listing
from megatron_llama.planner.coefficients import Coefficients
from megatron_llama.planner.fitted import FITTED
from megatron_llama.planner.hardware import CPU, Gpu, gpu_named

FORMAT = 1
AGAIN = "measure again with plan calibrate"


@dataclass(frozen=True)
class Calibration:
    """A device, and the speed of its kernels and links relative to its data sheet."""

    gpu: Gpu
    fit: Coefficients
    precision: str = "bf16"
    """Precision of the measurement: bf16 or fp32."""
    notes: tuple[str, ...] = ()
    """Notes for the user on the origin of the times."""


HOST = Calibration(
    CPU,
    # Messages over sockets have a long latency.
    replace(
        FITTED, latency=2e-4, latency_across=5e-4, hop=5e-5, hop_inside=2e-5, launch=3e-4, step=5e-3
    ),
    "fp32",
    (
        "times are those of a process on one core somewhere; "
        "plan calibrate measures this machine: --coefficients FILE",
    ),
)
"""A CPU process on a machine that has not been measured."""


def calibration_of(name: str | None, file: str | None) -> Calibration:
    """Return the device called ``name``, or the device in a file of ``plan calibrate``. Raises
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
        require_regular(path)
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(where, got=error, expected=expected, do="check the path") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        is_object = isinstance(content, dict)
        got = f"format {shown(content.get('format'))}" if is_object else "something else"
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
    """Yield each missing, unknown or unusable value in one section of the file."""
    values = content.get(name)
    where = f"{path} {name}"
    if not isinstance(values, dict):
        yield describe(where, got="nothing", expected="numbers by name", do=AGAIN)
        return
    names = {item.name for item in fields(kind)}
    for key in values:
        if key not in names:
            yield describe(where, got=key, expected="a known name", do=AGAIN)
    for key in sorted(names - values.keys()):
        yield describe(where, got=f"no {key}", expected="all numbers", do=AGAIN)
    for key in (key for key in values if key in names):
        value = values[key]
        number = finite_number(value)
        expected = ""
        if key in ("name", "family", "source"):
            expected = "" if isinstance(value, str) else "text"
        elif kind is Gpu and key in _COUNTS:
            least, most = _COUNTS[key]
            right = type(value) is int and least <= value <= most
            expected = "" if right else f"an integer from {least} to {most:,}"
        elif number is None or not (number == 0 or SMALLEST_RATE <= number <= LARGEST_RATE):
            expected = f"0, or a number from {SMALLEST_RATE:g} to {LARGEST_RATE:g}"
        elif number == 0 and key in _DIVISORS[kind]:
            expected = "a number above 0: times are divided by it"
        if expected:
            yield describe(f"{where}.{key}", got=shown(value), expected=expected, do=AGAIN)


_COUNTS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "node": (1, LARGEST_RANKS),
        "domain": (1, LARGEST_RANKS),
        "memory": (0, LARGEST_INTEGER),
        "host_memory": (0, LARGEST_INTEGER),
    }
)
"""Fields of a device that are integers, with their bounds."""
_RATES = frozenset({"peak", "hbm", "nvlink", "nic", "power"})
_FACTORS = frozenset(
    item.name
    for item in fields(Coefficients)
    if item.name.startswith(("matmul_", "attention_", "fp8", "fp4", "mxfp8", "rowwise"))
    or item.name in ("memory", "nvlink", "nic")
)
_DIVISORS: Mapping[type[Any], frozenset[str]] = MappingProxyType(
    {Gpu: _RATES, Coefficients: _FACTORS - {"matmul_bytes"}}
)
"""Fields by which times are divided."""
