"""Pages of ``plan --html`` and ``plan compare --html``, and what a comparison says of a run whose times are known."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from megatron_llama.cli import main
from megatron_llama.planner.candidate import Candidate
from megatron_llama.planner.compare import Comparison
from megatron_llama.planner.fitted import FITTED
from megatron_llama.planner.links import rank_groups
from megatron_llama.planner.measured import MeasuredSteps
from megatron_llama.planner.pictures.bars import Bar, BarRow, drawing
from megatron_llama.planner.pictures.page import page, paragraph, table
from megatron_llama.schedule import Op
from megatron_llama.train.run.timeline_file import (
    COMPUTE,
    GATHERS,
    ITERATIONS,
    OTHER,
    PIPELINE,
    UPDATES,
    WAITS,
    Recorded,
    Span,
    read_timeline,
    write_timeline,
)

from tests.planner.test_plan import planned

SVG = "{http://www.w3.org/2000/svg}"
PLAN = ["plan", "--model", "llama2-7b", "--gpus", "16", "--global-batch-size", "64", "--seq-length", "4096"]
PIPED = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "4", "--micro-batch-size", "1"]
PIPED += ["--recompute-granularity", "none"]


class Read(HTMLParser):
    """Text and elements of a page; fails where they are not nested."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, Mapping[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())

    def count(self, tag: str) -> int:
        return sum(one == tag for one, _ in self.elements)


def alone(text: str) -> Read:
    """A page that needs nothing from elsewhere and runs nothing."""
    found = Read(text)
    assert not re.search(r"https?:|//|\bsrc\b|@import|url\(", text)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in found.elements}
    assert not [name for _, attributes in found.elements for name in attributes if name.startswith("on") or name in ("src", "href")]
    return found


def test_everything_that_is_written_into_a_page_is_escaped() -> None:
    bad = '<b a="x">&</b>'
    lane = BarRow(bad, [Bar(0.0, 9.0, "#000000", bad, bad)])
    text = page(bad, [paragraph(bad), table([bad], [[bad]]), drawing([lane], 9.0, bad, marks=[(1.0, bad)])])
    found = alone(text)
    assert found.count("b") == 0 and found.texts.count(bad) == 9 and "<b" not in text.replace("<body", "")


def test_bars_are_where_their_times_say() -> None:
    bars = [Bar(0.0, 2.0, "#111111"), Bar(2.0, 10.0, "#222222", "3")]
    boxes = [a for tag, a in Read(page("", [drawing([BarRow("a", bars)], 10.0, "s")])).elements if tag == "rect" and a.get("class") == "b"]
    first, second = ((float(box["x"] or 0), float(box["width"] or 0)) for box in boxes)
    assert second[1] == pytest.approx(4 * first[1], abs=0.1) and second[0] == pytest.approx(first[0] + first[1], abs=0.1)


def test_what_no_pixel_shows_is_left_out() -> None:
    """Of a hundred thousand messages in a thousand pixels; one among them that is long stays."""
    bars = [Bar(at / 1e5, (at + 1) / 1e5, "#111111") for at in range(100_000)]
    bars[50_001] = Bar(0.50001, 0.6, "#111111", tip="long")
    text = page("", [drawing([BarRow("a", bars)], 1.0, "s")])
    assert 500 < text.count('class="b"') < 1500 and "<title>long</title>" in text


