"""Layouts drawn for a family are those of a seed, run, and have all that the family can have."""

from __future__ import annotations

import pytest

from tests.model.families.draw import BALANCES, choices, draw
from tests.parallel import draw as plain
from tests.parallel.cases import STRATEGIES
from tools import parity

MET: dict[str, set[object]] = {
    "tp": {1, 2, 4}, "cp": {1, 2, 4}, "pp": {1, 2, 4}, "dp": {1, 2, 4}, "ep": {1, 2, 4}, "virtual": {1, 2, 3}, "microbatches": {1, 2, 4, 8},
    "keys": {None, "all_gather", "ring", "a2a", "a2a+p2p"}, "schedule": {None, "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"},
    "strategy": {None, *STRATEGIES}, "recompute": {"none", "selective", "full"}, "balance": {"none", *BALANCES}, "z-loss": {False, True},
    "split": {False, True}, "alltoall": {None, False, True}, "shards": {None, 0, 1, 2, 4},
}


def test_a_draw_meets_every_choice_and_only_what_runs() -> None:
    drawn = draw("mixtral", 6)
    assert drawn == draw("mixtral", 6) != draw("mixtral", 7)
    met: dict[str, set[object]] = {}
    for name, value in (choice for layout in drawn for choice in choices(layout)):
        met.setdefault(name, set()).add(value)
    assert met == MET
    assert all(plain.runs(layout) and layout.steps == 20 for layout in drawn)


def test_what_a_family_cannot_have_is_not_drawn() -> None:
    """As the trainer's own check says, for experts that ranks divide, too."""
    drawn = draw("llama4", 6, 6)
    assert {(layout.balance, layout.z_loss) for layout in drawn} == {("none", 0.0)} and drawn[0].model.moe_apply_probs_on_input
    # Six experts have no four equal parts.
    assert {(layout.ep, layout.exchange) for layout in drawn} == {(1, False), (2, False), (2, True)}
    [dense] = draw("olmo2", 1, 1)
    assert (dense.balance, dense.z_loss, dense.ep) == ("none", 0.0, 1)


@pytest.mark.long
def test_the_tool_prints_rows_against_transformers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["parity.py", "--families", "--random", "--seed", "2", "--count", "1", "--only", "mixtral "])
    assert parity.main() == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]
    [drawn] = draw("mixtral", 2, 1)
    assert head == "1 layouts drawn from seed 2"
    assert [line[0] for line in lines[2:]] == [drawn.reference.name, drawn.name, "**largest of 1**"]
    assert all(float(line[3]) < 1e-6 and float(line[4]) < 2e-5 for line in lines[2:4])
