"""The part ``corrupt``: damage to whole files of every format."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.harm.corruptions import Corruption, Files, draw
from tools.harm.formats import FORMATS, READ, Format
from tools.harm.judging import Journal, Result, emptied, judge
from tools.harm.materials import PATIENT, Workshop
from tools.harm.sandbox import Limits, Outcome, run_forked, warm

PART = "corrupt"
SECONDS = 10.0
FACTOR, ROOM = 4, 200 * 2**20
"""An input may take so many times its size of memory, and so many bytes."""


def contents(folder: Path) -> Files:
    """Every file of a folder by relative name."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def limits(size: int) -> Limits:
    """What an input of this size may take."""
    return Limits(SECONDS, FACTOR * size + ROOM)


class Corruptor:
    """One format, made and read once, and then harmed."""

    def __init__(
        self,
        format: Format,
        shop: Workshop,
        scratch: Path,
        seed: int,
        *,
        only: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """``only`` says of a file's name whether it may be harmed."""
        self._format = format
        self._shop = shop
        self._folder = scratch
        self._seed = seed
        pristine, *siblings = shop.make(format.material)
        self._files = contents(pristine)
        self._siblings = [contents(sibling) for sibling in siblings]
        self._harmed = {name: self._files[name] for name in self._files if only(name)}
        # The first reading imports modules in its child; from the second on it costs what the
        # harmed readings cost.
        warm(self._read(self._files, PATIENT))
        self.pristine = self._read(self._files, PATIENT)
        if self.pristine.end != "done":
            raise RuntimeError(f"{format.name} cannot be read unharmed:\n{self.pristine.words}")

    def corruption(self, case: int) -> Corruption:
        """What is done in a case, always the same for a seed."""
        chance = random.Random(f"{self._seed}/{self._format.drawn_as or self._format.name}/{case}")
        return draw(chance, self._harmed, self._siblings)

    def outcome(self, case: int) -> Outcome:
        """Harm the files and read them."""
        corruption = self.corruption(case)
        files = {**self._files}
        if corruption.content is None:
            del files[corruption.file]
        else:
            files[corruption.file] = corruption.content
        return self._read(files, limits(sum(map(len, files.values()))))

    def result(self, case: int) -> Result:
        """The verdict on a case."""
        outcome = self.outcome(case)
        verdict, details = judge(outcome, self.pristine, sealed=self._format.sealed)
        harm = str(self.corruption(case))
        seconds = round(outcome.seconds, 3)
        return Result(PART, self._format.name, case, harm, verdict, details, seconds, outcome.bytes)

    def _read(self, files: Files, allowed: Limits) -> Outcome:
        folder = emptied(self._folder)
        (folder / READ).mkdir()  # also where the only file is dropped
        for name, content in files.items():
            path = folder / READ / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return run_forked(lambda: self._format.read(self._shop), folder, allowed)


def corrupt(
    names: list[str], count: int, shop: Workshop, journal: Journal, seed: int, deadline: float
) -> Iterator[Result | str]:
    """Yield the results of the cases that the journal lacks, and why a format was not tried."""
    scratch = shop.root.parent / "scratch"
    for name in names:
        missing = [case for case in range(count) if (PART, name, case) not in journal]
        if not missing or time.monotonic() > deadline:
            continue
        try:
            corruptor = Corruptor(FORMATS[name], shop, scratch, seed)
        except RuntimeError as error:
            yield f"{name}: not tried: {error}"
            continue
        for case in missing:
            if time.monotonic() > deadline:
                break
            result = corruptor.result(case)
            journal.add(result)
            yield result
    shutil.rmtree(scratch, ignore_errors=True)
