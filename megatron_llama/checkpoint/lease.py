"""The lease of a run on its folder of checkpoints. Without it two runs that write into one folder
would destroy each other's files, and neither would see why.

SAVE/lease.1.json      the run that writes here; gone when the run has ended

The highest number counts. A run that takes the folder writes the next number, and no file that
exists: the file system lets only one of several do that. So no run overwrites a lease that it has
not seen, and a run that was stopped for hours finds on its return that the folder is another's.

- A holder on the same machine is looked up: it runs or it does not, without any wait.
- Of a holder elsewhere (another machine, another container) only the file is seen. A thread of the
  holder renews a count in it; if the count stands still for a period, the holder is gone. Clocks
  of two machines are never compared.
- The count is renewed once while the folder is taken. If that fails it stays 0, and standing still
  means nothing: such a lease goes only with its process or with --steal-save.
- A run that has lost its lease writes nothing more. It removes its own file, which tells the other
  run so.

An object store has no "unless it exists": the file is written and read back a moment later. Two
starts within that moment may both go on, until the first renewal of the one whose file is gone."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from uuid import uuid4

from megatron_llama.checkpoint.failures import require_writable, writing
from megatron_llama.checkpoint.folders import write_synced
from megatron_llama.checkpoint.storage_paths import is_remote, local_folder, storage_path
from megatron_llama.engine.comm.device import start_thread
from megatron_llama.engine.comm.object_collectives import MEETING_SECONDS, on_rank0
from megatron_llama.engine.mesh import Axis
from megatron_llama.errors import LeaseError
from megatron_llama.files import replacing
from megatron_llama.launch.launcher import job_name
from megatron_llama.launch.processes import Process, this_process

PATTERN = re.compile(r"lease\.(\d+)\.json")
DRAFT = ".draft"
JOIN_SECONDS = 15.0
"""Seconds that a run which ends waits for a renewal under way."""
WARN_FAILURES = 3
"""Renewals that fail in a row before a warning is printed."""
MOUNTS = Path("/proc/self/mountinfo")
SETTLE_SECONDS = 1.0
"""Seconds after which a file in an object store is read back."""
CHECK_PAUSES = (0.5, 1.0, 2.0, 4.0)
"""Seconds between tries to find the owner of the folder: less than a period, and no more than the
other ranks can wait in a collective."""
COUNT_DIGITS = 12
COMMAND_CHARACTERS = 200
RUN_CHARACTERS = 8


@dataclass(frozen=True)
class Pace:
    """Intervals of a lease's renewals, in seconds."""

    renewal: float
    period: float
    """Seconds for which the count of a holder that cannot be looked up has to stand still before it
    counts as gone: several renewals, since its thread and the file system may be slow."""


DISK = Pace(3.0, 15.0)
STORE = Pace(30.0, 300.0)
"""Pace in an object store, where each renewal costs a request. Programs that mount a store as a
file system (gcsfuse, blobfuse2) show files of others only after one or two minutes."""
LONGEST_PERIOD = 3600.0


@dataclass(frozen=True)
class Holder:
    """The run that has taken a folder."""

    id: str
    """Drawn at random when the folder was taken."""
    process: Process
    """Rank 0 of the run."""
    job: str
    """The launcher's name of the job, or empty."""
    command: str
    since: str
    """Time by the clock of its machine, for messages."""
    period: float
    """The period at its own pace: another machine may see the folder by another way."""

    def __str__(self) -> str:
        job = f", {self.job}" if self.job else ""
        return f"{self.process}, since {self.since}{job}"

    def content(self, renewals: int) -> bytes:
        """Return the content of its file, whose length does not depend on the count."""
        text = json.dumps(asdict(self), indent=1).removesuffix("\n}")
        return f'{text},\n "renewals": {renewals:>{COUNT_DIGITS}}\n}}\n'.encode()

    @staticmethod
    def read(content: bytes) -> Holder | None:
        """Return the holder that a file names; None if it names none."""
        try:
            values = json.loads(content)
            process = Process(**values["process"])
            text = (process.host, process.boot, process.namespace)
            names = ("id", "job", "command", "since")
            if not all(isinstance(value, str) for value in (*text, *map(values.get, names))):
                return None
            if not (type(process.pid) is int and type(process.start) is int and process.pid > 0):
                return None
            period = float(values["period"])
            if not 0.0 < period <= LONGEST_PERIOD:
                return None
            words = {name: values[name] for name in names}
            return Holder(process=process, period=period, **words)
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
            return None

    @staticmethod
    def was_renewed(content: bytes) -> bool:
        """Whether the count in a file that names a holder has ever been renewed."""
        renewals = json.loads(content).get("renewals")
        return isinstance(renewals, int) and renewals > 0


