"""What users see of a proof: lines, JSON and a page say the same, also of numbers that are none."""

from __future__ import annotations

import json
import math
import re

import pytest
from megatron_llama.prove.case import Case, Note
from megatron_llama.prove.compare import Row
from megatron_llama.prove.locate import Axis, Location
from megatron_llama.prove.proof import CheckResult, Proof
from megatron_llama.prove.report import as_json, lines, page

from tests.planner.test_html import alone

QKV, NORM = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"
CASE = Case(
    "as <given>",
    {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    8,
    notes=(Note("--hidden-size", "8192", "128", "rows & columns keep their divisors"), Note("--bf16", "yes", "yes", "")),
)
HOLDING = CheckResult(
    "one process",
    (
        *(Row("one process", "loss", step * 1e-8, 1e-6, step) for step in range(1, 7)),
        Row("one process", "gradient", 1e-7, 2e-5, 1, QKV),
        Row("one process", "gradient", 3e-6, 1e-5, 2, NORM),
        Row("one process", "gradient", 4e-6, 2e-5, 2, QKV),
    ),
    12.5,
)
SAME_BITS = CheckResult("resume", (Row("resume", "weights", 0.0, 0.0, 6, QKV),), 3.0)
WITHOUT = CheckResult("transformers", (), 0.0, not_run="transformers is not installed")


def failing() -> Proof:
    rows = [Row("one process", "loss", 1e-8, 1e-6, 1), Row("one process", "loss", math.nan, 1e-6, 2)]
    rows += [Row("one process", "gradient", 1e-3 * step, 2e-5, step, NORM) for step in range(1, 7)]
    rows += [Row("one process", "gradient", 1e-9, 2e-5, 1, QKV)]
    bits = CheckResult("resume", (Row("resume", "weights", 1.0, 0.0, None, QKV, "<b>rank 3</b> read it twice"),), 3.0, partly="the sampler")
    axes = (
        Axis("sequence parallelism", {"sequence_parallel": False}, True),
        Axis("pipeline parallelism", {"pipeline_model_parallel_size": 1}, False),
    )
    location = Location(rows[2], "step 1: the gradient of model.norm.weight", axes, ("recompute",))
    return Proof(CASE, (CheckResult("one process", tuple(rows), 12.5), WITHOUT, bits), location, 15.5)


def test_lines_show_the_worst_of_each_thing_nearest_to_its_own_bound() -> None:
    shown = list(lines(Proof(CASE, (HOLDING, WITHOUT, SAME_BITS), None, 15.5)))
    assert shown[0] == "as <given> (8 processes): 2 checks hold; not run: transformers; 16 s"
    cells = [line.split() for line in shown[1:]]
    assert cells[0] == ["check", "what", "got", "bound", "worst", "at"]
    assert cells[1] == ["one", "process", "loss", "6.0e-08", "1.0e-06", "holds", "step", "6,", "of", "6", "compared"]
    # 3e-6 of 1e-5 is nearer than 4e-6 of 2e-5.
    assert cells[2] == ["gradient", "3.0e-06", "1.0e-05", "holds", "step", "2,", "model.norm.weight,", "of", "3", "compared"]
    assert cells[3] == ["transformers", "not", "run:", "transformers", "is", "not", "installed"]
    assert cells[4][:5] == ["resume", "weights", "equal", "equal", "holds"]
    assert len(shown) == 6
    text = "\n".join(lines(failing()))
    assert "DIFFERS in one process, resume; not run: transformers" in text
    assert "one process, loss: 1 of 2 differ:\n    got nan, bound 1.0e-06 at step 2" in text
    assert "one process, gradient: 6 of 7 differ, the first:\n    got 1.0e-03, bound 2.0e-05 at step 1, model.norm.weight" in text
    assert "at step 6" not in text.split("the first:")[1].split("resume")[0]
    assert f"got differs, bound equal at {QKV}\n      <b>rank 3</b> read it twice" in text and "not compared: the sampler" in text
    assert "it holds without: sequence parallelism\n  it differs also without: pipeline parallelism" in text
    assert text.endswith("no time was left to try without: recompute")


def test_json_holds_everything_and_is_json() -> None:
    proof = failing()
    found = json.loads(json.dumps(as_json([proof]), allow_nan=False))
    (case,) = found["cases"]
    assert found["version"] == 2 and found["holds"] is case["holds"] is False and found["seconds"] == 15.5
    assert case["options"] == {"tensor_model_parallel_size": 2, "sequence_parallel": True} and case["world_size"] == 8
    first, without, bits = case["checks"]
    loss, gradient = first["groups"]
    assert loss["worst"] == {"got": "nan", "bound": 1e-6, "step": 2, "tensor": None, "note": None}
    assert (gradient["compared"], gradient["differ"]) == (7, 6)
    assert [row["step"] for row in gradient["failed"]] == [1, 2, 3, 4, 5, 6]
    assert [row["tensor"] for row in gradient["steps"]] == [NORM] * 6
    assert without["not_run"] == "transformers is not installed" and without["groups"] == []
    assert bits["partly"] == "the sampler" and bits["groups"][0]["steps"] == [] and bits["holds"] is False
    assert case["location"]["named"] == ["sequence parallelism"] and case["location"]["not_tried"] == ["recompute"]


@pytest.mark.parametrize("differs", [False, True])
def test_the_page_is_whole_and_needs_nothing_else(differs: bool) -> None:
    text = page([failing() if differs else Proof(CASE, (HOLDING, WITHOUT, SAME_BITS), None, 15.5)], "Proof of run.yaml")
    tags = alone(text)
    assert tags.count("html") == 1 and tags.count("table") and tags.count("svg") and not tags.count("b")
    assert "as &lt;given&gt;" in text and ("DIFFERS: as &lt;given&gt;" in text) is differs
    bars = [attributes for tag, attributes in tags.elements if tag == "rect"]
    assert [bar["class"] for bar in bars].count("no") == (7 if differs else 0)
    assert len(bars) == 8 and all(math.isfinite(float(bar["height"] or "nan")) for bar in bars)
    assert len(text) < 10_000
    # A sentence runs over the columns that it leaves empty.
    for table in re.findall(r"<table>(.*?)</table>", text, re.DOTALL):
        rows = [re.findall(r"<t[hd]([^>]*)>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)]
        spans = [[int(found[1]) if (found := re.search(r'colspan="(\d+)"', attributes)) else 1 for attributes, _ in row] for row in rows]
        assert len(rows) > 2 and {sum(row) for row in spans} == {len(rows[0])}, rows
