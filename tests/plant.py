"""A plugin of pytest that plants faults in the package for a whole session: would these tests notice?

``pytest -p tests.plant --plant "norms decay" tests/engine/test_gradients.py`` runs a file with a fault of ``tests/prove/faults.py``;
``--catalogue MODULE:NAME`` names another collection of ``Planted`` (``tests.mutations:CATALOGUE``). ``--reach FILE`` plants none: it appends to FILE, for each test file, the
names of the faults whose code its tests call, which are the only ones that they could notice. ``--results FILE`` has a line of JSON for each
part of a test that ends.

Faults are planted where the package runs: in this process, in the workers of a pool and in what ``tests/launcher.py`` starts, which learn
of them from the environment. A process that a test starts in another way runs the package as it is.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cache, wraps
from importlib import import_module
from multiprocessing import forkserver
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable
from unittest import mock

if TYPE_CHECKING:
    import pytest

SEEDED = "tests.prove.faults:CATALOGUE"
VARIABLE = "MEGATRON_LLAMA_TESTS_PLANT"
"""Holds an ``Order``, for the processes that tests start."""
ERROR_KEYS = "MEGATRON_LLAMA_TESTS_ERROR_KEYS"
"""Names the file to which they append the errors that they make: see ``tests/recorded.py``."""


class Planted(Protocol):
    """Something that is wrong for as long as its patch is entered."""

    @property
    def name(self) -> str:
        """What tables call it."""
        ...

    @property
    def patch(self) -> Callable[[], AbstractContextManager[object]]:
        """Makes the context in which it is wrong."""
        ...


@runtime_checkable
class Recorded(Planted, Protocol):
    """Something planted that itself knows when it is reached."""

    def record(self, reached: Callable[[], None]) -> None:
        """Have the package call ``reached`` where it would be wrong."""
        ...


@dataclass(frozen=True)
class Order:
    """What to plant."""

    catalogue: str
    names: tuple[str, ...]
    reach: str | None = None
    """The file that learns what is called, in place of planting anything."""


class Turn:
    """Which test file's turn it is, in memory that all processes of a session share: a worker outlives the file that has started it."""

    def __init__(self, file: str) -> None:
        with open(file, "a+b") as opened:
            opened.truncate(mmap.PAGESIZE)
            self._shared = mmap.mmap(opened.fileno(), mmap.PAGESIZE)

    @property
    def path(self) -> str:
        """Empty before the first."""
        return self._shared[: self._shared.find(b"\0")].decode()

    @path.setter
    def path(self, path: str) -> None:
        whole = path.encode() + b"\0"
        self._shared[: len(whole)] = whole


def path_of(node: pytest.Item | pytest.Collector) -> str:
    """Return the file of a test, relative to the root. Names of tests do not have it if it is elsewhere."""
    return os.path.relpath(node.path, node.config.rootpath)


@dataclass(frozen=True)
class Turns:
    """Says whose turn it is. What a file does when it is imported is its own, too."""

    turn: Turn

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        self.turn.path = path_of(collector)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.turn.path = path_of(item)


@dataclass(frozen=True)
class Target:
    """What a patch replaces."""

    owner: Any
    attribute: str

    @property
    def name(self) -> str:
        """As it would be imported."""
        place = self.owner.__name__ if not isinstance(self.owner, type) else f"{self.owner.__module__}.{self.owner.__qualname__}"
        return f"{place}.{self.attribute}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--plant", action="append", default=[], metavar="NAME", help="run with this fault in the package (can be repeated)")
    parser.addoption("--reach", metavar="FILE", help="append to FILE the names of the faults whose code is called")
    parser.addoption("--results", metavar="FILE", help="append to FILE what becomes of each test: a line of JSON")
    parser.addoption("--catalogue", default=SEEDED, metavar="MODULE:NAME", help="the faults (default: %(default)s)")


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Before anything of the package is imported into a test: it gets the wrong one then, as the rest of the package does."""
    given = early_config.known_args_namespace
    if given.plant or given.reach:
        order = Order(given.catalogue, tuple(given.plant), given.reach and os.path.abspath(given.reach))
        os.environ[VARIABLE] = json.dumps(asdict(order))
        plant_what_is_ordered()


def pytest_configure(config: pytest.Config) -> None:
    if file := config.getoption("--results"):
        config.pluginmanager.register(Results(file))
    if file := config.getoption("--reach"):
        config.pluginmanager.register(Turns(turn_of(os.path.abspath(file))))


class Results:
    """Writes what becomes of tests, and of files that cannot be imported."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._collected = ""

    def pytest_collectstart(self, collector: pytest.Collector) -> None:
        self._collected = path_of(collector)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._append(report, report.location[0], report.when or "", report.duration)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._append(report, self._collected, "collect", 0.0)

    def _append(self, report: pytest.TestReport | pytest.CollectReport, path: str, when: str, seconds: float) -> None:
        crash = getattr(report.longrepr, "reprcrash", None)  # what says it in one message, where there is one
        said = (crash.message if crash else report.longreprtext).strip().splitlines()
        message = (said[0] if crash else said[-1].removeprefix("E ").strip()) if said else ""
        values = {"file": path, "test": report.nodeid, "when": when, "outcome": report.outcome, "seconds": seconds, "message": message}
        with open(self._file, "a") as results:
            results.write(json.dumps(values) + "\n")


