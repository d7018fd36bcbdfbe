"""Installed packages, and those that are missing for a feature."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from types import MappingProxyType

from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.flash3 import flash3_problem
from megatron_llama.metrics.versions import package_version, versions
from megatron_llama.train.commands.env import apex_found
from megatron_llama.train.doctor.findings import Finding

DISTRIBUTION = "megatron-llama"
FEATURES: Mapping[str, str] = MappingProxyType(
    {
        "hf": "loading an export in HuggingFace Transformers",
        "hub": "folders of the hub by their names",
        "fsspec": "checkpoints and text in object stores",
        "tensorboard": "--tensorboard-dir",
        "wandb": "--wandb-project",
        "mlflow": "--mlflow-experiment",
        "trackio": "--trackio-project",
        "lm-eval": "evaluate --tasks",
        "tiktoken": "encoding with LLaMA 3's tokenizer.model at full speed",
        "zstd": "text in .zst files",
        "parquet": "text in .parquet files",
    }
)
"""The features of the package's extras."""
_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)\s*(?:>=\s*(?P<least>[0-9.]+))?")


def packages() -> Iterator[Finding]:
    """Yield the versions of a run's packages."""
    for name, version in versions().items():
        if name != "transformers":  # it is a feature
            yield Finding.unless(
                version != "not installed",
                name,
                version,
                expected=f"{name}, without which nothing trains",
                do="install the package with its dependencies (docs/guide/01-install.md)",
            )


def features() -> Iterator[Finding]:
    """Yield each feature that takes more packages, and those that are missing for it. A missing
    package is no problem: a user who wants the feature installs it."""
    for extra, purpose in FEATURES.items():
        states = [_state(requirement) for requirement in _requirements(extra)]
        yield Finding(extra, f"{', '.join(states) or 'unknown here'} ({purpose})")
    yield Finding("apex", apex_found())
    problem = flash3_problem(devices.accelerator(0))
    yield Finding("fa3", f"{problem or 'can run'} (--attention-backend fa3)")


def _requirements(extra: str) -> list[str]:
    """Return the packages of an extra by this package's metadata; none if only a folder of its
    source is here."""
    try:
        stated = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return []
    marked = [line.partition(";") for line in stated]
    return [
        name.strip()
        for name, _, marker in marked
        if re.search(rf"extra == ['\"]{extra}['\"]", marker)
    ]


def _state(requirement: str) -> str:
    """Return the installed version, or how to install a package that is missing or too old."""
    parts = _REQUIREMENT.match(requirement)
    assert parts is not None, requirement
    name, least = parts["name"], parts["least"] or ""
    version = package_version(name)
    if version == "not installed":
        return f"missing: pip install {requirement!r}"
    if _numbers(version) < _numbers(least):
        return f"{name} {version} is too old: pip install {requirement!r}"
    return f"{name} {version}"


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version, for comparisons: (1, 10) for 1.10rc1."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()
