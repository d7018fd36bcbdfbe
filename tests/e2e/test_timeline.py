"""``--record-timeline``: what real ranks did, held against the plans that they execute; and ``plan compare`` of that file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from megatron_llama.cli import main
from megatron_llama.planner.calibration import HOST, as_json
from megatron_llama.planner.measured import MeasuredSteps, config_of
from megatron_llama.schedule import Op
from megatron_llama.train.run.timeline_file import (
    COMPUTE,
    GATHERS,
    ITERATIONS,
    LANES,
    PIPELINE,
    REDUCTIONS,
    UPDATES,
    WAITS,
    Recorded,
    read_timeline,
)
from megatron_llama.train.setup.memory import MemoryPlan

from tests.e2e.product import DP2, EVALUATED, GLOBAL_BATCH_SIZE, Layout, Product, exact_curve

PIPED = Layout(4, {"pipeline_model_parallel_size": 2, "data_parallel_sharding_strategy": "optim_grads", "reduce_bucket_size": 20000})
STEPS = {"record_timeline": None, "profile_step_start": 2, "profile_step_end": 4}
PASSES = (Op.FORWARD.value, Op.BACKWARD.value)


@pytest.fixture(scope="module")
def file(product: Product, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two steps of a pipeline of two stages, twice. Evaluations in between are no part of them."""
    written = tmp_path_factory.mktemp("timeline") / "made" / "run.json"
    ended = product.train(PIPED, **{**STEPS, "record_timeline": written}, eval_interval=3, eval_iters=1)
    assert f" timeline of iterations 3 to 4: {written}\n" in ended.out
    return written


@pytest.fixture(scope="module")
def recorded(file: Path) -> Recorded:
    return read_timeline(file)


