"""Scripts of this folder in two processes, as torchrun starts them, which find the other libraries imported."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.launcher import Launcher

RANKS = 2


@dataclass(frozen=True)
class Ranks:
    """Processes of one script, a module that has ``main``."""

    launcher: Launcher
    script: str

    def find(self, case: str, folder: Path, *arguments: str) -> dict[str, Any]:
        """What rank 0 has found."""
        code = f"from {self.script} import main\nmain()"
        ended = self.launcher.run([case, folder, *arguments], RANKS, cwd=folder, code=code)
        assert ended.codes == (0,) * RANKS, f"exit {ended.codes}\n{ended.outs}\n{ended.err}"
        printed = re.search(r"^found (.*)$", ended.out, re.MULTILINE)
        assert printed is not None, ended.out
        return json.loads(printed[1])


def deviation(lines: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    """The largest relative difference of numbers, column by column."""
    assert len(lines) == len(others) > 0
    pairs = [pair for line, other in zip(lines, others, strict=True) for pair in zip(line, other, strict=True)]
    return max(abs(one - other) / max(abs(other), 1e-9) for one, other in pairs)
