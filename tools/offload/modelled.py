"""A device, a bus and a host's memory of given speed, as timed waits: everything else is real.

What is really done counts as part of the time it is given, so only what takes longer than that
shows. A wait that ends a little late is made up for by the next one.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

from torch import Tensor, nn

from megatron_llama.engine.offload.copies import HostCopies
from megatron_llama.engine.offload.exact import COPYING_STATE, UPDATING
from megatron_llama.engine.offload.worker import HostWorker
from megatron_llama.engine.offload.zenflow.rule import ACCUMULATING, APPLYING, PACKING
from tools.overlap.waits import Clock, Ready, install

TRAFFIC: Mapping[str, float] = MappingProxyType(
    {
        UPDATING: 1.0,
        COPYING_STATE: 24 / 30,
        ACCUMULATING: 12 / 30,
        APPLYING: 42 / 30,
        PACKING: 8 / 30,
    }
)
"""Bytes that the host moves for an element, over the 30 of an update: of ZenFlow with fp32 on the
bus, a gradient and a sum are read to be added up, and one sum written; to be applied it is spread
over the whole shard."""
MOST_LATE_SECONDS = 2e-3
"""Beyond that a wait that ended late is not made up for: something else had the processor."""
Note = Callable[[str], None]


@dataclass(frozen=True)
class Speeds:
    """Seconds for the whole model."""

    compute: float
    """Of one microbatch on the device: a third forward, two thirds backward."""
    update: float
    """Of all elements on the host."""
    copy: float
    """Of four bytes of every element, in one direction."""
    elements: int


class Waits:
    """The time that one thread owes."""

    def __init__(self) -> None:
        self._late = 0.0

    def until(self, end: float) -> None:
        """Sleep until then (``time.perf_counter``), or earlier by what the last wait was late."""
        end -= self._late
        while (left := end - time.perf_counter()) > 0:
            time.sleep(left)
        self._late = min(time.perf_counter() - end, MOST_LATE_SECONDS)


class DeviceClock(Clock):
    """Counts everything that the thread does as work of the device: the host of a real one runs
    ahead of it."""

    def restart(self) -> None:
        """See Clock."""
        super().restart()
        super().begin()

    def begin(self) -> None:
        """See Clock. It never stopped."""

    def end(self) -> None:
        """See Clock. It goes on."""

    def wait_forward(self) -> None:
        """See Clock."""
        super().end()
        super().wait_forward()
        super().begin()

    def wait_backward(self) -> None:
        """See Clock."""
        super().end()
        super().wait_backward()
        super().begin()


class ModelledCopies(HostCopies):
    """A bus."""

    def __init__(self, speeds: Speeds, note: Note) -> None:
        self._per_byte = speeds.copy / speeds.elements / 4
        self._note = note
        self._waits: defaultdict[str, Waits] = defaultdict(Waits)
        self.names: dict[int, str] = {}
        """Of tensors on the device, by address. Each direction has a thread of its name."""
        super().__init__()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """See HostCopies."""
        end = time.perf_counter() + target.nbytes * self._per_byte
        way = threading.current_thread().name
        name = self.names.get(target.data_ptr()) or self.names.get(source.data_ptr(), "others")
        target.copy_(source)
        self._waits[way].until(end)
        self._note(f"{way} {name}")


class ModelledWorker(HostWorker):
    """A host whose memory moves so many bytes in a second."""

    def __init__(
        self, cores: Sequence[int] = (), threads: int = 0, *, speeds: Speeds, note: Note
    ) -> None:
        self._per_element = speeds.update / speeds.elements
        self._note = note
        self._waits = Waits()
        super().__init__(cores, threads)

    @contextmanager
    def working(self, what: str, elements: int) -> Iterator[None]:
        """See HostWorker."""
        end = time.perf_counter() + TRAFFIC[what] * elements * self._per_element
        with super().working(what, elements):
            yield
            self._waits.until(end)
        self._note(what)


def compute(stage: nn.Module, speeds: Speeds, ready: Ready, note: Note) -> Clock:
    """Make the blocks of a stage take their time, and note when each begins its forward and its
    backward pass."""
    layers = cast(nn.ModuleDict, stage.get_submodule("model.layers"))
    clock = DeviceClock()
    clock.forward_seconds = speeds.compute / (6 * len(layers))

    def begins(names: Sequence[str]) -> None:
        ready(names)
        note(f"backward {names[0]}")

    install([(f"model.layers.{name}", block) for name, block in layers.items()], clock, begins)
    for name, block in layers.items():
        for part in ("input_layernorm", "post_attention_layernorm"):
            _note_forward(block.get_submodule(part), f"forward model.layers.{name}.{part}", note)
    return clock


def _note_forward(module: nn.Module, text: str, note: Note) -> None:
    def begins(_: nn.Module, inputs: object, output: object) -> None:
        note(text)

    module.register_forward_hook(begins)