@pytest.mark.tries("record_timeline")
def test_passes_and_messages_are_those_of_the_plans(recorded: Recorded) -> None:
    """Every action of every rank in the order of the schedule, and every gather and reduction with its bytes."""
    plan = MemoryPlan(config_of(recorded, Path("run.json")), 4)
    steps = {span.details["iteration"] for span in recorded.spans if span.lane == ITERATIONS}
    assert steps == {3, 4} and plan.schedule.microbatches == GLOBAL_BATCH_SIZE // 4
    for rank in range(4):
        spans = [span for span in recorded.spans if span.rank == rank and "evaluation" not in span.details]
        for step in steps:
            actions = [span for span in spans if span.lane == COMPUTE and span.details["iteration"] == step]
            found = [(span.details["op"], span.details["stage"], span.details["microbatch"]) for span in sorted(actions, key=lambda s: s.begin)]
            assert found == [(action.op.value, action.stage, action.microbatch) for action in plan.schedule.ranks[rank // 2]]
        traffic = plan.traffic(rank // 2)
        for lane, calls, size in ((GATHERS, traffic.gathers, traffic.gather_bytes), (REDUCTIONS, traffic.reductions, traffic.reduction_bytes)):
            messages = [span for span in spans if span.lane == lane]
            assert len(messages) == 2 * calls > 0 and sum(int(span.details["bytes"]) for span in messages) == 2 * size
            assert {span.details["operation"] for span in messages} == {"all_gather" if lane == GATHERS else "reduce_scatter"}
        updates = [span.details["bucket"] for span in spans if span.lane == UPDATES]
        assert sorted(updates) == sorted(2 * [bucket.index for bucket in plan.bucket_plans[rank // 2].buckets])
        sends = Counter(span.details["axis"] for span in spans if span.lane == PIPELINE)
        assert sends == {"pp": 2 * plan.schedule.microbatches, "pp_backward": 2 * plan.schedule.microbatches}


def test_lanes_hold_one_thing_at_a_time(file: Path) -> None:
    """What a viewer draws: threads without overlaps, named by their lanes; computing is on one thread."""
    events = json.loads(file.read_text())["traceEvents"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    threads: dict[tuple[int, int], list[Any]] = {}
    for event in events:
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
            assert event["dur"] >= 0 and names[event["pid"], event["tid"]].split()[0] == event["cat"]
    assert threads.keys() == names.keys() and {name.split()[0] for name in names.values()} <= set(LANES)
    for place, found in threads.items():
        found.sort(key=lambda event: event["ts"])
        for before, after in pairwise(found):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3, (names[place], before, after)
    alone = Counter(name for name in names.values() if name.split()[0] in (COMPUTE, WAITS, ITERATIONS))
    assert alone == {COMPUTE: 4, WAITS: 4, ITERATIONS: 4}
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == [
        f"rank {rank}: pp {rank // 2} dp {rank % 2}" for rank in range(4)
    ]


def test_a_run_that_ends_within_shows_what_there_was(product: Product, tmp_path: Path) -> None:
    """Of one process, which has nobody to wait for."""
    written = tmp_path / "folder" / "run.json.gz"
    options = {**STEPS, "record_timeline": written, "profile_step_end": 100, "train_iters": 4}
    ended = product.train(**options)
    assert ended.out.endswith(f" timeline of iterations 3 to 4: {written}\n")
    found = read_timeline(written)
    assert (found.ranks, found.clock_error, found.labels) == (1, 0.0, ("",))
    assert {span.lane for span in found.spans} == {ITERATIONS, COMPUTE, WAITS, UPDATES}
    assert MeasuredSteps(found).numbers == (4,) and MeasuredSteps(found).waits(*LANES) < 0.5 * MeasuredSteps(found).seconds


def test_clocks_of_ranks_agree(recorded: Recorded) -> None:
    """Ranks of one machine have one clock: nothing arrives before it was computed."""
    shortest = min(span.end - span.begin for span in recorded.spans if span.lane == ITERATIONS)
    assert 0 < recorded.clock_error < shortest and recorded.per_node == recorded.ranks == 4
    passes = {
        (span.rank, span.details["iteration"], span.details["op"], span.details["microbatch"]): span
        for span in recorded.spans
        if span.lane == COMPUTE and span.details["op"] in PASSES and "evaluation" not in span.details
    }
    for (rank, step, op, microbatch), span in passes.items():
        if rank >= 2 and op == Op.FORWARD.value:
            assert passes[rank - 2, step, op, microbatch].end <= span.end + recorded.clock_error
        if rank < 2 and op == Op.BACKWARD.value:
            assert passes[rank + 2, step, op, microbatch].end <= span.end + recorded.clock_error


def test_waits_lie_in_what_waits(recorded: Recorded) -> None:
    found = [span for span in recorded.spans if span.lane == WAITS]
    assert {PIPELINE, GATHERS, REDUCTIONS} <= {span.details["on"] for span in found}
    for wait in (span for span in found if span.details["on"] == PIPELINE and "evaluation" not in span.details):
        around = [s for s in recorded.spans if s.rank == wait.rank and s.lane == COMPUTE and s.begin <= wait.begin and wait.end <= s.end]
        outside = not any(s.lane == COMPUTE and s.rank == wait.rank and s.begin < wait.end and wait.begin < s.end for s in recorded.spans)
        assert len(around) == 1 or outside


@pytest.mark.long
def test_recording_changes_no_bit(product: Product, straight: Callable[[str], Path], tmp_path: Path) -> None:
    """Everything in flight arrives before and behind the recorded steps, and the run goes on as if nobody had looked."""
    recording = {"record_timeline": tmp_path / "run.json", "profile_step_start": 1, "profile_step_end": 3}
    product.train(DP2, save=tmp_path / "run", **EVALUATED, **recording)
    assert exact_curve(tmp_path / "run") == exact_curve(straight("dp2 optim_grads"))
    assert MeasuredSteps(read_timeline(tmp_path / "run.json")).numbers == (2,)  # behind the third there was an evaluation


def test_what_cannot_be_recorded_is_refused_at_once(product: Product, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    refused = product.run(*product.command(**{**STEPS, "record_timeline": tmp_path / "file" / "run.json"}))
    assert refused.codes == (1,) and f"{tmp_path}/file: got Not a directory, expected a folder in which files can be written" in refused.err
    assert " iteration " not in refused.out


def test_a_comparison_names_what_became_slow(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside its plan, on a host that no plan knows; then with the backward passes of a stage planted a hundred times as long."""
    assert main(["plan", "compare", str(file), "--html", str(tmp_path / "page.html")]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"run.json: 4 ranks on {read_timeline(file).device}, iterations 4 to 4, clocks within ")
    assert "tp1/pp2/cp1/dp2/mbs2/1f1b/optim_grads/recompute-none, 2 microbatches\na step took " in said
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")
    (tmp_path / "host.json").write_text(json.dumps(as_json(HOST)))
    assert main(["plan", "compare", str(file), "--coefficients", str(tmp_path / "host.json"), "--json", str(tmp_path / "parts.json")]) == 0
    measured = json.loads((tmp_path / "parts.json").read_text())
    assert f"a step took {measured['measured_step_seconds'] * 1e3:,.2f} ms, planned for cpu are " in capsys.readouterr().out
    assert measured["known"] and measured["scale"] == 1.0 and all(part["planned_seconds"] is not None for part in measured["parts"])
    content = json.loads(file.read_text())
    for event in content["traceEvents"]:
        if event.get("cat") == COMPUTE and (event["args"].get("op"), event["args"].get("stage")) == (Op.BACKWARD.value, 0):
            event["dur"] *= 100
    (tmp_path / "slow.json").write_text(json.dumps(content))
    assert main(["plan", "compare", str(tmp_path / "slow.json"), "--json", str(tmp_path / "slow_parts.json")]) == 0
    assert capsys.readouterr().out.splitlines()[6].startswith("backward, stage 0 ")
    [first, *_] = json.loads((tmp_path / "slow_parts.json").read_text())["parts"]
    assert first["what"] == "backward, stage 0" and first["more_seconds"] > 0
