"""Proves a case: runs it and everything that it is compared with, and says what differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_llama.prove.case import Case
from megatron_llama.prove.compare import Row
from megatron_llama.prove.locate import Location

CHECKS = ("one process", "transformers", "precision", "resume", "reshard", "export", "data")
"""In the order in which they run."""


@dataclass(frozen=True)
class CheckResult:
    """What a check has found."""

    name: str
    """One of CHECKS."""
    rows: tuple[Row, ...]
    """Everything that was compared; nothing where it did not run."""
    seconds: float
    not_run: str = ""
    """Why it did not run; empty where it did."""
    partly: str = ""
    """What of it was not compared, and why."""

    @property
    def holds(self) -> bool:
        """Whether every row is within its bound. True for a check that did not run."""
        return all(row.holds for row in self.rows)

    @property
    def worst(self) -> Mapping[str, Row]:
        """By kind of row, the one that is furthest towards its bound, or beyond."""
        found: dict[str, Row] = {}
        for row in self.rows:
            if row.what not in found or used(row) > used(found[row.what]):
                found[row.what] = row
        return found


def used(row: Row) -> float:
    """The share of its bound that a row has used: above 1 where it does not hold."""
    if row.holds:
        return row.got / row.bound if row.bound else 0.0
    return row.got / row.bound if row.bound and row.got > row.bound else float("inf")


@dataclass(frozen=True)
class Proof:
    """What was found about a case."""

    case: Case
    checks: tuple[CheckResult, ...]
    """All of CHECKS, in their order."""
    location: Location | None
    """Where the first check that does not hold is wrong; None if all hold."""
    seconds: float

    @property
    def rows(self) -> tuple[Row, ...]:
        """Those of all checks."""
        return tuple(row for check in self.checks for row in check.rows)

    @property
    def holds(self) -> bool:
        """Whether every check that ran holds."""
        return all(check.holds for check in self.checks)