def test_a_plan_as_a_page_and_a_drawing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Table, pipeline, time and memory of what the terminal shows; the same file every time."""
    texts = []
    for name in ("a.html", "b.html"):
        files = ["--html", str(tmp_path / name), "--json", str(tmp_path / "plan.json"), "--svg", str(tmp_path / "a.svg")]
        assert main([*PLAN, *PIPED, "--top", "3", *files]) == 0
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1]
    found, layouts = alone(texts[0]), json.loads((tmp_path / "plan.json").read_text())["layouts"]
    assert found.count("tr") == (1 + 3) + (1 + 4) and found.count("svg") == 3
    for layout in layouts:
        assert layout["layout"] in found.texts and f"{layout['step_seconds']:.2f}" in found.texts
    shown = capsys.readouterr().out
    assert all(line.strip() in shown for line in found.texts[-3].splitlines())
    for subject, words in re.findall(r"^  (model|layout|precision|batch) +(.*)$", shown, re.M):
        assert {subject, words} <= set(found.texts), "what it is, in the words of the terminal"
    tips = [text for text in found.texts if text.startswith("forward ")]
    assert len(tips) % 8 == 0 and all(re.fullmatch(r"forward \d+, stage \d+: [\d.]+ ms", tip) for tip in tips)
    assert {f"pp rank {rank}" for rank in range(4)} <= set(found.texts) and "usable of a h100" in found.texts
    titles = [title.text or "" for title in ElementTree.fromstring((tmp_path / "a.svg").read_text()).iter(f"{SVG}title")]
    assert [tip for tip in titles if tip.startswith("forward ")] == tips
    memory = layouts[0]["memory_bytes"]
    assert all(f"{name}: {size / 2**30:.3f} GiB" in found.texts for name, size in memory.items() if size)


def recorded(plan: Candidate, slower: Mapping[tuple[Op, int], float], *, steps: int = 2, device: str = "NVIDIA H100 80GB HBM3") -> Recorded:
    """Equal steps of a machine whose passes take what the plan says, but for some that are so many times slower. Each waits for its
    message for a millisecond; behind the last there is a wait, an update, and nothing."""
    found = Comparison(MeasuredSteps(Recorded({}, 1, 1, "", False, 0, 0.0, (), ())), plan, known=True)
    spans, apart = [], plan.machine.gpus // plan.job.pp
    length = 1.01 * max(
        sum(0.001 + (one.end - one.start) * slower.get((one.action.op, one.action.stage), 1.0) for one in passes)
        for passes in found.timeline.ranks
    )
    for step, zero in ((step, (step - 1) * length) for step in range(1, steps + 1)):
        for place, passes in enumerate(found.timeline.ranks):
            for rank in range(place * apart, (place + 1) * apart):
                at, clock = {"iteration": step}, zero
                for one in passes:
                    seconds = (one.end - one.start) * slower.get((one.action.op, one.action.stage), 1.0)
                    details = {**at, "op": one.action.op.value, "stage": one.action.stage, "microbatch": one.action.microbatch}
                    spans.append(Span(rank, COMPUTE, str(one.action), clock, clock + 0.001 + seconds, details))
                    spans.append(Span(rank, WAITS, "message", clock, clock + 0.001, {**at, "on": PIPELINE}))
                    clock += 0.001 + seconds
                rest = zero + length - clock
                spans += [
                    Span(rank, WAITS, "gradients", clock, clock + 0.25 * rest, {**at, "on": GATHERS}),
                    Span(rank, UPDATES, "update 0", clock + 0.25 * rest, clock + 0.5 * rest, {**at, "bucket": 0}),
                    Span(rank, ITERATIONS, "iteration", zero, zero + length, at),
                    *messages(rank, zero, at),
                ]
    ranks = plan.machine.gpus
    return Recorded(asdict(plan.config), ranks, 8, device, False, plan.machine.gpu.memory, 0.0, ("",) * ranks, tuple(spans))


def messages(rank: int, zero: float, at: Mapping[str, int | str]) -> Iterator[Span]:
    """Three gathers of 1 MiB, of which each takes a millisecond longer, and a message to everybody."""
    for bucket in range(3):
        details = {**at, "axis": "dp_gather", "operation": "all_gather", "bytes": 2**20, "bucket": bucket}
        yield Span(rank, GATHERS, f"all_gather {bucket}", zero, zero + 0.001 * (bucket + 1), details)
    yield Span(rank, OTHER, "all_reduce", zero, zero + 9.0, {**at, "axis": "world", "operation": "all_reduce", "bytes": 8})


def test_messages_are_held_against_their_links() -> None:
    plan = planned("1f1b", 64)
    [row] = Comparison(MeasuredSteps(recorded(plan, {})), plan, known=True).messages
    assert (row.what, row.count, row.measured) == ("all_gather on dp_gather, 1.0 MiB", 3, pytest.approx(0.002))
    assert row.planned == rank_groups(plan.job, FITTED).shards.gather(2**20) > 0
    [row] = Comparison(MeasuredSteps(recorded(plan, {}, device="x86_64")), plan, known=False).messages
    assert row.planned is None and row.cells[3:] == ("?", "", "")


def test_a_run_that_does_what_was_planned_and_one_that_does_not() -> None:
    plan = planned("1f1b", 64)
    same = Comparison(MeasuredSteps(recorded(plan, {})), plan, known=True)
    passes = [row for row in same.rows if "stage " in row.what and row.count > 1]
    assert same.scale == 1.0 and len(passes) == 8
    assert [row.measured for row in passes] == pytest.approx([row.planned for row in passes])
    slow = {(Op.BACKWARD, 2): 3.0, (Op.FORWARD, 1): 0.5}
    rows = {
        row.what: row
        for row in Comparison(MeasuredSteps(recorded(plan, slow)), plan, known=True).rows
        if row.what in {r.what for r in passes}
    }
    assert [*rows][:: len(rows) - 1] == ["backward, stage 2", "forward, stage 1"]
    assert [round(row.measured / (row.planned or 0), 6) for row in (rows["backward, stage 2"], rows["forward, stage 1"])] == [3.0, 0.5]
    assert rows["backward, stage 2"].count == plan.job.microbatches and same.steps.numbers == (2,)


def test_waits_updates_and_the_rest_add_up_to_a_step() -> None:
    """The first of four does not count."""
    plan = planned("1f1b", 64)
    found = Comparison(MeasuredSteps(recorded(plan, {}, steps=4)), plan, known=True)
    parts = {row.what: row for row in found.rows}
    waits = [row for what, row in parts.items() if what.startswith("waiting") and "within" not in what]
    passes = sum(row.count * row.measured for what, row in parts.items() if "stage " in what and row.count > 1) / plan.job.pp
    others = parts["updates"].measured + parts["the rest: samples, starting kernels, logging"].measured
    assert passes + sum(row.measured for row in waits) + others == pytest.approx(found.steps.seconds)
    assert parts["waiting for stages, the norm and the loss"].measured == pytest.approx(0.001 * 2 * plan.job.microbatches)


def test_an_unknown_device_is_compared_in_proportion() -> None:
    """One factor makes all passes take as long as they did; what links take is left open."""
    plan = planned("zb-h1", 64)
    slow = {(op, stage): 7.0 for op in plan.short.schedule.passes for stage in range(4)}
    found = Comparison(MeasuredSteps(recorded(plan, slow, device="x86_64")), plan, known=False)
    passes = [row for row in found.rows if "stage " in row.what and row.count > 1]
    assert found.scale == pytest.approx(7.0) and len(passes) == 12
    assert [row.measured for row in passes] == pytest.approx([row.planned for row in passes])
    split = planned("1f1b", 64)
    rows = {row.what: row for row in Comparison(MeasuredSteps(recorded(split, {}, device="x86_64")), split, known=False).rows}
    assert rows["waiting for parameters and gradients"].planned is None and rows["waiting for tp"].planned is None
    assert any("nobody has measured x86_64 for the planner" in line for line in found.lines("a.json"))


def test_a_comparison_as_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned("1f1b", 64)
    for name in ("run.json", "run.json.gz"):
        write_timeline(tmp_path / name, recorded(plan, {(Op.BACKWARD, 2): 3.0}))
    pages, shown = [], []
    for name in ("run.json", "run.json.gz"):
        files = ["--html", str(tmp_path / "page.html"), "--json", str(tmp_path / "page.json"), "--svg", str(tmp_path / "page.svg")]
        assert main(["plan", "compare", str(tmp_path / name), *files]) == 0
        assert "pp rank 3, measured" in (tmp_path / "page.svg").read_text()
        pages.append((tmp_path / "page.html").read_text().replace(name, "FILE"))
        shown.append(capsys.readouterr().out.replace(name, "FILE"))
    assert pages[0] == pages[1] and shown[0] == shown[1]
    found, parts = alone(pages[0]), json.loads((tmp_path / "page.json").read_text())["parts"]
    assert found.count("tr") == 1 + len(parts) + 1 + 1 and found.count("svg") == 1
    assert {f"pp rank {rank}, {what}" for rank in range(4) for what in ("measured", "planned")} <= set(found.texts)
    assert parts[0]["what"] == "backward, stage 2" and shown[0].splitlines()[5].startswith("backward, stage 2 ")
    assert sum(tip.startswith("forward ") for tip in found.texts) >= 4 * plan.job.microbatches


def test_a_file_is_what_was_written(tmp_path: Path) -> None:
    made = recorded(planned("1f1b", 16), {})
    write_timeline(tmp_path / "a.json.gz", made)
    read = read_timeline(tmp_path / "a.json.gz")
    assert replace(read, spans=(), config={}) == replace(made, spans=(), config={})
    key = lambda span: (span.rank, span.lane, span.begin, span.name)  # noqa: E731
    for ours, theirs in zip(sorted(read.spans, key=key), sorted(made.spans, key=key), strict=True):
        assert (ours.rank, ours.lane, ours.name, ours.details) == (theirs.rank, theirs.lane, theirs.name, theirs.details)
        assert (ours.begin, ours.end) == pytest.approx((theirs.begin, theirs.end), abs=2e-9)


DAMAGED: list[tuple[Callable[[str], str], str]] = [
    (lambda text: text[: len(text) // 2], "got no JSON ("),
    (lambda text: "[]", "got a JSON list, expected a timeline"),
    (lambda text: '{"traceEvents": []}', "got no timeline of this program"),
    (lambda text: text.replace('"format":1', '"format":9'), "run.json format: got 9, expected 1; record it again"),
    (lambda text: text.replace('"device":', '"devices":'), "got no 'device', expected what --record-timeline writes"),
    (lambda text: text.replace('"cat":"compute"', '"cat":"cooking"', 1), "got a lane cooking"),
    (lambda text: text.replace('"bf16":', '"bf17":'), "run.json config: got training.bf17, expected options of this version"),
    (lambda text: text.replace('"ranks":16', '"ranks":6'), "cannot have run on its 6 ranks:"),
    (lambda text: json.dumps({**json.loads(text), "traceEvents": []}), "timeline: got no step, expected the passes of one step or more"),
]


def test_what_is_no_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    write_timeline(path, recorded(planned("1f1b", 16), {}))
    whole = path.read_text()
    (tmp_path / "cut.json.gz").write_bytes(b"\x1f\x8bnothing")
    rows = [([], None, "plan compare: got no file"), (["no.json"], None, "got No such file or directory"), (["cut.json.gz"], None, "cut.json.gz: got ")]
    for words, change, says in (*rows, *((["run.json"], change, says) for change, says in DAMAGED)):
        path.write_text(whole if change is None else change(whole))
        assert main(["plan", "compare", *(str(tmp_path / word) for word in words)]) == 2
        error = capsys.readouterr().err
        assert says in error and error.startswith("error: ")
