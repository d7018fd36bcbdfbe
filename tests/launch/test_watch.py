"""Ranks that die, and ranks that hang because of it: real processes, real connections, and a name in every last word."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron_llama import cli
from megatron_llama.config.schema import Config, ParallelConfig
from megatron_llama.engine.comm.recorder import Recorder, Wait
from megatron_llama.errors import DataError, TrainingError, UserError
from megatron_llama.launch.flight_recorder import BUFFER_SIZE, turn_on
from megatron_llama.launch.hang_report import grouped, hang_report, named
from megatron_llama.launch.join import join
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.launch.store import open_store
from megatron_llama.launch.watch import Diagnosis, Position, diagnose
from megatron_llama.schedule import Action, Op
from megatron_llama.train.api.common.watched import watched

from tests.harness import PRELOAD
from tests.launcher import free_port
from tests.parallel.cases import Layout, trainer

RANKS = 4
SOON = 180.0
"""Seconds within which every other rank is to end."""


def enter(place: Place, folder: Path, work: Callable[[Place], None]) -> None:
    """A rank's life: what it says goes to a file."""
    os.dup2(os.open(folder / f"{place.rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if isinstance(work, DiesAtTheStart):
        try:
            work(place)
        except UserError:
            os._exit(1)
        return
    turn_on(os.environ)
    store = open_store(place, timedelta(minutes=1), hosts=place.rank == 0)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world_size, timeout=timedelta(minutes=10))
    try:
        with watched(place) as watch:
            watch.keep(store)
            del store
            if not isinstance(work, HangsInAStep | TakesItsTime | Leaves):  # they have a watch of their own
                watch.start("this attempt")
            work(place)
    except UserError:
        os._exit(1)


def last_words(folder: Path, work: Callable[[Place], None], ends: int) -> tuple[list[int | None], list[str]]:
    """Exit status and complaints of every rank; those that do not end within ``SOON`` after rank ``ends`` has ended have None."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "tests.launch.test_watch"])
    port = free_port()
    places = [Place(rank, RANKS, rank, "127.0.0.1", port) for rank in range(RANKS)]
    processes = [context.Process(target=enter, args=(place, folder, work), daemon=True) for place in places]
    for process in processes:
        process.start()
    processes[ends].join(SOON)
    deadline = time.monotonic() + SOON
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes, [(folder / f"{rank}.err").read_text() for rank in range(RANKS)]


class DiesInAStep:
    """Trains; one rank is killed inside its third forward pass."""

    def __init__(self, layout: Layout, victim: int) -> None:
        self.layout, self.victim = layout, victim

    def __call__(self, place: Place) -> None:
        run, passes = trainer(place, self.layout), 0

        def count(*_: object) -> None:
            nonlocal passes
            passes += 1
            if place.rank == self.victim and passes == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        for stage in run.stages.values():
            stage.register_forward_pre_hook(count)
        for step in range(1000):
            run.step(step % 8)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), 1, pytest.param(3, marks=pytest.mark.long)])
def test_a_rank_killed_in_a_step_is_named_by_all_others(victim: int, tmp_path: Path) -> None:
    layout = Layout(pp=2, dp=2, microbatches=2, strategy="optim_grads")
    codes, said = last_words(tmp_path, DiesInAStep(layout, victim), victim)
    assert codes == [-signal.SIGKILL if rank == victim else 1 for rank in range(RANKS)], said
    for rank in set(range(RANKS)) - {victim}:
        named = (f"rank {victim}: got no answer, expected all ranks at work", f"was ended: rank {victim} does not answer")
        assert any(words in said[rank] for words in named), (rank, said[rank])


class HangsInAStep:
    """Trains with a watch of its own; some ranks stop in their second step, alive, before their third forward pass."""

    def __init__(self, layout: Layout, *victims: int) -> None:
        self.layout, self.victims = layout, victims

    def __call__(self, place: Place) -> None:
        run, passes = trainer(place, self.layout), 0

        def stop(*_: object) -> None:
            nonlocal passes
            passes += 1
            if place.rank in self.victims and passes == 3:
                threading.Event().wait()

        for stage in run.stages.values():
            stage.register_forward_pre_hook(stop)
        run.step(0)  # the first step, with its imports and connections, may take longer than anybody waits below
        with watched(place, PATIENCE) as watch:
            watch.recorder = run.mesh.recorder
            watch.start("this attempt")
            for step in range(1, 1000):
                run.mesh.recorder.iteration = step + 1
                run.step(step % 8)


PATIENCE = 3.0
"""Seconds that a rank may wait; the backend would wait for ten minutes."""


@pytest.mark.long
def test_a_rank_that_is_alive_but_stuck_is_named_by_all(tmp_path: Path) -> None:
    codes, said = last_words(tmp_path, HangsInAStep(Layout(pp=2, dp=2, microbatches=2, strategy="optim_grads"), 3), 3)
    assert codes == [1] * RANKS, said
    for rank, words in enumerate(said):
        assert "rank 3 stopped in forward 0 of stage 1 (iteration 2)" in words.splitlines()[-1], (rank, words)
        assert "rank 2 is in backward 0 of stage 1 (iteration 2), waiting for gradients (reduce_scatter " in words, (rank, words)
        assert "(--distributed-timeout-minutes)" in words and "Traceback" not in words, (rank, words)


@pytest.mark.long
def test_the_collective_that_a_stuck_rank_has_not_begun_is_named_by_all(tmp_path: Path) -> None:
    """By torch's flight recorder: of two that do not end the one first in which nobody is missing but the rank that stopped."""
    codes, said = last_words(tmp_path, HangsInAStep(Layout(tp=2, dp=2, microbatches=2), 3), 3)
    assert codes == [1] * RANKS, said
    stuck = r"; collective (\d+) of tp does not end: rank 2 in all_reduce of Float 32x2x64, not rank 3 \(last: all_reduce (\d+)\)"
    after = r"; collective \d+ of world does not end: ranks 0, 1 in all_reduce of Double 1, not ranks 2, 3 \(last: all_reduce \d+\)"
    for rank, words in enumerate(said):
        found = re.search(stuck + after, words)
        assert found is not None and int(found[1]) == int(found[2]) + 1, (rank, words)


@pytest.mark.long
def test_ranks_that_all_stop_in_a_launch_are_ended(tmp_path: Path) -> None:
    """As the hosts of GPUs that stand still do when the queue of launches is full: no rank says that it waits for anything."""
    work = HangsInAStep(Layout(dp=4, microbatches=2, strategy="optim_grads"), *range(RANKS))
    codes, said = last_words(tmp_path, work, 0)
    assert codes == [1] * RANKS, said
    for rank, words in enumerate(said):
        assert "ranks 0-3 stopped in forward 0 of stage 0 (iteration 2)" in words and "nothing went on for 3 s" in words, (rank, words)


@dataclass(frozen=True)
class TakesItsTime:
    """Every rank saves, or does something for the first time, until one of them has said that it has been there for long."""

    folder: Path
    first_time: bool

    def __call__(self, place: Place) -> None:
        with watched(place, PATIENCE) as watch:
            watch.start("this attempt")
            recorder = watch.recorder
            recorder.enter("forward 0", part="forward")
            if self.first_time:
                self.long()
            else:
                with recorder.outside_steps("saving"):
                    self.long()
            recorder.enter("the update", part="update")

    def long(self) -> None:
        end = threading.Event()
        while not any("note:" in (self.folder / f"{rank}.err").read_text() for rank in range(RANKS)):
            end.wait(0.01)


@pytest.mark.long
@pytest.mark.parametrize("first_time", [False, pytest.param(True, marks=pytest.mark.long)])
def test_what_may_take_long_ends_no_rank(first_time: bool, tmp_path: Path) -> None:
    """Saves, exports, kernels that are compiled: one of the ranks says where they are, and none is ended."""
    codes, said = last_words(tmp_path, TakesItsTime(tmp_path, first_time), 0)
    assert codes == [0] * RANKS, said
    where = "forward 0" if first_time else "saving"
    assert re.fullmatch(rf"note: rank \d has been in {where} \(iteration 0\) for \d s: it is slow, or it stands still\n", "".join(said))


class Ending(StrEnum):
    NORMAL = "normal"
    EVERYWHERE = "an error of all"
    USER = "an error of one"
    MEMORY = "no memory"
    ABORT_HANGS = "a hang in leaving"
    DESTROY_HANGS = "a hang at the end"
    CONTROL_C = "control-C"


ALONE = 1
"""The rank that has an error of its own."""


@dataclass(frozen=True)
class Leaves:
    """Comes to an end, inside of the command line, where leaving the process group is as on a GPU: to destroy it waits for kernels that
    never end if a rank has left alone, and on rank 1 at the end of all; to abort it does not, unless that hangs."""

    ending: Ending

    def __call__(self, place: Place) -> None:
        def hang() -> None:
            threading.Event().wait()

        def leave(words: str, last: Callable[[], None], *, hangs: bool) -> None:
            print(words, file=sys.stderr, flush=True)
            last() if not hangs else hang()

        abort, destroy = dist.distributed_c10d._abort_process_group, dist.destroy_process_group
        all_leave = self.ending in (Ending.NORMAL, Ending.EVERYWHERE)
        here = place.rank == ALONE
        dist.destroy_process_group = lambda: leave("destroys", destroy, hangs=not all_leave and (here or self.ending != Ending.DESTROY_HANGS))
        dist.distributed_c10d._abort_process_group = lambda: leave("aborts", abort, hangs=here and self.ending == Ending.ABORT_HANGS)
        cli.run = lambda words: self.command(place)  # type: ignore[assignment]
        os._exit(self.main())

    def main(self) -> int:
        """The exit status, as the interpreter has it."""
        try:
            return cli.main([])
        except SystemExit as end:
            assert isinstance(end.code, int)
            return end.code
        except BaseException as error:
            traceback.print_exception(error)
            return 1

    def command(self, place: Place) -> int:
        with watched(place, PATIENCE if self.ending == Ending.DESTROY_HANGS else math.inf) as watch:
            watch.start("this attempt")
            dist.all_reduce(torch.zeros(1))
            if self.ending == Ending.EVERYWHERE:
                raise TrainingError("too warm")
            if place.rank == ALONE:
                if self.ending == Ending.USER:
                    raise DataError("too few")
                if self.ending == Ending.CONTROL_C:
                    raise KeyboardInterrupt
                if self.ending in (Ending.MEMORY, Ending.ABORT_HANGS):
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            if self.ending not in (Ending.NORMAL, Ending.DESTROY_HANGS):
                dist.all_reduce(torch.zeros(1))
        return 0


@pytest.mark.long
@pytest.mark.parametrize("ending", [Ending.NORMAL, Ending.EVERYWHERE])
def test_ranks_that_end_together_destroy_the_group(ending: Ending, tmp_path: Path) -> None:
    """After the error has been printed, if there is one."""
    codes, said = last_words(tmp_path, Leaves(ending), 0)
    error = ending == Ending.EVERYWHERE
    assert codes == [int(error)] * RANKS, said
    assert said == [f"{'error: too warm' + chr(10) if error else ''}destroys\n"] * RANKS


@pytest.mark.long
@pytest.mark.parametrize(
    "ending", [Ending.USER, *(pytest.param(one, marks=pytest.mark.long) for one in (Ending.MEMORY, Ending.ABORT_HANGS, Ending.CONTROL_C))]
)
def test_a_rank_that_leaves_alone_says_why_and_waits_for_nobody(ending: Ending, tmp_path: Path) -> None:
    codes, said = last_words(tmp_path, Leaves(ending), ALONE)
    interrupted = ending == Ending.CONTROL_C
    assert codes == [130 if interrupted and rank == ALONE else 1 for rank in range(RANKS)], said
    mine = said[ALONE].splitlines()
    if ending == Ending.USER:
        assert mine == ["error: too few", "aborts"]
    elif interrupted:
        assert mine == ["aborts", "interrupted"]
    else:
        assert mine[0] == "Traceback (most recent call last):"
        assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB." in mine[: mine.index("aborts")]
        hung = mine[mine.index("aborts") + 1 :]
        assert bool(hung) == (ending == Ending.ABORT_HANGS) and all("rank 1 was stuck, and was ended: rank 1 failed" in line for line in hung)
    for rank in set(range(RANKS)) - {ALONE}:
        words = said[rank]
        # Of a rank that has failed the others know; one that was interrupted is gone.
        blamed = "rank 1: got no answer" if interrupted else "rank 1: got an error, expected all ranks at work"
        ended = f"was ended: rank 1 {'does not answer' if interrupted else 'failed'}"
        assert (blamed in words or ended in words) and "Traceback" not in words, (rank, words)


@pytest.mark.long
def test_a_rank_that_hangs_in_leaving_at_the_end_is_ended(tmp_path: Path) -> None:
    codes, said = last_words(tmp_path, Leaves(Ending.DESTROY_HANGS), ALONE)
    assert codes == [int(rank == ALONE) for rank in range(RANKS)], said
    assert [words.splitlines()[:1] for words in said] == [["destroys"]] * RANKS
    assert "rank 1 was stuck, and was ended: rank 1 waits for what does not come" in said[ALONE]
    assert "rank 1 is in the end (iteration 0), waiting for what is under way" in said[ALONE], said[ALONE]
    assert all(words == "destroys\n" for rank, words in enumerate(said) if rank != ALONE), said


@dataclass(frozen=True)
class EndsBeforeAnother:
    """One rank comes to its end; when it is gone, rank 3 dies, for which the others wait."""

    first: int

    def __call__(self, place: Place) -> None:
        others = [rank for rank in range(RANKS) if rank != self.first]
        pids: list[int] = [0] * RANKS
        dist.all_gather_object(pids, os.getpid())
        end = select.poll()
        end.register(os.pidfd_open(pids[self.first]), select.POLLIN)
        dist.barrier()
        group = dist.new_group(others)
        if place.rank == self.first:
            return
        if place.rank == 3:
            # The first rank may stay for those who still need the store, but no longer than until they know.
            store = dist.PrefixStore("this attempt/watch", dist.TCPStore(place.master_addr, place.master_port, is_master=False))
            store.wait([f"left/{self.first}"])
            if self.first:
                end.poll()
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.zeros(1), group=group)


