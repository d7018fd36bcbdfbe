"""The tool that harms: a slice of every part, and that it can fail."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tools.harm import hostiling
from tools.harm.corrupting import Corruptor, contents
from tools.harm.corruptions import DAMAGES, draw
from tools.harm.formats import FORMATS, READ, Format, Values, digest
from tools.harm.hostile_inputs.case import Hostile
from tools.harm.judging import VERDICTS, Journal, Result, judge, table
from tools.harm.kills import processes_in
from tools.harm.materials import Workshop
from tools.harm.sandbox import GIB, Limits, Outcome, RefusedError, run_forked

FEW = Limits(5.0, GIB)
SEED = 3


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("harm") / "materials")


def test_damage_is_drawn_from_its_seed_and_changes_the_file() -> None:
    files = {"a.json": b'{"layers": 12, "rate": 0.5}', "b.bin": bytes(range(256)) * 40}
    siblings = [{"a.json": b"{}", "b.bin": b"\1" * 10}]
    kinds = set()
    for number in range(300):
        once, again = (draw(random.Random(number), files, siblings) for _ in range(2))
        assert once == again and once.content != files[once.file]
        kinds.add(once.kind)
    assert kinds == set(DAMAGES)


def refuse() -> Values:
    raise RefusedError("no")


def print_traceback_and_refuse() -> Values:
    print("Traceback (most recent call last)")
    raise RefusedError("no")


def fill_memory() -> Values:
    # Not a bytearray: malloc may have kept as much of what was freed before.
    with mmap.mmap(-1, 300 * 2**20) as held:
        held[:: 2**12] = bytes(len(held) // 2**12)
    return {}


def overflow() -> Values:
    bytearray(64 * GIB)
    return {}


def recur() -> Values:
    return recur()


def die() -> Values:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def spin() -> Values:
    while True:
        pass


def wait_for_ever() -> Values:
    signal.pause()
    return {}


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("task", "end"),
    [
        (lambda: {"a": "b"}, "done"),
        (refuse, "refused"),
        (print_traceback_and_refuse, "traceback"),
        (recur, "traceback"),
        (die, "traceback"),
        (fill_memory, "memory"),
        (overflow, "memory"),
        (spin, "time"),
        pytest.param(wait_for_ever, "time", marks=pytest.mark.long),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_child_ends_in_one_of_five_ways(task, end: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    # What ends by itself has time for it on a machine that is busy with something else.
    outcome = run_forked(task, tmp_path, Limits(0.5 if end == "time" else 20.0, 100 * 2**20))
    assert outcome.end == end
    assert outcome.values == ({"a": "b"} if end == "done" else {})


def test_a_verdict_on_every_difference() -> None:
    usual = Outcome("done", "step 1: 3 ms\n", {"tensor w": "1", "carried version": "4"}, 0.0, 0)

    def verdict(words: str, sealed: bool = True, **values: str) -> str:
        harmed = {**usual.values, **{name.replace("_", " "): text for name, text in values.items()}}
        return judge(Outcome("done", words, harmed, 0.0, 0), usual, sealed=sealed)[0]

    assert verdict("step 1: 9 ms\n") == "equal"
    assert verdict("", tensor_w="2") == "silent"
    assert verdict("", tensor_w="2", sealed=False) == "unknowable"
    assert verdict(" warning: w.bin is damaged\n", tensor_w="2") == "harmless"
    assert verdict("", carried_version="5", sealed=False) == "harmless"
    assert verdict("", carried_version="5") == "silent"


@pytest.mark.long
def test_native_checkpoints_and_a_reader_that_ignores_a_flip(shop: Workshop, tmp_path: Path) -> None:
    """Our reader refuses a changed weight. One that reads the bytes and checks nothing is found. By an export: what a run refuses here is
    rehearsed as a dry run, which reads no weights."""

    def read_blindly(_: Workshop) -> Values:
        return {name: digest(content) for name, content in contents(READ).items()}

    only = {"only": lambda name: name.endswith(".distcp")}
    ours = Corruptor(FORMATS["native/export"], shop, tmp_path / "ours", SEED, **only)
    blind = Corruptor(replace(FORMATS["native/export"], read=read_blindly), shop, tmp_path / "blind", SEED, **only)
    flips = [case for case in range(20) if ours.corruption(case).kind == "flip"][:2]
    assert len(flips) == 2
    for case in flips:
        assert ours.corruption(case) == blind.corruption(case)
        assert ours.result(case).verdict in ("refused", "equal")
        assert blind.result(case).verdict == "silent"


@pytest.mark.long
@pytest.mark.parametrize("name", ["options-file", "trainer-logs", "tokenizer/ranks"])
def test_formats_are_read_unharmed_and_harmed(name: str, shop: Workshop, tmp_path: Path) -> None:
    corruptor = Corruptor(FORMATS[name], shop, tmp_path / "scratch", SEED)
    assert corruptor.pristine.end == "done" and corruptor.pristine.values
    for case in range(3):
        assert corruptor.result(case).verdict in VERDICTS


@pytest.fixture
def attacker(shop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hostiling.Attacker]:
    """It reads one format, in which nothing is looked at."""

    def read(_: Workshop) -> Values:
        shutil.copytree(READ, "out")
        return {"files": str(sorted(contents(Path("out"))))}

    monkeypatch.setattr(hostiling, "FORMATS", {"blind": Format("blind", "options-file", read, True)})
    yield hostiling.Attacker(shop, tmp_path / "scratch")


def test_a_stolen_file_and_code_that_ran_are_found(attacker: hostiling.Attacker, monkeypatch: pytest.MonkeyPatch) -> None:
    def steal(folder: Path) -> None:
        (folder / "stolen").symlink_to(folder.parent / hostiling.places.SECRET_FILE)

    def run_code(folder: Path) -> None:
        (folder.parent / hostiling.binaries.MARK).touch()

    cases = [Hostile("steal", "blind", steal), Hostile("run", "blind", run_code), Hostile("nothing", "blind", lambda folder: None)]
    monkeypatch.setattr(attacker, "_cases", cases)
    found = [attacker.result(number) for number in range(3)]
    assert [result.verdict for result in found] == ["silent", "silent", "equal"]
    assert "in out/stolen" in found[0].details and "code" in found[1].details


def test_hostile_inputs_are_many_and_of_formats_that_exist() -> None:
    cases = hostiling.all_cases()
    assert len(cases) >= 300 and {case.format for case in cases} <= set(FORMATS)
    chosen = hostiling.spread(list(FORMATS), 50)
    assert len(chosen) == 50 == len(set(chosen))


def test_a_journal_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    result = Result("corrupt", "native", 4, "flip", "refused", "", 0.5, 0)
    Journal(path).add(result)
    with path.open("a") as file:
        file.write('{"part": "cor')  # as a killed run leaves it
    again = Journal(path)
    assert ("corrupt", "native", 4) in again and list(again.results.values()) == [result]
    assert list(table([result]))[2] == "| corrupt | native | 1 | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 0 |"


def test_a_process_that_holds_a_file_is_seen(tmp_path: Path) -> None:
    assert processes_in(tmp_path) == []
    begun = tmp_path / "begun"

    def hold() -> Values:
        with (tmp_path / "held").open("w"):
            begun.touch()
            signal.pause()
        return {}

    child = os.fork()
    if child == 0:
        try:
            hold()
        finally:
            os._exit(0)
    while not begun.exists():
        os.sched_yield()
    seen = processes_in(tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert seen == [child]
