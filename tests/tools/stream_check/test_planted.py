"""Which calls are left out, what counts as finding them, and that the detector finds them in real layouts."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tools.stream_check.__main__ import last_line, main, status
from tools.stream_check.events import Access, Alloc, Event, Line, Memory, Signal, Site, Wait
from tools.stream_check.order import Kind
from tools.stream_check.planted import ROOT, Call, calls
from tools.stream_check.run import Outcome, measured, plant, reaching, run_of

THREAD, COMPUTE, OTHER = (
    Line("thread MainThread", is_thread=True),
    Line("computing stream", is_thread=False),
    Line("other", is_thread=False),
)
RECORD, WAIT, UNREACHED = (
    Call("megatron_llama/a.py", line, line, text) for line, text in ((3, "e.record()"), (7, "s.wait_event(e)"), (9, "s.x()"))
)
CLOCK = Call("megatron_llama/a.py", 5, 6, "devices.synchronize(device)")


def program(*, races: bool = False, shared: bool = True) -> Callable[[Site | None], list[Event]]:
    """One stream writes and another one reads after it: the same bytes if ``shared``, and others in no order if ``races``."""

    def run(skip: Site | None) -> list[Event]:
        recorded = skip != RECORD.site
        events: list[Event] = [Alloc(THREAD, Site("megatron_llama/a.py", 1), COMPUTE, 0, 20, Memory.DEVICE, "slot")]
        events += [Signal(THREAD, Site("megatron_llama/a.py", 1), COMPUTE, 0), Wait(THREAD, Site("megatron_llama/a.py", 1), OTHER, 0)]
        events.append(Access(THREAD, Site("megatron_llama/a.py", 2), COMPUTE, "write", 0, 0, 10, True))
        if races:
            events.append(Access(THREAD, Site("megatron_llama/a.py", 8), OTHER, "race", 0, 0, 10, True))
        if recorded:
            events.append(Signal(THREAD, RECORD.site, COMPUTE, 1))
        events.append(Signal(THREAD, Site("megatron_llama/a.py", 6), COMPUTE, 2))
        if skip != WAIT.site:
            events.append(Wait(THREAD, WAIT.site, OTHER, 1 if recorded else None))
        begin = 0 if shared else 10
        events.append(Access(THREAD, Site("megatron_llama/a.py", 8), OTHER, "read", 0, begin, begin + 10, False))
        return events

    return run


def planted(call: Call, **runs: Callable[[Site | None], list[Event]]) -> Outcome:
    return plant(call, reaching(call, [measured(name, run) for name, run in runs.items()]), runs.__getitem__)


@pytest.mark.parametrize("call", [RECORD, WAIT])
def test_a_call_without_which_there_is_a_race_is_found(call: Call) -> None:
    outcome = planted(call, shared=program())
    assert outcome.found is not None and outcome.found.kind is Kind.STREAMS and outcome.layout == "shared" and not outcome.is_missed


def test_a_call_without_which_nothing_is_wrong_is_missed() -> None:
    outcome = planted(WAIT, apart=program(shared=False))
    assert outcome.is_missed and outcome.why == "no race without it in any layout"


def test_layouts_are_tried_until_two_accesses_have_no_order() -> None:
    """An event that is only waited for without being recorded says less."""
    assert planted(RECORD, apart=program(shared=False), shared=program()).layout == "shared"
    alone = planted(RECORD, apart=program(shared=False))
    assert alone.found is not None and alone.found.kind is Kind.UNRECORDED and not alone.is_missed


def test_a_race_that_is_there_anyway_finds_nothing() -> None:
    assert planted(WAIT, apart=program(shared=False, races=True)).is_missed


def test_a_call_that_no_layout_reaches_is_missed() -> None:
    outcome = planted(UNREACHED, shared=program())
    assert outcome.is_missed and outcome.why == "no layout reaches it"


def test_a_call_that_reads_a_clock_needs_no_race() -> None:
    outcome = planted(CLOCK, shared=program())
    assert not outcome.expected and not outcome.is_missed and "clock" in outcome.why


def test_the_last_line_and_the_exit_status() -> None:
    clean, raced = measured("a", program()), measured("b", program(races=True))
    found, missed, clock = planted(WAIT, a=program()), planted(UNREACHED, a=program()), planted(CLOCK, a=program())
    assert last_line([clean, raced], [found, missed, clock]) == "races 1, accesses 5, layouts 2, planted faults found 1 of 2"
    assert (status([clean], [found, clock]), status([raced], [found]), status([clean], [missed])) == (0, 1, 1)


@pytest.mark.long
def test_every_wait_in_the_text_of_the_package_is_a_call() -> None:
    """Found here by text, there by syntax. A line of ``device.py`` counts where its function is called."""
    words = r"\.(wait_event|wait_stream|record_event|record_stream|synchronize)\(|(work|message)\.wait\(|event\.record\(|devices\.(copy_to_host|wait_for_copies|host_event)\("
    asks = r"\.wait_unsharded\(|\)\.wait\("
    expected = {
        (str(path.relative_to(ROOT)), number)
        for path in (ROOT / "megatron_llama").rglob("*.py")
        if path.name != "device.py" and not {"host", "planner"} & set(path.parts)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if re.search(f"{words}|{asks}" if "shard" in path.parts else words, line) and "``" not in line
    }
    found = {(call.file, line) for call in calls() for line in range(call.first, call.last + 1)}
    layers = {
        (str(path.relative_to(ROOT)), number)
        for path in (ROOT / "megatron_llama" / "model" / "nn").rglob("*.py")
        if "host" not in path.parts
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if re.search(r"\w\.wait\(\)", line)
    }
    # Those of messages with ``async_op=False``.
    assert sorted(Path(file).name for file, _ in layers - found) == [*["dispatch.py"] * 3, "linear.py", "recompute.py", "score.py", "symmetric.py"]
    expected |= layers & found
    assert len(expected) > 20 and expected <= found
    assert all(any((call.file, line) in expected for line in range(call.first, call.last + 1)) for call in calls())


LAYOUTS = ("optim_grads, shards of one rank", "optim_grads_params, shards of one rank", "exact offload, no_shard, no clipping")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_have_no_race(name: str) -> None:
    result = measured(name, run_of(name))
    assert result.accesses > 3000
    assert [str(race) for race in result.races] == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "text"),
    [
        # The gather of a bucket whose shard is whole is a copy in the stream of the gathers.
        ("optim_grads_params, shards of one rank", "devices.current_stream(self._device).wait_event(self._copied)"),
        ("optim_grads, shards of one rank", "self._follow_up.wait_stream(self._issuing)"),
        ("exact offload, no_shard, no clipping", "source.record_stream(self._to_host)"),
    ],
)
def test_a_wait_that_is_left_out_is_named(layout: str, text: str) -> None:
    (call,) = [call for call in calls() if call.text == text]
    result = measured(layout, run_of(layout))
    outcome = plant(call, [result])
    assert outcome.found is not None, outcome.why
    assert outcome.found.first is not None and outcome.found.first.line != outcome.found.second.line
    assert "expected " in outcome.found.missing


def test_the_layouts_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert set(LAYOUTS) < set(capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["zero"], "no layout is called zero; --list names them"),
        ([], "give --all or the names of layouts"),
        (["--all", "optim"], "give --all or the names of layouts"),
        (["optim", "--jobs", "0"], "--jobs: got 0, expected 1 or more"),
    ],
)
def test_wrong_words_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.soak
def test_all_layouts_are_in_order_and_every_planted_fault_is_found() -> None:
    command = [sys.executable, "-m", "tools.stream_check", "--all"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    sums = re.fullmatch(r"races 0, accesses (\d+), layouts (\d+), planted faults found (\d+) of (\d+)", done.stdout.splitlines()[-1])
    assert sums is not None and int(sums[1]) > 10**6 and int(sums[2]) > 100 and sums[3] == sums[4]
