"""The part ``hostile``: small inputs that take the machine, lie, or reach elsewhere."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from tools.harm.corrupting import SECONDS, limits
from tools.harm.formats import FORMATS, READ
from tools.harm.hostile_inputs import binaries, fields, places, texts
from tools.harm.hostile_inputs.case import Hostile
from tools.harm.judging import Journal, Result, emptied, judge
from tools.harm.materials import PATIENT, Workshop
from tools.harm.sandbox import Limits, Outcome, run_forked, warm

PART = "hostile"


def all_cases() -> list[Hostile]:
    """Every hostile input, always in the same order."""
    return [case for module in (fields, texts, places, binaries) for case in module.cases()]


def spread(names: list[str], count: int) -> list[int]:
    """Return the numbers of at most ``count`` cases of these formats, from all kinds alike."""
    fitting = [n for n, case in enumerate(all_cases()) if case.format in names]
    if count >= len(fitting):
        return fitting
    return [fitting[i * len(fitting) // count] for i in range(count)]


class Attacker:
    """Reads hostile inputs; each format is read unharmed once before."""

    def __init__(self, shop: Workshop, scratch: Path) -> None:
        self._shop = shop
        self._folder = scratch
        self._cases = all_cases()
        self._pristine: dict[str, Outcome] = {}

    def result(self, number: int) -> Result:
        """The verdict on a case. Raises RuntimeError where the format cannot be read unharmed."""
        case = self._cases[number]
        pristine = self._unharmed(case.format)
        folder = self._prepared(case)
        size = sum(path.lstat().st_size for path in folder.rglob("*"))
        outcome = self._read(case.format, limits(size))
        verdict, details = judge(outcome, pristine, sealed=not case.may_be_taken)
        stolen = self._stolen()
        if stolen:
            verdict, details = "silent", stolen
        seconds = round(outcome.seconds, 3)
        name = case.name.encode("unicode_escape").decode()
        return Result(PART, case.format, number, name, verdict, details, seconds, outcome.bytes)

    def _unharmed(self, name: str) -> Outcome:
        if name not in self._pristine:
            for allowed in (PATIENT, Limits(SECONDS, PATIENT.bytes)):
                folder = emptied(self._folder)
                shutil.copytree(self._shop.make(FORMATS[name].material)[0], folder / READ)
                outcome = self._read(name, allowed)
                warm(outcome)
            if outcome.end != "done":
                raise RuntimeError(f"{name} cannot be read unharmed:\n{outcome.words}")
            self._pristine[name] = outcome
        return self._pristine[name]

    def _prepared(self, case: Hostile) -> Path:
        folder = emptied(self._folder)
        (folder / places.SECRET_FILE).write_text(places.SECRET)
        shutil.copytree(self._shop.make(FORMATS[case.format].material)[0], folder / READ)
        case.change(folder / READ)
        return folder / READ

    def _read(self, name: str, allowed: Limits) -> Outcome:
        return run_forked(lambda: FORMATS[name].read(self._shop), self._folder, allowed)

    def _stolen(self) -> str:
        """What a hostile input has reached, in words; empty if nothing."""
        if any(self._folder.rglob(binaries.MARK)):
            return "code of the file was run"
        for root, _, names in os.walk(self._folder):
            if Path(root).is_relative_to(self._folder / READ):
                continue
            for name in names:
                path = Path(root, name)
                if path == self._folder / places.SECRET_FILE or not path.is_file():
                    continue
                if path.stat().st_size < 2**24 and places.SECRET.encode() in path.read_bytes():
                    return f"the content of a file elsewhere is in {path.relative_to(self._folder)}"
        return ""


def attack(
    names: list[str], count: int, shop: Workshop, journal: Journal, deadline: float
) -> Iterator[Result | str]:
    """Yield the results of the cases that the journal lacks."""
    attacker = Attacker(shop, shop.root.parent / "scratch-hostile")
    failed: set[str] = set()
    cases = all_cases()
    for number in spread(names, count):
        name = cases[number].format
        if (PART, name, number) in journal or name in failed:
            continue
        if time.monotonic() > deadline:
            break
        try:
            result = attacker.result(number)
        except RuntimeError as error:
            failed.add(name)
            yield f"{name}: not tried: {error}"
            continue
        journal.add(result)
        yield result
