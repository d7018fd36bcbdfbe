"""The table of proven examples says what ``prove --output`` has written."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_llama.prove.case import Case
from megatron_llama.prove.compare import Row
from megatron_llama.prove.proof import CheckResult, Proof
from megatron_llama.prove.report import as_json
from tools.prove_table import table


def test_a_row_for_each_case(tmp_path: Path) -> None:
    checks = {
        "one process": [Row("one process", "loss", 3e-8, 1e-6, step=1), Row("one process", "loss", 5e-8, 1e-6, step=2)],
        "transformers": [Row("transformers", "loss", 6e-8, 1.0, step=1), Row("transformers", "gradient", 7e-7, 1.0, step=1)],
        "precision": [],
        "resume": [Row("resume", "weight", 0.0, 0.0)],
        "reshard": [Row("reshard", "gradient", 2e-6, 1e-6, step=4)],
        "export": [],
        "data": [Row("data", "samples", 1.0, 0.0)],
    }
    results = tuple(CheckResult(name, tuple(rows), 1.0, "" if rows else "no time is left") for name, rows in checks.items())
    proofs = [Proof(Case(name, {}, 8), results, None, 61.4) for name in ("tp 2 pp 2", "tp 2 dp 2")]
    folder = tmp_path / "llama3_70b"
    folder.mkdir()
    (folder / "prove.json").write_text(json.dumps(as_json(proofs)))
    head, _, first, second = table([folder])
    assert head.count("|") == first.count("|")
    assert first == (
        "| llama3_70b | tp 2 pp 2 | 5.0e-08 | not run | not run | 6.0e-08 | 7.0e-07 | not run | 2.0e-06 | not run | resume | NO | 61 |"
    )
    assert second == first.replace("tp 2 pp 2", "tp 2 dp 2")
