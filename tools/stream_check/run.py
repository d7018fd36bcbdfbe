"""Records layouts, checks their order, and leaves out one call after the other."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tools.stream_check.events import Event, RecordStream, Signal, Site, Wait
from tools.stream_check.layouts import layouts
from tools.stream_check.order import Race, check
from tools.stream_check.planted import Call, reason

Run = Callable[[Site | None], list[Event]]
"""Records a layout, with what is done at a site left out."""


@dataclass(frozen=True)
class Result:
    """What one layout shows."""

    layout: str
    races: tuple[Race, ...]
    accesses: int
    events: int
    seconds: float
    sites: frozenset[Site]
    """Where an order is made."""


@dataclass(frozen=True)
class Outcome:
    """What came of leaving out one call."""

    call: Call
    found: Race | None
    layout: str
    """Where it was found; "" if it was not."""
    why: str
    """Why nothing was found, or why nothing had to be."""
    expected: bool
    """Whether it has to be found."""

    @property
    def is_missed(self) -> bool:
        """Whether it had to be found and was not."""
        return self.expected and self.found is None


def run_of(name: str) -> Run:
    """Return the run of a layout. Raises KeyError if there is none of this name."""
    return layouts()[name]


def result_of(name: str) -> Result:
    """Record and check one layout."""
    return measured(name, run_of(name))


def measured(name: str, run: Run) -> Result:
    """Record and check ``run``."""
    begin = time.perf_counter()
    events = run(None)
    verdict = check(events)
    sites = frozenset(
        site
        for event in events
        if isinstance(event, Signal | Wait | RecordStream)
        for site in (event.site, *(event.through if isinstance(event, Wait) else ()))
    )
    return Result(
        name, verdict.races, verdict.accesses, len(events), time.perf_counter() - begin, sites
    )


def plant(call: Call, reached_by: Sequence[Result], runs: Callable[[str], Run] = run_of) -> Outcome:
    """Leave a call out of the layouts that reach it, in their order, until one of them shows two
    accesses without an order that it orders with the call. An event that is waited for and not
    recorded counts if nothing else is found."""
    why = "no layout reaches it"
    unrecorded = None
    for result in reached_by:
        known = {race.places for race in result.races}
        for site in sorted(result.sites, key=lambda site: site.line):
            if not call.has(site):
                continue
            races = check(runs(result.layout)(site)).races
            for race in races:
                if race.places in known:
                    continue
                found = Outcome(call, race, result.layout, "", expected=True)
                if race.first is not None:
                    return found
                unrecorded = unrecorded or found
            why = "no race without it in any layout"
    if unrecorded is not None:
        return unrecorded
    stated = reason(call)
    return Outcome(call, None, "", stated or why, expected=not stated)


def reaching(call: Call, results: Sequence[Result]) -> list[Result]:
    """Return the layouts that reach a call, those with the fewest events first."""
    found = [result for result in results if any(call.has(site) for site in result.sites)]
    return sorted(found, key=lambda result: result.events)


@contextmanager
def processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of so many processes with one thread for operators each."""
    # Spawned: a recording starts threads, and a fork of a process with threads may hang.
    with ProcessPoolExecutor(
        jobs,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(1,),
    ) as pool:
        yield pool
