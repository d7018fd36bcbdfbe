"""The reader of the files of a folder that came from elsewhere: a model, a tokenizer, an adapter.

A folder may hold names that lead out of it, links to files of the machine that reads it, devices,
pipes, and files that claim to be huge. Its content ends in published exports. So a file is opened
only if it is regular, lies in the folder, and is not larger than its kind can be. It must be the
file that a list of checksums beside it names."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from megatron_llama.config.limits import LARGEST_CHECKSUM_LIST, LARGEST_SMALL_FILE, LONGEST_NAME
from megatron_llama.config.lines import require_regular
from megatron_llama.errors import CheckpointError, UserError, describe

SUMS = "SHA256SUMS"
META_SUMS = "checklist.chk"
"""The list of MD5 sums that comes with Meta's downloads."""
MANIFEST = "integrity.json"
"""The list of checksums of a folder of torch_dist: SHA-256 of every other file. Later releases of
Megatron-Core compare it with ``--verify-integrity``; here it is always compared."""


class ListedSum(NamedTuple):
    """The entry of one file in a list of checksums."""

    kind: str
    """``sha256`` or ``md5``."""
    digest: str
    """Hexadecimal, in lower case."""
    list: Path
    """The list that has the entry."""


def read_model_file(
    path: Path,
    *,
    limit: int = LARGEST_SMALL_FILE,
    do: str = "copy the file again",
    error: type[UserError] = CheckpointError,
) -> bytes:
    """Return the content of a file of a folder that came from elsewhere.

    Raises ``error`` with the remedy ``do`` if it cannot be read, is not a regular file, leads out
    of its folder, is larger than ``limit`` bytes, or differs from the checksum of a list in its
    folder or in the one above."""
    content = read_bounded(path, limit=limit, do=do, error=error)
    # An object store has neither links nor lists beside a file.
    on_disk = isinstance(path, Path)
    if on_disk:
        require_within(path, content, error=error)
    listed = listed_sum(path, error=error) if on_disk else None
    if listed is not None:
        digest = hashlib.new(listed.kind, content, usedforsecurity=False).hexdigest()
        if digest != listed.digest:
            raise error(sum_problem(path, f"{listed.kind} {digest}", listed))
    return content


def read_bounded(
    path: Path, *, limit: int, do: str, error: type[UserError] = CheckpointError
) -> bytes:
    """Return the content of a regular file of at most ``limit`` bytes, wherever it lies. Raises
    ``error`` with the remedy ``do``."""
    # An object store has no devices.
    if isinstance(path, Path):
        require_model_file(path, do=do, error=error)
    try:
        with path.open("rb") as file:
            # Reading allocates the requested size, so no more is requested than the file has.
            content: bytes = file.read(min(path.stat().st_size, limit) + 1)
    except OSError as problem:
        got = problem.strerror or problem
        raise error(path, got=got, expected="a readable file", do=do) from problem
    if len(content) > limit:
        size = path.stat().st_size
        got = f"a file of {max(size, len(content)):,} bytes"
        raise error(
            path, got=got, expected=f"at most {limit:,}, more than any such file has", do=do
        )
    return content


def is_there(path: Path, *, error: type[UserError] = CheckpointError) -> bool:
    """Whether a folder has an optional file. Raises ``error`` if it lacks one that a list of
    checksums beside it names: without it the others would mean something else."""
    if path.is_file():
        return True
    if not isinstance(path, Path):
        return False
    listed = listed_sum(path, error=error)
    if listed is not None and not path.exists():
        raise error(sum_problem(path, "no such file", listed))
    if path.exists() and not path.is_dir():
        require_model_file(path, error=error)
    return False


def require_model_file(
    path: Path, *, do: str = "copy the file again", error: type[UserError] = CheckpointError
) -> None:
    """Raise ``error`` unless a path leads to a regular file: opening a pipe would wait forever, and
    a device has no end."""
    try:
        require_regular(path)
    except OSError as problem:
        got = problem.strerror or problem
        raise error(path, got=got, expected="a readable file", do=do) from problem


def require_within(path: Path, content: bytes, *, error: type[UserError] = CheckpointError) -> None:
    """Raise ``error`` where a path is a link that leads out of its folder. A snapshot in the hub's
    cache links to the blobs of its own repository. A store that names files by the digest of their
    ``content`` may lie anywhere (DVC's, git-annex's, the hub's for downloads of 2023): such a link
    can only be made by those who have the content."""
    target = path.resolve()
    folder = path.parent.resolve()
    # .../models--org--name/snapshots/COMMIT/file -> .../models--org--name/blobs/DIGEST
    repository = next((p.parent for p in (folder, *folder.parents) if p.name == "snapshots"), None)
    own = repository is not None and target.parent == (repository / "blobs").resolve()
    if folder in target.parents or own or _is_named_by_digest(target, content):
        return
    raise error(
        path,
        got=f"a link to {target}",
        expected=f"a file in {folder}: what is read there can end in a folder that is published",
        do="name the file that it leads to, if you mean that one, or put the file in the place of "
        f"the link: cp --remove-destination {target} {path}",
    )


