"""Versions of a run's packages, for bug reports and for the page of a run."""

from __future__ import annotations

import sys
from importlib import metadata

PACKAGES = ("numpy", "safetensors", "sentencepiece", "tokenizers", "pyyaml", "tqdm", "transformers")


def package_version(name: str) -> str:
    """Return the version of an installed package, or ``not installed``."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def versions() -> dict[str, str]:
    """Return the versions of this package, Python, torch and the packages that are used."""
    import torch

    from megatron_llama import __version__

    return {
        "megatron_llama": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        **{name: package_version(name) for name in PACKAGES},
    }
