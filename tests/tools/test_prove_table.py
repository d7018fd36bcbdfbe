"""The table of proven examples says what ``prove --output`` has written."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_llama.prove.case import Case
from megatron_llama.prove.compare import Row
from megatron_llama.prove.proof import CheckResult, Proof
from megatron_llama.prove.report import as_json
from tools.prove_table import table


def row(check: str, what: str, got: float, bound: float = 1.0, step: int | None = 1) -> Row:
    return Row(check, what, got, bound, step)


CHECKED = {
    "one process": [
        row("one process", what, got)
        for what, got in (("loss", 1e-8), ("loss", 4e-8), ("loss", 2e-8), ("gradient", 3e-7), ("update", 5e-7))
    ],
    "transformers": [row("transformers", "loss", 6e-8), row("transformers", "gradient", 7e-7)],
    "precision": [row("precision", "loss", 8e-3), row("precision", "gradient", 9e-2)],
    "resume": [row("resume", "weight", 0.0, 0.0)],
    "reshard": [row("reshard", "loss", 1e-7), row("reshard", "gradient", 2e-6)],
    "export": [row("export", "weights", 0.0, 0.0), row("export", "logits", 3e-5)],
    "data": [row("data", "samples", 0.0, 0.0)],
}


def test_every_column_has_its_own_number(tmp_path: Path) -> None:
    """The worst of all steps, of a configuration of which everything ran and holds."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        results = tuple(CheckResult(check, tuple(rows), 1.0) for check, rows in CHECKED.items())
        proof = Proof(Case("tp 2 pp 2", {}, 8), results, None, 61.6)
        (tmp_path / name / "prove.json").write_text(json.dumps(as_json([proof])))
    head, rule, *rows = table([tmp_path / "first", tmp_path / "second"])
    assert head == (
        "| configuration | shown as | one process loss | one process gradient | one process update | transformers loss | transformers gradient "
        "| precision loss | reshard gradient | export logits | equal to the bit | holds | s |"
    )
    assert rule == "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- | ---: |"
    numbers = "4.0e-08 | 3.0e-07 | 5.0e-07 | 6.0e-08 | 7.0e-07 | 8.0e-03 | 2.0e-06 | 3.0e-05"
    assert rows == [f"| {name} | tp 2 pp 2 | {numbers} | resume, export, data | yes | 62 |" for name in ("first", "second")]


def test_a_row_for_each_case(tmp_path: Path) -> None:
    checks = {
        "one process": [Row("one process", "loss", 3e-8, 1e-6, step=1), Row("one process", "loss", 5e-8, 1e-6, step=2)],
        "transformers": [],
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
    none = " | ".join(["not run"] * 5)
    assert first == f"| llama3_70b | tp 2 pp 2 | 5.0e-08 | {none} | 2.0e-06 | not run | resume | NO | 61 |"
    assert second == first.replace("tp 2 pp 2", "tp 2 dp 2")
