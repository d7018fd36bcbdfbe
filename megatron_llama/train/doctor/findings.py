"""The parts of the page of ``doctor``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from megatron_llama.errors import describe

NAME_WIDTH = 18
"""Columns of the names of findings."""


@dataclass(frozen=True)
class Finding:
    """One line of the page, and its problem, if it has one."""

    name: str
    value: str
    expected: str = ""
    """The value that a run needs instead; empty if nothing is wrong."""
    do: str = ""

    @classmethod
    def unless(cls, well: bool, name: str, value: str, *, expected: str, do: str) -> Self:
        """Return a finding that is a problem unless all is well."""
        return cls(name, value) if well else cls(name, value, expected, do)

    @property
    def problem(self) -> str:
        """The usual sentence of an error, or nothing."""
        if not self.expected:
            return ""
        return describe(self.name, got=self.value, expected=self.expected, do=self.do)


@dataclass(frozen=True)
class Section:
    """Findings of one kind."""

    title: str
    findings: Sequence[Finding]


def examined(title: str, examine: Callable[[], Iterable[Finding]]) -> Section:
    """Examine one side of the machine. An error becomes a finding, since the page about a broken
    machine must not fail itself."""
    try:
        return Section(title, tuple(examine()))
    except Exception as error:
        failed = Finding(
            title,
            f"{type(error).__name__}: {error}",
            expected="a machine that says it",
            do="put this page into a bug report",
        )
        return Section(title, (failed,))


def page(sections: Sequence[Section]) -> str:
    """Return the page: the findings of all sections, then the problems."""
    lines: list[str] = []
    for section in sections:
        lines += [section.title]
        lines += [f"  {finding.name:<{NAME_WIDTH}}{finding.value}" for finding in section.findings]
    wrong = problems(sections)
    lines += ["problems", *(f"  - {problem}" for problem in wrong)] if wrong else ["no problems"]
    return "\n".join(lines)


def problems(sections: Sequence[Section]) -> list[str]:
    """Return the problems, in the order of the page."""
    return [item.problem for section in sections for item in section.findings if item.problem]
