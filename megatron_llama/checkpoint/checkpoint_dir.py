"""The folder with the checkpoints of one run: which of them are complete, which is the newest, and
which may be removed.

SAVE/iter_0000100/                          one checkpoint; it gets this name when everything in it
                                            is on the disk
SAVE/latest_checkpointed_iteration.txt      100
SAVE/last, SAVE/best                        links to the newest, and to the one with the lowest
                                            validation loss
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from megatron_llama.checkpoint.checksums import ANOTHER_COPY, SUMS
from megatron_llama.checkpoint.container import Container
from megatron_llama.checkpoint.failures import writing
from megatron_llama.checkpoint.folders import (
    INCOMPLETE,
    REPLACED,
    commit,
    recover,
    staging,
    sync,
    write_synced,
)
from megatron_llama.checkpoint.index import shared_bytes
from megatron_llama.checkpoint.lease import Held
from megatron_llama.checkpoint.meta import META, NOT_FINITE, NUMBERED, parse_meta, read_meta_json
from megatron_llama.checkpoint.native_folder import index_name, open_native
from megatron_llama.checkpoint.storage import refuse
from megatron_llama.checkpoint.storage_paths import is_remote, remove_tree, storage_path
from megatron_llama.config.fields import finite_number
from megatron_llama.config.limits import LARGEST_INTEGER, LARGEST_TRACKER
from megatron_llama.config.model_files import read_bounded
from megatron_llama.errors import CheckpointError
from megatron_llama.files import replacing

TRACKER = "latest_checkpointed_iteration.txt"
STAGED = re.compile(r"iter_\d{7,}(\.[0-9a-f]+)?" + re.escape(INCOMPLETE))
"""Names of checkpoints that are being written or removed."""
LAST = "last"
BEST = "best"
TOKENIZER = "tokenizer"
"""Folder beside the checkpoints with the tokenizer, so that generation and export need no other
file."""


@dataclass(frozen=True)
class Retention:
    """The rule for which checkpoints stay when a new one is complete. The best one always stays,
    and the newest one whose values are all finite."""

    newest: int = 0
    """Number of the newest that stay; 0 stands for all."""
    interval: int = 0
    """Besides those, every iteration that is a multiple of this stays; 0 stands for none."""


def checkpoint_path(folder: str | Path, iteration: int) -> Path:
    """Return the path of the checkpoint of an iteration."""
    return storage_path(folder) / f"iter_{iteration:07d}"


def complete(folder: str | Path) -> dict[int, Path]:
    """Return the complete checkpoints of a folder by iteration, oldest first."""
    complete: dict[int, Path] = {}
    for iteration, path in _numbered(folder):
        # NAME.replaced counts only without NAME: a save was killed between two renames.
        if (path / META).is_file() and index_name(path) is not None:
            complete.setdefault(iteration, path)
    return complete


def _numbered(folder: str | Path) -> list[tuple[int, Path]]:
    """Return the folders of this project's checkpoints with their iterations, oldest first, NAME
    before NAME.replaced. Damaged ones count if they have a file that no other program writes."""
    numbered: list[tuple[int, Path]] = []
    folder = storage_path(folder)
    for entry in folder.iterdir() if folder.is_dir() else ():
        match = NUMBERED.fullmatch(entry.name)
        iteration = int(match[1]) if match else LARGEST_INTEGER + 1
        # Other names of a number, with more zeros, are no checkpoints.
        named = iteration <= LARGEST_INTEGER and entry.name.startswith(f"iter_{iteration:07d}")
        # In an object store META comes last: without it a save was killed.
        files = (META,) if is_remote(entry) else (META, SUMS)
        if named and any((entry / file).is_file() for file in files):
            numbered.append((iteration, entry))
    return sorted(numbered, key=lambda pair: (pair[0], pair[1].name))


def latest(folder: str | Path) -> Path | None:
    """Return the checkpoint that the tracker names, or the newest one if that is not there; None
    without checkpoints."""
    checkpoints = complete(folder)
    return checkpoints[_saved_last(folder, checkpoints)] if checkpoints else None


def _saved_last(folder: str | Path, checkpoints: Mapping[int, Path]) -> int:
    """Return the iteration that the tracker names, or the highest of the complete ones."""
    named = _tracked(storage_path(folder) / TRACKER)
    return named if named is not None and named in checkpoints else max(checkpoints)


def _by_age(checkpoints: Mapping[int, Path], saved_last: int) -> list[int]:
    """Return the iterations in the order in which the run reached them. A run that has gone back
    leaves a future behind: all of that is older than its later saves."""
    return sorted(checkpoints, key=lambda iteration: (iteration <= saved_last, iteration))


def _tracked(tracker: Path) -> int | None:
    """Return the iteration that the tracker names; None without a tracker or a number in it."""
    try:
        content = read_bounded(tracker, limit=LARGEST_TRACKER, do=ANOTHER_COPY)
    except CheckpointError:
        return None
    named = re.fullmatch(rb"\s*([0-9]{1,19})\s*", content)
    return int(named[1]) if named else None


def find(path: str | Path) -> Path:
    """Return the checkpoint at ``path``: ``path`` itself, also as a link, or the latest one in it.
    Raises CheckpointError."""
    path = storage_path(path)
    if (re.match(r"iter_\d{7}", path.name) and path.is_dir()) or (path / META).is_file():
        return path
    newest = latest(path)
    if newest is None:
        got = "a folder without complete checkpoints" if path.is_dir() else "no such folder"
        do = "check the path"
        if (path / "config.json").is_file():
            do = (
                "it is a HuggingFace folder: give the checkpoint of a run (pretrain, sft, "
                "evaluate, generate and chat read such a folder with --init-from-hf)"
            )
        raise CheckpointError(path, got=got, expected="iter_NNNNNNN, or a folder of them", do=do)
    return newest


@dataclass(frozen=True)
class PassedOver:
    """A checkpoint that is not taken."""

    path: Path
    problem: str
    """The problem, as the words behind its name."""
    remedy: str


@dataclass(frozen=True)
class Usable:
    """The newest checkpoint of a folder that can be used."""

    path: Path
    passed_over: tuple[PassedOver, ...]
    """The newer ones, newest first."""


def newest_usable(folder: str | Path, *, takes_marked: bool = False) -> Usable | None:
    """Return the newest checkpoint whose ``meta.json`` and index are as they were saved, and whose
    files are all there at their full size; None without any checkpoint. Without ``takes_marked`` a
    checkpoint with values that are not finite is returned only if there is no other. Damage inside
    the files is found by ``inspect checkpoint --verify``, and by loading.

    Raises CheckpointError if there are checkpoints and none can be used: a fresh start in their
    place would remove them one by one."""
    passed_over: list[PassedOver] = []
    errors: list[str] = []
    has_marked = False
    for path in _newest_first(folder):
        inspect = f"inspect checkpoint {path}"
        try:
            # The mark comes first: it is read in no time, while an index may have millions of
            # chunks.
            if parse_meta(path).not_finite and not takes_marked:
                has_marked = True
                remedy = f"{inspect} names them, and --load {path} takes it all the same"
                problem = "has weights or moments that are not finite"
                passed_over.append(PassedOver(path, problem, remedy))
                continue
            _require_files(path)
        except CheckpointError as error:
            errors.append(f"{error}")
            reason = " ".join(f"{error}".split())
            remedy = f"{inspect} --verify says more than this: {reason}"
            passed_over.append(PassedOver(path, "is damaged", remedy))
            continue
        return Usable(path, tuple(passed_over))
    if has_marked:
        return newest_usable(folder, takes_marked=True)
    refuse(f"{folder} has checkpoints, and none can be used:", errors)
    return None


def _newest_first(folder: str | Path) -> Iterator[Path]:
    """Yield the folders of checkpoints, damaged ones among them, NAME before NAME.replaced."""
    for _, paths in groupby(reversed(_numbered(folder)), key=lambda pair: pair[0]):
        yield from sorted((path for _, path in paths), key=lambda path: path.name)


def newest_good(folder: str | Path) -> Path | None:
    """Return the complete checkpoint that was saved last of those whose save has found no value
    that is not finite, or None."""
    paths = complete(folder)
    newest_first = reversed(_by_age(paths, _saved_last(folder, paths))) if paths else ()
    return next((paths[iteration] for iteration in newest_first if is_good(paths[iteration])), None)


def is_good(checkpoint: Path) -> bool:
    """Whether ``meta.json`` is as it was saved, and the save has found no values that are not
    finite."""
    return read_standing(checkpoint).is_good


@dataclass(frozen=True)
class Standing:
    """The facts that decide whether a checkpoint may be removed."""

    is_good: bool
    """See ``is_good``."""
    validation_loss: float | None
    """See ``validation_loss``."""


def read_standing(checkpoint: Path) -> Standing:
    """Return the standing of a checkpoint by its ``meta.json``. If unreadable, it is not good."""
    try:
        meta = read_meta_json(checkpoint)
    except CheckpointError:
        return Standing(is_good=False, validation_loss=None)
    return Standing(not meta.get(NOT_FINITE), finite_number(meta.get("validation_loss")))


def require_usable(path: Path) -> None:
    """Raise CheckpointError if a problem with a checkpoint shows without reading its tensors."""
    parse_meta(path)
    places = _require_files(path).places()  # parses all parts of an index
    refuse(f"{path} cannot be used:", list(shared_bytes(path, places, do=ANOTHER_COPY)))


def _require_files(path: Path) -> Container:
    """Return the opened checkpoint. Raises CheckpointError for a file that is missing or short, and
    for an index that is not as it was saved."""
    container = open_native(path)
    refuse(f"{path} is incomplete:", container.missing_files())
    return container


def tidy(folder: str | Path) -> None:
    """Remove the remains of killed saves. No process may be saving there meanwhile. Raises
    CheckpointError."""
    folder = storage_path(folder)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for entry in list(folder.iterdir()):
            # In an object store, which cannot rename, META comes last: without it a save was
            # killed.
            named = is_remote(folder) and re.fullmatch(r"iter_\d{7,}", entry.name)
            unfinished = named and not (entry / META).is_file()
            if unfinished or STAGED.fullmatch(entry.name):
                remove_tree(entry)
            elif re.fullmatch(r"iter_\d{7,}" + re.escape(REPLACED), entry.name):
                recover(entry.with_suffix(""))


def publish(target: Path, run: str = "") -> None:
    """Give the checkpoint that ``run`` has staged its name, and write its iteration into the
    tracker, in one step each."""
    tracker = target.with_name(TRACKER)
    named = f"{int(target.name.removeprefix('iter_'))}\n".encode()
    if is_remote(target):
        tracker.write_bytes(named)
        return
    with replacing(tracker, temporary=staging(tracker)) as temporary:
        # The tracker's content is on the disk before the first rename: a disk that is full raises
        # here, while both old names still stand.
        write_synced(temporary, named)
        commit(target, run)
    sync(tracker.parent)


def retain(
    folder: Path,
    keep: Retention,
    held: Held | None = None,
    known: dict[str, Standing] | None = None,
) -> None:
    """Renew the links, then remove the checkpoints that need not stay. ``held`` is the run's lease
    on the folder: once it is lost, LeaseError is raised and nothing more is removed. ``known`` has
    the standings in this folder that earlier calls have read, by name; this call updates it."""
    paths = complete(folder)
    saved_last = _saved_last(folder, paths)
    by_age = _by_age(paths, saved_last)
    known = {} if known is None else known
    # A checkpoint that was saved again has the name of the previous one.
    known.pop(paths[saved_last].name, None)
    standings = {
        iteration: known.get(path.name) or read_standing(path) for iteration, path in paths.items()
    }
    known.clear()
    known.update((paths[iteration].name, standing) for iteration, standing in standings.items())
    losses = {
        iteration: standing.validation_loss
        for iteration, standing in standings.items()
        if standing.is_good and standing.validation_loss is not None
    }
    best = min(losses, key=lambda iteration: (losses[iteration], iteration), default=None)
    newest = by_age[-keep.newest :] if keep.newest else list(paths)
    # If the newest ones are marked, the run can go on from this one.
    newest += [iteration for iteration in by_age if standings[iteration].is_good][-1:]
    _link(folder / LAST, paths[saved_last])
    if best is not None:
        _link(folder / BEST, paths[best])
    for iteration, path in paths.items():
        at_interval = keep.interval and iteration % keep.interval == 0
        if iteration in newest or iteration == best or at_interval:
            continue
        if held is not None:
            # The run that has taken the folder may be about to go on from this one.
            held.require()
        # It stops counting before its content is removed: no checkpoint is ever half there.
        if is_remote(path):
            (path / META).unlink()
            remove_tree(path)
        else:
            remove_tree(path.rename(staging(path, held.run if held is not None else "")))


def validation_loss(checkpoint: Path) -> float | None:
    """Return the validation loss at the iteration of a checkpoint, or None where it was not
    measured, is not finite, or cannot be read."""
    return read_standing(checkpoint).validation_loss


def _link(link: Path, target: Path) -> None:
    """Renew a symbolic link in one step. Anything else of that name stays. An object store has no
    links."""
    if is_remote(link) or (link.exists() and not link.is_symlink()):
        return
    with replacing(link, temporary=staging(link)) as temporary:
        # A process that was killed may have left such a file.
        temporary.unlink(missing_ok=True)
        os.symlink(target.name, temporary)