def _is_named_by_digest(path: Path, content: bytes) -> bool:
    """Whether the name of a file is the digest of its content."""
    name = path.name
    # DVC: files/md5/ab/cdef...; git-annex: SHA256E-s123--DIGEST.json
    names = {name, path.parent.name + name, name.rpartition("--")[2].partition(".")[0]}
    blob = b"blob %d\0" % len(content) + content  # git's name of a file, and the hub's
    made = [hashlib.new(kind, content, usedforsecurity=False) for kind in ("md5", "sha1", "sha256")]
    digests = {digest.hexdigest() for digest in made}
    return bool(names & {*digests, hashlib.sha1(blob, usedforsecurity=False).hexdigest()})


def is_name_within(name: str) -> bool:
    """Whether a name in a file is that of a file in the same folder."""
    parts = PurePosixPath(name).parts
    within = bool(parts) and not name.startswith("/") and ".." not in parts and "\0" not in name
    return within and all(len(os.fsencode(component)) <= LONGEST_NAME for component in parts)


def parse_sum_line(line: str, kind: str = "sha256") -> tuple[str, str] | None:
    """Return the checksum and the name in a line as ``sha256sum`` or ``md5sum`` write it; None for
    any other line, and for a name outside of the folder."""
    digits = 32 if kind == "md5" else 64
    match = re.fullmatch(rf"([0-9a-fA-F]{{{digits}}}) [ *](?:\./)?(.+)", line.strip())
    if match is None or not is_name_within(match[2]):
        return None
    return match[1].lower(), match[2]


def read_sums(
    folder: Path, *, asked: str | None = None, error: type[UserError] = CheckpointError
) -> tuple[dict[str, ListedSum], int]:
    """Return the entries of the lists of checksums in a folder by the paths of their files in it,
    and the number of lines that concern no file in it. Raises ``error`` for two sums of one file;
    if one file is ``asked`` for, only for two of that file."""
    sums: dict[str, ListedSum] = {}
    others = 0
    for kind, list_name in (("md5", META_SUMS), ("sha256", SUMS)):
        path = folder / list_name
        if not path.is_file():
            continue
        with path.open("rb") as file:
            content = file.read(LARGEST_CHECKSUM_LIST + 1)
        if len(content) > LARGEST_CHECKSUM_LIST:
            expected = f"a list of at most {LARGEST_CHECKSUM_LIST:,} bytes"
            raise error(path, got="a longer one", expected=expected, do="remove it")
        for line in content.decode(errors="replace").splitlines():
            parsed = parse_sum_line(line, kind)
            if parsed is None:
                others += bool(line.strip())
                continue
            digest, name = parsed
            listed = ListedSum(kind, digest, path)
            known = sums.setdefault(name, listed)
            if known.list == path and known != listed and asked in (None, name):
                got = f"two sums of {name}"
                raise error(path, got=got, expected="one", do="remove the line that is wrong")
            sums[name] = listed
    sums |= _manifest_sums(folder / MANIFEST)
    return sums, others


def _manifest_sums(path: Path) -> dict[str, ListedSum]:
    """Return the entries of the manifest of a torch_dist folder; none where it has another form."""
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        content = file.read(LARGEST_CHECKSUM_LIST)
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or manifest.get("algorithm") != "sha256":
        return {}
    return {
        name: ListedSum("sha256", digest.lower(), path)
        for name, digest in files.items()
        if isinstance(digest, str)
        and re.fullmatch("[0-9a-fA-F]{64}", digest)
        and is_name_within(name)
    }


def listed_sum(path: Path, *, error: type[UserError] = CheckpointError) -> ListedSum | None:
    """Return the entry of a file in a list in its folder, or in the folder above; None if there is
    none."""
    folder = path.parent
    for place, name in ((folder, path.name), (folder.parent, f"{folder.name}/{path.name}")):
        if any((place / listing).is_file() for listing in (SUMS, META_SUMS, MANIFEST)):
            sums, _ = read_sums(place, asked=name, error=error)
            if name in sums:
                return sums[name]
    return None


def sum_problem(path: Path, got: str, listed: ListedSum) -> str:
    """Return the message that a file differs from the one that was written, with both remedies."""
    pattern = f"{path.relative_to(listed.list.parent)}".replace(".", r"\.").replace("/", r"\/")
    expected = f"{listed.kind} {listed.digest}, by {listed.list.name}"
    do = (
        "copy the file again from where the model came from; if you changed it yourself, take its "
        f"line out of the list: sed -i '/ {pattern}$/d' {listed.list}"
    )
    if listed.list.name == MANIFEST:
        do = f"copy the folder again, or remove {MANIFEST} if you changed the file yourself"
    return describe(path, got=got, expected=expected, do=do)