@pytest.mark.long
@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_rank_that_has_come_to_its_end_is_not_missed(first: int, tmp_path: Path) -> None:
    codes, said = last_words(tmp_path, EndsBeforeAnother(first), 3)
    assert codes == [0 if rank == first else -signal.SIGKILL if rank == 3 else 1 for rank in range(RANKS)], said
    assert said[first] == ""
    for rank in {0, 1, 2} - {first}:
        named = ("rank 3: got no answer, expected all ranks at work", "was ended: rank 3 does not answer")
        assert any(words in said[rank] for words in named), (rank, said[rank])


@dataclass(frozen=True)
class DiesAtTheStart:
    """Rank 2 dies as soon as it has found the others, before or after they have connected."""

    connected: bool

    def __call__(self, place: Place) -> None:
        with watched(place, PATIENCE) as watch:
            if place.rank == 2 and not self.connected:
                watch.start = lambda attempt: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
            world, device = join(ParallelConfig(), place, watch)
            assert int(os.environ[BUFFER_SIZE]) > 0
            if place.rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            build_mesh(Config(), rank=place.rank, world_size=place.world_size, device=device, recorder=world.recorder)


@pytest.mark.long
@pytest.mark.parametrize("connected", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_rank_that_dies_at_the_start_is_named_by_all_others(connected: bool, tmp_path: Path) -> None:
    codes, said = last_words(tmp_path, DiesAtTheStart(connected), 2)
    assert codes == [-signal.SIGKILL if rank == 2 else 1 for rank in range(RANKS)], said
    for rank in (0, 1, 3):
        named = ("rank 2: got no answer, expected all ranks at work", "was ended: rank 2 does not answer")
        assert any(words in said[rank] for words in named) and "Traceback" not in said[rank], (rank, said[rank])


def chain(place: Place) -> None:
    """Rank 3 dies. Rank 2, which waits for it, learns that; 1 waits for 0, which is alive but waits for something else."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dist.all_reduce(torch.zeros(1))
    if place.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if place.rank == 0:
        threading.Event().wait()
    dist.all_reduce(torch.zeros(1), group=groups[place.rank // 2])


@pytest.mark.long
def test_ranks_that_wait_for_a_live_but_blocked_rank_end_too(tmp_path: Path) -> None:
    codes, said = last_words(tmp_path, chain, 3)
    assert codes == [1, 1, 1, -signal.SIGKILL], said
    assert "rank 3: got no answer, expected all ranks at work; look at what that rank printed last" in said[2]
    assert "rank 0 was stuck, and was ended: rank 3 does not answer" in said[0]
    assert "rank 3" in said[1] and ("was ended: rank 3 does not answer" in said[1] or "rank 3: got no answer" in said[1])


def fails(place: Place) -> None:
    """Rank 2 has an error of its own while the others wait for it."""
    dist.all_reduce(torch.zeros(1))
    if place.rank == 2:
        raise RuntimeError("out of paper")
    if place.rank == 0:
        threading.Event().wait()
    dist.all_reduce(torch.zeros(1))


@pytest.mark.long
def test_an_error_of_one_rank_is_not_called_a_death(tmp_path: Path) -> None:
    """Nobody is missing: rank 2 says what happened, and those that were stuck say who failed."""
    codes, said = last_words(tmp_path, fails, 2)
    assert codes == [1] * RANKS, said
    assert "RuntimeError: out of paper" in said[2]
    assert "rank 0 was stuck, and was ended: rank 2 failed" in said[0]
    assert not any("does not answer" in words or "got no answer" in words for words in said)


def in_peace(place: Place) -> None:
    dist.all_reduce(torch.zeros(1))


def test_a_job_that_ends_well_says_nothing(tmp_path: Path) -> None:
    assert last_words(tmp_path, in_peace, 0) == ([0] * RANKS, [""] * RANKS)


def test_where_a_rank_is() -> None:
    recorder = Recorder()
    assert hang_report(recorder) == "the start (iteration 0)"
    recorder.iteration, recorder.doing = 17, Action(Op.BACKWARD_INPUT, stage=1, microbatch=3)
    assert hang_report(recorder) == "backward input 3 of stage 1 (iteration 17)"
    recorder.count("tp", "all_reduce", 8)
    with recorder.exposed("gradients"):
        assert hang_report(recorder).endswith(" (iteration 17), waiting for gradients (last sent: all_reduce on tp)")
        recorder.waits[-1] = Wait("reduce_scatter 4 on dp", 0.0, computes=False)
        assert hang_report(recorder).endswith(" (iteration 17), waiting for gradients (reduce_scatter 4 on dp)")
        with recorder.waiting(Recorder):
            assert hang_report(recorder).endswith(f" (iteration 17), waiting for {Recorder}")
        assert "waiting for gradients" in hang_report(recorder)
    recorder.evaluating = True
    assert hang_report(recorder) == "backward input 3 of stage 1 (evaluation at iteration 17)"


def test_who_is_to_blame() -> None:
    update = Position("the update (iteration 9)", waits=True)
    positions = {0: update, 1: Position("forward 0 of stage 1 (iteration 9)", waits=False), 2: update, 3: update}
    stopped = "rank 1 stopped in forward 0 of stage 1 (iteration 9)"
    assert diagnose(2, True, [], positions) == Diagnosis(stopped, (), True, "; ranks 0, 2, 3 are in the update (iteration 9)")
    gone = diagnose(2, True, [3], positions)
    assert (gone.reason, gone.silent) == ("rank 3 does not answer", (3,))
    assert gone.places.startswith("; rank 3 was last seen in the update (iteration 9); ranks 0, 2 are in the update")
    failed = diagnose(2, False, [], positions)
    assert failed.reason == "rank 2 failed"
    assert failed.places.startswith("; rank 2 was last seen in the update (iteration 9); ranks 0, 3 are in the update")
    assert diagnose(0, True, [], {0: update, 1: update}).reason == "all ranks wait for each other"
    assert diagnose(0, True, [1, 2], {0: update}) == Diagnosis(
        "ranks 1, 2 do not answer", (1, 2), True, "; ranks 1, 2 never came; rank 0 is in the update (iteration 9)"
    )


def test_many_ranks_are_named_briefly() -> None:
    assert [named(ranks) for ranks in ([3], [0, 1], [0, 2, 3, 4, 9])] == ["rank 3", "ranks 0, 1", "ranks 0, 2-4, 9"]
    assert grouped({rank: f"place {rank % 10}" for rank in range(100)}, "is", "are")[-1] == "40 more ranks elsewhere"
