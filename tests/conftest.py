"""What all tests share: one thread, and the pool of workers."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from megatron_llama import cli

from tests import recorded
from tests.harness import Cluster, be_patient
from tests.launcher import TORCH, Launcher
from tests.plant import ERROR_KEYS, plant_in_workers
from tests.refusals import rehearsing
from tests.unsynced import leave_writes_to_the_system

torch.set_num_threads(1)
# torch looks at it once, at the first matrix product on a GPU, and tests in deterministic mode may come after others.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
be_patient()
leave_writes_to_the_system()
# A shell ignores it for what it starts in the background, and so would all processes of tests that send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


MARKS = MappingProxyType({"long": ("--all", "--soak"), "soak": ("--soak",)})
"""Which options ask for the tests of a mark."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also the tests that are marked long, and more cases of those marked few")
    parser.addoption("--error-keys", metavar="FILE", help="append to FILE the errors that tests provoke: see tools/errors_docs")
    parser.addoption("--soak", action="store_true", help="hours of what a usual run does for seconds, and every case")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect the tests without looking for garbage: what is imported stays, and would be looked through again and again as it grows."""
    gc.disable()
    try:
        _import_a_share(session.config)
        return (yield)
    finally:
        gc.freeze()  # two seconds if it were looked through once; next to nothing of it is garbage
        gc.enable()


def _import_a_share(config: pytest.Config) -> None:
    """Have each worker of a whole run import other files first. pytest rewrites their asserts, for longer than all else takes, and keeps
    what it has written: in a fresh clone all workers would rewrite the same file at the same time, and so each of them all files."""
    if hasattr(config, "workerinput") and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        number, count = int(config.workerinput["workerid"].removeprefix("gw")), config.workerinput["workercount"]
        for file in sorted(config.rootpath.glob("tests/**/test_*.py"))[number::count]:
            with suppress(Exception):  # the collection says it
                importlib.import_module(".".join(file.relative_to(config.rootpath).with_suffix("").parts))


def pytest_configure(config: pytest.Config) -> None:
    """Watch the errors of this process, and with ``--error-keys`` those of all."""
    if file := config.getoption("--error-keys"):
        os.environ[ERROR_KEYS] = os.path.abspath(file)
        plant_in_workers()
    recorded.recorder()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked ``long`` or ``soak``, and most cases of what is marked ``few``, unless an option asks for it or the test is
    named on the command line."""
    named = tuple(argument for argument in config.args if "::" in argument)
    wanted = {mark for mark in MARKS if any(config.getoption(option) for option in MARKS[mark]) or mark in config.getoption("-m")}
    unwanted = MARKS.keys() - wanted
    left_out = {item for item in items if any(item.get_closest_marker(mark) for mark in unwanted)}
    if "soak" in unwanted:
        left_out |= _beyond_few((item for item in items if item not in left_out), "long" in wanted)
    left_out = {item for item in left_out if not item.nodeid.startswith(named)} if named else left_out
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _beyond_few(items: Iterable[pytest.Item], long: bool) -> set[pytest.Item]:
    """The cases that the mark ``few`` leaves out. As many as it says stay, from the first to the last at equal distances."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    beyond = set()
    for together in cases.values():
        mark = together[0].get_closest_marker("few")
        assert mark is not None
        count = mark.kwargs.get("all", len(together)) if long else mark.args[0]
        kept = {together[round(number * (len(together) - 1) / max(count - 1, 1))] for number in range(count)}
        beyond |= {*together} - kept
    return beyond


@pytest.fixture(scope="session", autouse=True)
def refusals_are_rehearsed() -> Iterator[None]:
    """What a run of this process refuses, it is made to refuse as a dry run, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "run", rehearsing(cli.run))
        yield


@pytest.fixture(scope="module", autouse=True)
def collected_at() -> set[int]:
    """The numbers of imported modules at which garbage was collected within this file."""
    return set()


@pytest.fixture(autouse=True)
def what_is_there_is_collected_once(collected_at: set[int]) -> None:
    """A command collects garbage when it ends. It would look at every test of the session, and at all that they have imported, each time:
    for longer than most commands take here. The first test of a file may import more."""
    if len(sys.modules) not in collected_at:
        collected_at.add(len(sys.modules))
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def soak(request: pytest.FixtureRequest) -> bool:
    """Whether ``--soak`` was given."""
    return bool(request.config.getoption("--soak"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Worker processes: ``cluster.run(world_size, function, *args)``."""
    with Cluster() as pool:
        yield pool


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """Processes of the command line: ``launcher.run(words, processes)``."""
    with Launcher(tmp_path_factory.mktemp("output")) as started:
        yield started


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """Processes that have imported torch and nothing of the package: ``fresh.run(words, code=...)``."""
    with Launcher(tmp_path_factory.mktemp("fresh"), TORCH) as started:
        yield started


@pytest.fixture(scope="session")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight tokenizers as third parties ship them, each in a folder of its name: see ``tests/data/tokenizer/layouts.py``. Copy what you change."""
    from tests.data.tokenizer.layouts import write_layouts

    folder = tmp_path_factory.mktemp("layouts")
    write_layouts(folder)
    return folder
