"""Faults of something small, and a job of the pool that shows one of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

from megatron_llama.config import version
from megatron_llama.launch import launcher


@dataclass(frozen=True)
class Few:
    """A fault of a name."""

    name: str
    patch: Callable[[], AbstractContextManager[object]]


def _says(owner: Any, function: str, said: str) -> Few:
    return Few(f"{function} says {said}", partial(patch.object, owner, function, lambda *args: said))


CATALOGUE = (
    _says(launcher, "first_host", "nowhere"),
    _says(launcher, "job_name", "nobody's"),
    _says(version, "version", "never"),
    _says(launcher, "tell_torchrun", "nothing"),
)
AGAIN = (*CATALOGUE, Few("first_host backwards", partial(patch.object, launcher, "first_host", lambda hosts: hosts[::-1])))
"""With one that replaces what another replaces."""


def name_of(place: Any) -> str:
    """A job of the pool."""
    return launcher.job_name()