def _this_holder(period: float) -> Holder:
    words = " ".join(map(shlex.quote, sys.argv))
    command = words if len(words) <= COMMAND_CHARACTERS else words[:COMMAND_CHARACTERS] + " ..."
    since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    return Holder(uuid4().hex, this_process(), job_name(), command, since, period)


@dataclass(frozen=True)
class Held:
    """A lease that was taken. It can be pickled, for the process that writes in the background."""

    folder: Path
    number: int
    holder: Holder

    @property
    def path(self) -> Path:
        """The file of the lease."""
        return _path(self.folder, self.number)

    @property
    def draft(self) -> Path:
        """Another name under which the file is written, before it is linked or renamed."""
        return self.folder / f"lease.{self.holder.id}{DRAFT}"

    @property
    def run(self) -> str:
        """The mark in the names of folders that this run has begun: see ``folders.py``."""
        return self.holder.id[:RUN_CHARACTERS]

    def is_valid(self) -> bool:
        """Whether the folder is still this run's. Raises OSError."""
        return _newest(self.folder) == self.number and self.is_own()

    def require(self) -> None:
        """Raise LeaseError if the folder is another's, and CheckpointError if that cannot be seen
        after several tries."""
        for pause in CHECK_PAUSES:
            # A file system may fail for a moment, or show no file while a new one gets its name.
            with suppress(Exception):
                if self.is_valid():
                    return
                if self._is_anothers():
                    break
            time.sleep(pause)
        with writing(self.folder):
            if not self.is_valid():
                raise self.lost()

    def _is_anothers(self) -> bool:
        """Whether another start's file is there, in its place or after it. Raises OSError."""
        holder = Holder.read(_read(self.folder, self.number))
        replaced = holder is not None and holder.id != self.holder.id
        return replaced or _newest(self.folder) > self.number

    def lost(self) -> LeaseError:
        """Return the error of the run that has lost the lease."""
        number, thief = 0, None
        # The thief is for people: the lease is lost, whether or not its name can be read.
        with suppress(Exception):
            number = _newest(self.folder)
            thief = Holder.read(_read(self.folder, number))
        if thief is not None or number > self.number:
            whom = thief or f"{_path(self.folder, number).name}, which names nobody"
            got = f"taken over by {whom}, with --steal-save or because this run gave no sign"
        else:
            got = (
                f"no {self.path.name}: another start has taken the folder over and ended, or "
                "somebody has removed the file"
            )
        return LeaseError(
            f"--save {self.folder}",
            got=got,
            expected="this run alone to write there",
            do="nothing that it has saved is lost: the other run may go on from there; give this "
            "one another --save",
        )

    def is_own(self) -> bool:
        """Whether the lease's file is there, and is this run's. Raises OSError."""
        holder = Holder.read(_read(self.folder, self.number))
        return holder is not None and holder.id == self.holder.id