@cache  # a fork has what its parent has
def plant_what_is_ordered() -> ExitStack:
    """Plant what the environment orders, once, and as long as this process lives: what holds the patches is kept here."""
    planted = ExitStack()
    if VARIABLE not in os.environ:
        return planted
    order = Order(**json.loads(os.environ[VARIABLE]))
    faults = catalogue(order.catalogue)
    unknown = set(order.names) - faults.keys()
    if unknown:
        raise LookupError(f"{order.catalogue} has no {', '.join(sorted(unknown))}; it has {', '.join(faults)}")
    if order.reach is not None:
        for fault in faults.values():
            record_calls(fault, order.reach)
    for name in order.names:
        planted.enter_context(faults[name].patch())
    plant_in_workers()
    return planted


def plant_in_workers() -> None:
    """Have the server that workers are forked from import what plants there. A pool names its imports before the server starts."""
    name_imports = forkserver.set_forkserver_preload

    def name_one_more(modules: list[str]) -> None:
        name_imports([*modules, "tests.planted"])

    setattr(forkserver, "set_forkserver_preload", name_one_more)  # noqa: B010  # which its users look up when they call it


def catalogue(place: str) -> dict[str, Planted]:
    """Return by name what a module offers to plant. ``place``: MODULE:NAME."""
    module, _, name = place.partition(":")
    return {planted.name: planted for planted in getattr(import_module(module), name)}


def find_targets(planted: Planted) -> tuple[Target, ...]:
    """Return what a patch replaces."""
    with ExitStack() as entered:
        targets = entered.enter_context(_entered_patches())
        entered.enter_context(planted.patch())
        return tuple(targets)


@contextmanager
def _entered_patches() -> Iterator[list[Target]]:
    """Yield a list of what is replaced from now on."""
    patcher = mock._patch  # the type of what patch.object returns
    enter = patcher.__enter__
    targets: list[Target] = []

    def note(entered: Any) -> Any:
        value = enter(entered)
        targets.append(Target(entered.target, entered.attribute))
        return value

    with mock.patch.object(patcher, "__enter__", note):
        yield targets


@cache
def turn_of(file: str) -> Turn:
    """Return whose turn it is to reach what FILE has names for."""
    return Turn(f"{file}.turn")


def record_calls(planted: Planted, file: str) -> None:
    """Append the test file and the name of a fault to a file as soon as this process calls what its patch replaces, once for each test file."""
    turn = turn_of(file)

    @cache
    def reached_in(path: str) -> None:
        with open(file, "a") as names:  # whole lines, whoever else appends
            names.write(f"{path}\t{planted.name}\n")

    def reached() -> None:
        reached_in(turn.path)

    if isinstance(planted, Recorded):
        return planted.record(reached)
    for target in find_targets(planted):
        original = vars(target.owner).get(target.attribute) or getattr(target.owner, target.attribute)
        if isinstance(original, type):
            # It stays the class that others know.
            setattr(original, "__init__", _recording(vars(original)["__init__"], reached))  # noqa: B010
        else:
            setattr(target.owner, target.attribute, _recording(original, reached))


def _recording(original: Any, reached: Callable[[], None]) -> Any:
    if isinstance(original, staticmethod | classmethod):
        return type(original)(_recording(original.__func__, reached))
    if not callable(original):
        reached()  # nothing says who reads it
        return original

    @wraps(original)
    def record(*args: Any, **options: Any) -> Any:
        reached()
        return original(*args, **options)

    return record


def split_by_targets(faults: Sequence[Planted]) -> Iterator[list[Planted]]:
    """Yield the faults in few lists that can be planted together: no two in a list replace the same thing."""
    left = list(faults)
    while left:
        together: list[Planted] = []
        replaced: set[str] = set()
        for fault in left:
            names = {target.name for target in find_targets(fault)}
            if not names & replaced:
                together.append(fault)
                replaced |= names
        yield together
        left = [fault for fault in left if fault not in together]
