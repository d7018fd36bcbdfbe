"""Another checkout of this project as a contender: its engine, its model, its version of ``ours``.

Both versions live in one process, so that they take turns in the same rounds. The other checkout's
modules are imported in the place of ours and then put aside; its functions keep them alive.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

from torch import Tensor

from megatron_llama.data.loader import Batch
from tools.overlap.contender import Setting

PREFIX = "against:"
"""In front of a mode's name: the same mode of the other checkout."""
PACKAGES = ("megatron_llama", "tools", "overlap")


def _ours(name: str) -> bool:
    return name.partition(".")[0] in PACKAGES


@contextmanager
def _modules_of(checkout: Path) -> Iterator[None]:
    """Inside, imports of this project's packages find those of ``checkout``."""
    kept: dict[str, ModuleType] = {
        name: sys.modules.pop(name) for name in [*sys.modules] if _ours(name)
    }
    path = list(sys.path)
    sys.path.insert(0, str(checkout))
    try:
        yield
    finally:
        sys.path[:] = path
        for name in [name for name in sys.modules if _ours(name)]:
            del sys.modules[name]
        sys.modules.update(kept)


class Against:
    """One mode of another checkout. What it imports later, inside functions, would be ours: it may
    only be such modules as both versions have."""

    def __init__(self, checkout: Path, mode: str, setting: Setting) -> None:
        with _modules_of(checkout):
            catalogue = import_module("tools.overlap.catalogue")
            self._batch = import_module("megatron_llama.data.loader").Batch
            found = Path(str(import_module("megatron_llama").__file__))
            if not found.is_relative_to(checkout):
                raise RuntimeError(f"{checkout}: its package was not imported, but {found}")
            contender = import_module("tools.overlap.ours").Ours
            self._contender = contender(catalogue.mode_named(mode), setting)

    def begin(self) -> None:
        self._contender.begin()

    def step(self, batch: Batch) -> Tensor:
        loss: Tensor = self._contender.step(self._batch(batch.tokens, batch.labels))
        return loss

    def drain(self) -> None:
        self._contender.drain()

    def payload_bytes(self) -> float | None:
        sent: float | None = self._contender.payload_bytes()
        return sent