class _Renewals:
    """Renews the count of a lease in a way that its place allows."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self._count = 0
        self._ways: tuple[Callable[[Held, bytes], None], ...] = (
            (_write_object,) if is_remote(held.folder) else (_write_in_place, _write_and_rename)
        )

    def renew(self) -> None:
        """Renew the count. If no way works, the error of the last one is raised."""
        content = self._held.holder.content(self._count + 1)
        for way in self._ways:
            try:
                way(self._held, content)
            except Exception:  # clients of object stores have errors of their own
                if way is self._ways[-1]:
                    raise
            else:
                # This way is tried first the next time: a write that is refused may do harm.
                self._ways = (way, *(left for left in self._ways if left is not way))
                self._count += 1
                return


def _write_object(held: Held, content: bytes) -> None:
    held.path.write_bytes(content)


def _write_in_place(held: Held, content: bytes) -> None:
    """Write over a file that is there: a file that another start has removed must not come back."""
    with held.path.open("r+b") as file:
        file.write(content)


def _write_and_rename(held: Held, content: bytes) -> None:
    """Write a new file under the old name, where none can be written over: Databricks' /dbfs,
    goofys, rclone."""
    with replacing(held.path, temporary=held.draft) as draft:
        draft.write_bytes(content)
        looked = time.monotonic()
        if not held.is_own():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(held.path))
    if time.monotonic() - looked > held.holder.period:
        # Stopped between look and rename for so long that another start may have come and gone. If
        # so, this has brought the file back; without it the next look says that it is lost.
        held.path.unlink(missing_ok=True)


class Lease:
    """A rank's end of the run's lease: rank 0 takes and renews it. It is made before the writing
    process is forked, and released when that process has ended."""

    def __init__(self, save: str | None, *, steal: bool = False) -> None:
        """``save`` is None for a run that saves nothing. With ``steal`` the folder is taken from a
        run that writes."""
        self._save = save
        self._steal = steal
        self._made: list[Path] = []
        self._own: Held | None = None
        self._attempt: Iterator[bool] | None = None
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._lost = threading.Event()
        self._losing = threading.Lock()
        self.held: Held | None = None
        """The lease, the same on every rank; None before ``take``, and if nothing is saved."""
        self.notes: list[str] = []
        """Messages about a folder that was another's, on rank 0."""
        self._when_lost: Callable[[str], None] = lambda words: None
        """See ``tell_loss``."""

    @property
    def is_lost(self) -> bool:
        """Whether rank 0 knows that the folder is another's; elsewhere false."""
        return self._lost.is_set()

    def take_at_once(self) -> Held | None:
        """Take the folder on rank 0 if no run has to be waited for, and return the lease. Otherwise
        ``take`` goes on from here. Raises as ``take`` does."""
        if self._save is None or self._steal:
            return None
        self._attempt = self._taking(self._save)
        return self._own if next(self._attempt, None) is None else None

    def take(self, world: Axis) -> None:
        """Take the folder. Collective. Raises LeaseError on every rank while another run writes
        there, and CheckpointError if the folder cannot be written."""
        if self._save is None:
            return
        if self._attempt is None:
            self._attempt = self._taking(self._save) if world.rank == 0 else iter(())
        attempt = self._attempt
        waits = True
        while waits:
            # The others must not wait in a collective for as long as rank 0 watches a count.
            waits, self.held = on_rank0(lambda: (next(attempt, None) is not None, self._own), world)

    def require(self) -> None:
        """Raise LeaseError if the folder is another's, and CheckpointError if that cannot be seen.
        Called on rank 0."""
        if self._own is None:
            return
        try:
            self._own.require()
        except LeaseError:
            self._lose(self._own)
            raise

    def tell_loss(self, when_lost: Callable[[str], None]) -> None:
        """Have ``when_lost`` called once on rank 0, in any thread, when the folder has become
        another's, or now if it has: nothing is to be written there after it has returned. Its
        argument says what has happened, for a last line in the folder's files; it is empty if the
        other run no longer waits for it."""
        with self._losing:
            self._when_lost = when_lost
            if self.is_lost:
                when_lost("")

    def _lose(self, held: Held) -> None:
        """Write nothing more into the folder."""
        with self._losing:
            if not self.is_lost:
                words = ""
                with suppress(Exception):
                    words = str(held.lost()) if held.is_own() else ""
                self._when_lost(words)
                self._lost.set()

    def release(self) -> None:
        """Leave the folder to others. If it is empty it was made for nothing, and is removed."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)  # no longer: a file system may not answer
        # Clients of object stores raise errors of their own. The run has ended in any case.
        with suppress(Exception):
            # Also if the folder is another's: that run may be waiting for this file to go.
            if self._own is not None and self._own.is_own():
                self._own.path.unlink()
        for folder in reversed(self._made):
            with suppress(OSError):
                folder.rmdir()

    def _taking(self, save: str) -> Iterator[bool]:
        """Take the folder. Each value is a pause in which the other ranks are met."""
        folder = storage_path(save)
        require_writable(local_folder(save) if is_remote(folder) else folder)
        with writing(folder):
            self._made = _make(folder)
            own = None
            while own is None:
                # Another start that was refused may have removed a folder that it had made.
                folder.mkdir(parents=True, exist_ok=True)
                try:
                    pace = _pace(folder)
                except FileNotFoundError:
                    continue
                numbers = _numbers(folder)
                before = _read(folder, max(numbers, default=0))
                if numbers and not self._steal:
                    yield from self._until_gone(folder, numbers[-1], before, pace.period)
                own = _take_after(folder, numbers, pace.period)
            # From here on it is renewed and released in any case.
            self._own = own
            renewals = _Renewals(own)
            renewed = self._show_sign(own, renewals)
            self._thread = start_thread(self._renew, own, renewals, pace, renewed, name="lease")
            if numbers and self._steal:
                yield from self._until_left(own, before, pace.period)
            _remove_others(own)

    def _show_sign(self, own: Held, renewals: _Renewals) -> bool:
        """Renew for the first time. Return whether that was possible."""
        try:
            renewals.renew()
        except Exception as error:
            self.notes.append(
                f"warning: --save {own.folder} is not guarded: {own.path.name} can neither be "
                f"written over nor replaced there ({type(error).__name__}: {error}); on another "
                "machine nobody can tell whether this run still writes, and only --steal-save "
                "takes the folder over, also after its end if it is killed"
            )
            return False
        return True

    def _until_gone(
        self, folder: Path, number: int, before: bytes, period: float
    ) -> Iterator[bool]:
        """Wait until the holder is certainly gone. Raises LeaseError if it is not."""
        holder = Holder.read(before)
        if holder is not None and holder.process.visible:
            if holder.process.state:
                raise _in_use(folder, holder)
            return
        period = max(period, holder.period if holder is not None else 0.0)
        whom = str(holder) if holder is not None else f"{_path(folder, number)}, which names nobody"
        print(f" --save {folder}: held by {whom}; looking for a sign of it", flush=True)
        deadline = time.monotonic() + period
        while time.monotonic() < deadline:
            time.sleep(MEETING_SECONDS)
            yield True
            now = _read(folder, number)
            if number not in _numbers(folder):
                return
            if now and now != before:  # empty: it is being written
                raise _in_use(folder, Holder.read(now) or holder)
        if holder is not None and not Holder.was_renewed(before):
            # Its silence proves nothing: it may be training where no file can be renewed. If a
            # restart has to ask for the folder, that costs an option; if a healthy run loses it,
            # that costs its work. (A holder that was killed between taking the folder and its first
            # renewal looks the same.)
            raise _in_doubt(folder, holder)
        self.notes.append(
            f"--save {folder}: taken over from {whom}, which gave no sign for {period:g} s"
        )

    def _until_left(self, own: Held, before: bytes, period: float) -> Iterator[bool]:
        """Wait until the run from which the folder was taken has seen that, or is gone, so that
        none of its writes is under way when this run begins to write."""
        number = own.number - 1
        holder = Holder.read(before)
        period = max(period, holder.period if holder is not None else 0.0)
        whom = holder or f"lease {number}"
        deadline = time.monotonic() + period
        limit = deadline + period
        while time.monotonic() < min(deadline, limit):
            if holder is not None and holder.process.visible and not holder.process.state:
                break
            now = _read(own.folder, number)
            if number not in _numbers(own.folder):
                break
            if now and now != before:
                before = now
                deadline = time.monotonic() + period
            time.sleep(MEETING_SECONDS)
            yield True
        self.notes.append(f"--save {own.folder}: taken over from {whom} (--steal-save)")

    def _renew(self, held: Held, renewals: _Renewals, pace: Pace, renewed: bool) -> None:
        failures = 0 if renewed else WARN_FAILURES  # the notes already have that warning
        while not self._over.wait(pace.renewal):
            try:
                if not held.is_valid():
                    self._lose(held)
                    # The last write: the run that has taken the folder waits for it.
                    if held.is_own():
                        held.path.unlink()
                    return
                renewals.renew()
                failures = 0
            except Exception as error:
                # A file system may fail for a moment, or a store's client with an error of its own.
                # If it matters for a save, the save will raise.
                failures += 1
                if failures == WARN_FAILURES:
                    print(
                        f" warning: --save {held.folder}: {held.path.name} could not be renewed "
                        f"{failures} times in a row ({type(error).__name__}: {error}); after "
                        f"{pace.period:g} s a start on another machine may take the folder over",
                        flush=True,
                    )


@contextmanager
def leasing(save: str | None, *, steal: bool = False) -> Iterator[Lease]:
    """A section whose run may take the folder ``save``; at its end it is left to others."""
    lease = Lease(save, steal=steal)
    try:
        yield lease
    finally:
        lease.release()


def _in_use(folder: Path, holder: Holder | None) -> LeaseError:
    return LeaseError(
        f"--save {folder}",
        got=f"a run that writes there ({holder or 'unknown'})",
        expected="a folder into which no other run writes",
        do="stop that run, give another --save, or take the folder over with --steal-save",
    )


def _in_doubt(folder: Path, holder: Holder) -> LeaseError:
    return LeaseError(
        f"--save {folder}",
        got=f"a run that may still write there, for its file was never renewed ({holder})",
        expected="a folder into which no other run writes",
        do="look whether that run has ended; if so, take the folder over with --steal-save",
    )


def _pace(folder: Path) -> Pace:
    """Return the pace at which a lease on a folder is renewed."""
    return STORE if is_remote(folder) or _is_mounted_by_program(folder) else DISK


def _is_mounted_by_program(folder: Path) -> bool:
    """Whether a program of a user serves the file system of a folder (FUSE). It may keep an object
    store there, and old listings in memory. False if nothing says so."""
    status = folder.stat()
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    with suppress(OSError):
        # Device and type of each mount, see proc_pid_mountinfo(5): ID PARENT DEVICE ... - TYPE ...
        for line in MOUNTS.read_text(errors="replace").splitlines():
            fields, _, kind = line.partition(" - ")
            if device in fields.split()[2:3]:
                return kind.startswith(("fuse", "virtiofs"))
    return False


def _take_after(folder: Path, judged: list[int], period: float) -> Held | None:
    """Take a folder behind the leases that were judged. Return None if these are not all: another
    start was faster, or a holder has left."""
    if _numbers(folder) != judged:
        return None
    own = Held(folder, max(judged, default=0) + 1, _this_holder(period))
    if not _write_new(own):
        return None
    if set(_numbers(folder)) <= {*judged, own.number}:
        return own
    # All that were judged have left since then, and another start has begun to count anew.
    own.path.unlink(missing_ok=True)
    return None


def _path(folder: Path, number: int) -> Path:
    return folder / f"lease.{number}.json"


def _numbers(folder: Path) -> list[int]:
    """Return the numbers of the leases in a folder, ascending."""
    try:
        matches = [PATTERN.fullmatch(entry.name) for entry in folder.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for match in matches if match)


def _newest(folder: Path) -> int:
    """Return the highest number; 0 without a lease."""
    return max(_numbers(folder), default=0)


def _read(folder: Path, number: int) -> bytes:
    """Return the content of a lease; empty if there is none of this number."""
    try:
        return _path(folder, number).read_bytes()
    except FileNotFoundError:
        return b""


def _make(folder: Path) -> list[Path]:
    """Make a folder and those above it. Return the ones that were missing, the topmost first."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return [] if is_remote(folder) else missing[::-1]


