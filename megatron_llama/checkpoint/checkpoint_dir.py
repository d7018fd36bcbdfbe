"""The folder with the checkpoints of one run: which are complete, which is the newest, which may be
removed.

SAVE/iter_0000100/                          one checkpoint; it has this name since everything in it
                                            was on the disk
SAVE/latest_checkpointed_iteration.txt      100
SAVE/last, SAVE/best                        links to the newest, and to the one with the lowest
                                            validation loss
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from megatron_llama.checkpoint.meta import ANOTHER_COPY, META, NOT_FINITE
from megatron_llama.checkpoint.storage import METADATA, file_problems, read_metadata
from megatron_llama.checkpoint.storage_paths import is_remote, remove_tree, storage_path
from megatron_llama.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
LAST = "last"
BEST = "best"
TOKENIZER = "tokenizer"
"""Folder beside the checkpoints with the tokenizer, so that generation and export need nothing
else."""


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay when a new one is complete. The best one always does, and the newest
    one whose values are all finite."""

    newest: int = 0
    """So many of the newest stay; 0 stands for all."""
    interval: int = 0
    """Besides those, all stay whose iteration is a multiple of this; 0 stands for none."""


def checkpoint_path(folder: str | Path, iteration: int) -> Path:
    """Return the path of the checkpoint of an iteration."""
    return storage_path(folder) / f"iter_{iteration:07d}"


def complete(folder: str | Path) -> dict[int, Path]:
    """Return the complete checkpoints of a folder by iteration, oldest first."""
    found: dict[int, Path] = {}
    folder = storage_path(folder)
    # NAME.replaced counts only without NAME, which sorts before it: a save was killed between two
    # renames.
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name) if folder.is_dir() else ():
        match = re.fullmatch(rf"iter_(\d{{7,}})({re.escape(REPLACED)})?", entry.name)
        if match and (entry / META).is_file() and (entry / METADATA).is_file():
            found.setdefault(int(match[1]), entry)
    return dict(sorted(found.items()))


def latest(folder: str | Path) -> Path | None:
    """Return the checkpoint that the tracker names, or the newest one if that is not there; None
    without checkpoints."""
    found = complete(folder)
    if not found:
        return None
    try:
        named = int((storage_path(folder) / TRACKER).read_text())
    except (OSError, ValueError):
        named = max(found)
    return found.get(named, found[max(found)])


def find(path: str | Path) -> Path:
    """Return the checkpoint at ``path``: ``path`` itself, also as a link, or the latest one in it.
    Raises CheckpointError."""
    path = storage_path(path)
    if (re.match(r"iter_\d{7}", path.name) and path.is_dir()) or (path / META).is_file():
        return path
    found = latest(path)
    if found is None:
        got = "a folder without complete checkpoints" if path.is_dir() else "no such folder"
        do = "check the path"
        if (path / "config.json").is_file():
            do = (
                "it is a HuggingFace folder: give the checkpoint of a run (pretrain, sft, "
                "evaluate, generate and chat read such a folder with --init-from-hf)"
            )
        raise CheckpointError(path, got=got, expected="iter_NNNNNNN, or a folder of them", do=do)
    return found


def newest_usable(folder: str | Path) -> Path | None:
    """Return the newest complete checkpoint whose files are all there at their full size, or None.
    One whose values are not all finite is returned only if there is no other. Damage inside the
    files is found by ``inspect checkpoint --verify``, and by loading."""
    marked = None
    for path in reversed(complete(folder).values()):
        if is_usable(path):
            if not is_marked(path):
                return path
            marked = marked or path
    return marked


def is_usable(checkpoint: Path) -> bool:
    """Return whether the files of a checkpoint are all there at their full size."""
    try:
        places = read_metadata(checkpoint).storage_data.values()
    except CheckpointError:
        return False
    return not file_problems(checkpoint, places, do=ANOTHER_COPY)


def newest_good(folder: str | Path) -> Path | None:
    """Return the newest complete checkpoint in which the save has found no value that is not
    finite, or None."""
    newest_first = reversed(complete(folder).values())
    return next((path for path in newest_first if not is_marked(path)), None)


def tidy(folder: str | Path) -> None:
    """Remove what killed saves left behind. Nobody may be saving there meanwhile. Raises
    CheckpointError."""
    folder = storage_path(folder)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for entry in list(folder.iterdir()):
            # In an object store, which cannot rename, META comes last: without it a save was
            # killed.
            named = is_remote(folder) and re.fullmatch(r"iter_\d{7,}", entry.name)
            unfinished = named and not (entry / META).is_file()
            if unfinished or re.fullmatch(r"iter_\d{7,}" + re.escape(INCOMPLETE), entry.name):
                remove_tree(entry)
            elif re.fullmatch(r"iter_\d{7,}" + re.escape(REPLACED), entry.name):
                recover(entry.with_suffix(""))


def publish(target: Path) -> None:
    """Give the staged checkpoint its name, and make the tracker name it, in one step each."""
    tracker = target.with_name(TRACKER)
    named = f"{int(target.name.removeprefix('iter_'))}\n".encode()
    if is_remote(target):
        tracker.write_bytes(named)
        return
    try:
        # The tracker's content is on the disk before the first rename: a disk that is full shows
        # here, while both old names still stand.
        write_synced(staging(tracker), named)
        commit(target)
        staging(tracker).replace(tracker)
        sync(tracker.parent)
    finally:
        staging(tracker).unlink(missing_ok=True)


def retain(folder: Path, keep: Retention) -> None:
    """Renew the links, then remove the checkpoints that need not stay."""
    found = complete(folder)
    read = {iteration: validation_loss(path) for iteration, path in found.items()}
    good = [iteration for iteration, path in found.items() if not is_marked(path)]
    losses = {at: loss for at, loss in read.items() if loss is not None and at in good}
    best = min(losses, key=lambda iteration: (losses[iteration], iteration), default=None)
    newest = sorted(found)[-keep.newest :] if keep.newest else list(found)
    # Where the newest ones are marked, the run has this one to go on from.
    newest += good[-1:]
    _link(folder / LAST, found[max(found)])
    if best is not None:
        _link(folder / BEST, found[best])
    for iteration, path in found.items():
        at_interval = keep.interval and iteration % keep.interval == 0
        if iteration in newest or iteration == best or at_interval:
            continue
        # It stops counting before its content goes: no checkpoint is ever half there.
        if is_remote(path):
            (path / META).unlink()
            remove_tree(path)
        else:
            remove_tree(path.rename(staging(path)))


def validation_loss(checkpoint: Path) -> float | None:
    """Return the validation loss at the iteration of a checkpoint, or None where it was not
    measured."""
    loss = _field(checkpoint, "validation_loss")
    return float(loss) if isinstance(loss, int | float) else None


def is_marked(checkpoint: Path) -> bool:
    """Return whether the save has found values in a checkpoint that are not finite."""
    return bool(_field(checkpoint, NOT_FINITE))


def _field(checkpoint: Path, name: str) -> Any:
    """Return a field of a checkpoint's ``meta.json``; None where it is not there, or cannot be
    read."""
    try:
        return json.loads((checkpoint / META).read_bytes()).get(name)
    except (OSError, ValueError, AttributeError):
        return None


def _link(link: Path, target: Path) -> None:
    """Renew a symbolic link in one step. Anything else of that name stays. An object store has no
    links."""
    if is_remote(link) or (link.exists() and not link.is_symlink()):
        return
    beside = staging(link)
    beside.unlink(missing_ok=True)
    os.symlink(target.name, beside)
    beside.replace(link)
