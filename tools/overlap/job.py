"""What the parent tells every rank, and what ranks measured."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Job:
    """One run."""

    hosts: int
    rate: str
    rounds: int
    names: tuple[str, ...]
    conditions: tuple[str, ...]
    """In words, for the title."""
    json: str | None
    against: str | None = None
    """The other checkout, absolute."""
    experts: int = 0
    """Experts of a block; 0: it has an MLP."""

    def dump(self) -> str:
        """As one command-line argument."""
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> Job:
        """The inverse of ``dump``."""
        fields = json.loads(text)
        return Job(
            **{**fields, "names": tuple(fields["names"]), "conditions": tuple(fields["conditions"])}
        )


@dataclass(frozen=True)
class Sample:
    """One contender in one round, for each step of it."""

    seconds: float
    """Of the slowest rank."""
    nic_bytes: float
    """Sent by a rank, headers included as far as the kernel shows them; mean over ranks."""
    payload_bytes: float | None
    """Of parameters and gradients, where the contender records them."""
    cpu_seconds: float
    """Of a rank; mean over ranks."""
    loss: float
    """Of the last step; mean over ranks."""
    growth: float = 0.0
    """Bytes in use after the last step of the round, beyond those after its second, on the rank
    where that is most."""
    peak_growth: float = 0.0
    """How far the resident memory of a later step exceeds the highest of the first two, in
    bytes, on the rank where that is most."""


UNITS = MappingProxyType({"kbit": 1e3, "mbit": 1e6, "gbit": 1e9})


def bits_per_second(rate: str) -> float:
    """Of a rate as ``tc`` writes it: 400mbit. Raises ValueError."""
    number = rate[:-4]
    unit = rate[-4:]
    if unit in UNITS and number.isdecimal() and int(number):
        return int(number) * UNITS[unit]
    raise ValueError(f"{rate}: expected a number and kbit, mbit or gbit, like 400mbit")