def _write_new(own: Held) -> bool:
    """Write the file of a lease unless there is one of its number. Return whether it was
    written."""
    content = own.holder.content(0)
    if is_remote(own.folder):
        if own.path.exists():
            return False
        own.path.write_bytes(content)
        time.sleep(SETTLE_SECONDS)
        return own.is_own()
    # A link to a file that is whole, so that no run reads half of it.
    draft = own.draft
    try:
        write_synced(draft, content)
        os.link(draft, own.path)
    except FileExistsError:
        # A network file system may say so of a link that it has just made, if its answer was lost.
        return own.is_own()
    except FileNotFoundError:
        return False  # the start that was faster has removed the draft
    except OSError:
        # File systems without links raise EPERM, EINVAL, EXDEV, ENOTSUP, the kernel's own 524 and
        # more. If something else is wrong, the open below raises, too.
        try:
            with own.path.open("xb") as file:
                file.write(content)
        except FileExistsError:
            return own.is_own()  # it may be the link, whose answer was lost
    finally:
        draft.unlink(missing_ok=True)
    return True


def _remove_others(own: Held) -> None:
    """Remove the leases before this one, and the drafts of starts that were killed."""
    for entry in list(own.folder.iterdir()):
        match = PATTERN.fullmatch(entry.name)
        earlier = match is not None and int(match[1]) < own.number
        draft = entry.name.startswith("lease.") and entry.name.endswith(DRAFT)
        if earlier or (draft and entry.name != own.draft.name):
            with suppress(FileNotFoundError):
                entry.unlink()
