"""A proof finds every fault of the catalogue, and finds nothing where there is none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from megatron_llama.prove.case import Case
from megatron_llama.prove.proof import CHECKS, CheckResult, Proof, prove_case

from tests.harness import Cluster
from tests.launcher import ROOT
from tests.prove.faults import (
    CATALOGUE,
    Fault,
    data_from_the_start,
    faulty,
    last_step_dropped,
    mean_of_microbatches,
    norms_decay,
    norms_not_summed,
)

STEPS = 3
"""What is wrong from the second step on is found in it, and one step is left to resume with."""
BUDGET = 300.0
"""Seconds: more than any of them takes."""
CASES = tuple({fault.case.name: fault.case for fault in CATALOGUE}.values())
SHORT = (norms_not_summed, mean_of_microbatches, norms_decay, data_from_the_start, last_step_dropped)
"""One of each kind of check: against one process, with unequal masks, against transformers, resumed, of what was read."""


def checks_of(case: Case) -> tuple[str, ...]:
    """Those that find some fault of the catalogue in a case."""
    return tuple(check for check in CHECKS if any(fault.check == check and fault.case == case for fault in CATALOGUE))


def result(proof: Proof, check: str) -> CheckResult:
    (found,) = (one for one in proof.checks if one.name == check)
    assert not found.not_run, found.not_run
    return found


def rows() -> list[list[str]]:
    """The table of the docs: name, what goes wrong, the issue, by which checks it is found, the first wrong number, what it is gone without."""
    text = (ROOT / "docs" / "numerics.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("| ") and "](https://github.com/" in line]
    return [line.strip("| ").split(" | ") for line in lines]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "fault", [pytest.param(fault, id=fault.name, marks=[] if fault.patch in SHORT else [pytest.mark.long]) for fault in CATALOGUE]
)
def test_a_fault_is_found(cluster: Cluster, tmp_path: Path, fault: Fault) -> None:
    named = fault.patch in SHORT
    proof = prove_case(faulty(cluster, fault), fault.case, tmp_path, BUDGET, checks=(fault.check,), steps=STEPS, axes=named)
    assert not result(proof, fault.check).holds
    assert proof.location is not None
    # A run that ends with an error would be found by everybody.
    assert proof.location.row.what != "the run", proof.location
    if named:
        assert (fault.axis in proof.location.named) if fault.axis else not proof.location.named, proof.location


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=pytest.mark.long) for case in CASES])
def test_the_case_holds_without_faults(cluster: Cluster, tmp_path: Path, case: Case) -> None:
    proof = prove_case(cluster, case, tmp_path, BUDGET, checks=checks_of(case), steps=STEPS)
    for check in checks_of(case):
        wrong = [row for row in result(proof, check).rows if not row.holds]
        assert result(proof, check).rows and not wrong, wrong[:5]
    assert proof.location is None


def test_every_fault_is_that_of_a_public_issue() -> None:
    assert len(CATALOGUE) >= 24
    assert len({fault.issue for fault in CATALOGUE}) == len({fault.name for fault in CATALOGUE}) == len(CATALOGUE)
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", fault.issue) for fault in CATALOGUE)


def test_the_docs_list_the_catalogue() -> None:
    assert [row[0] for row in rows()] == [fault.name for fault in CATALOGUE]
    for fault, (_, does, issue, found_by, _, gone_without) in zip(CATALOGUE, rows(), strict=True):
        assert does == fault.does and issue == f"[{fault.issue}]({fault.link})"
        assert fault.check in found_by.split(", ") and (not fault.axis or fault.axis in gone_without.split(", ")), fault
