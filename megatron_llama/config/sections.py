"""The sections of a run's options."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

from megatron_llama.config.schema import Config


def config_sections() -> list[type[Any]]:
    """Return the sections of ``Config``, in order."""
    kinds = get_type_hints(Config)
    return [kinds[field.name] for field in fields(Config)]
