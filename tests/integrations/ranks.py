"""Scripts of this folder in two processes, as torchrun starts them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.launcher import ROOT, free_port, torchrun

RANKS = 2


def found(script: str, case: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """What rank 0 has found."""
    place = torchrun(RANKS, free_port())
    command = [sys.executable, str(Path(__file__).parent / script), case, str(folder), *arguments]
    # Other packages may be beside the environment.
    path = os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HOME": str(folder)}
    ranks = [
        subprocess.Popen(command, env=environ | place(rank), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(RANKS)
    ]
    outs = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * RANKS, "\n".join(outs)
    printed = re.search(r"^found (.*)$", outs[0], re.MULTILINE)
    assert printed is not None, outs[0]
    return json.loads(printed[1])


def deviation(lines: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    """The largest relative difference of numbers, column by column."""
    assert len(lines) == len(others) > 0
    pairs = [pair for line, other in zip(lines, others, strict=True) for pair in zip(line, other, strict=True)]
    return max(abs(one - other) / max(abs(other), 1e-9) for one, other in pairs)
