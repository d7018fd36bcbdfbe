"""Writes the files of a checkpoint, in the format of torch.distributed.checkpoint, with bounded
memory, checksums, and errors that name the file."""

from __future__ import annotations

import pickle
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from megatron_llama.checkpoint.bounds import largest_index, require_size, size_of
from megatron_llama.checkpoint.checksums import HashedFile
from megatron_llama.checkpoint.chunks import Region
from megatron_llama.checkpoint.failures import writing
from megatron_llama.checkpoint.finite import NotFinite, copy_to_host
from megatron_llama.checkpoint.index import METADATA
from megatron_llama.checkpoint.storage_paths import is_remote
from megatron_llama.checkpoint.torch_zip import TAIL_BYTES, values_crc32
from megatron_llama.errors import CheckpointError, describe, listing

LISTED = 10
"""Number of problems that are listed: a damaged checkpoint may have thousands of one kind."""


@dataclass(frozen=True)
class WrittenParts:
    """The chunks that one rank has written."""

    places: dict[MetadataIndex, _StorageInfo]
    """File and position of each chunk."""
    sums: dict[str, str]
    """SHA-256 by file name."""
    not_finite: tuple[NotFinite, ...] = ()
    """Values that are infinite or NaN, by part."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Bytes by file name, where the chunks stand in a part of the index and not in ``places``."""


def write_parts(folder: Path, rank: int, parts: Iterable[Region]) -> WrittenParts:
    """Write and sync this rank's file: one ``torch.save`` after the other, as torch's own writer
    does. Only a copy of one part is in memory at a time. Raises CheckpointError naming the file."""
    name = f"__{rank}_0{DEFAULT_SUFFIX}"
    places = {}
    not_finite: list[NotFinite] = []
    with writing(folder):
        # Rank 0 has made the folder, but another machine's view of a shared disk may be behind.
        folder.mkdir(parents=True, exist_ok=True)
    with writing(folder / name), HashedFile(folder / name, tail_bytes=TAIL_BYTES) as file:
        for part in parts:
            start = file.tell()
            # A copy, since torch saves the whole storage of a view.
            values, problem = copy_to_host(part)
            not_finite += [problem] if problem is not None else []
            torch.save(values, cast(IO[bytes], file))
            del values  # not in memory while the next part is read
            place = _StorageInfo(name, start, file.tell() - start)
            # This binds the file to its index. torch pickles all attributes, and reads over it.
            place.crc32 = values_crc32(file.tail)  # type: ignore[attr-defined]
            places[part.index] = place
    sums = {name: file.sum} if places else {}
    return WrittenParts(places, sums, tuple(not_finite))


def write_index(folder: Path, index: Metadata, written: Sequence[WrittenParts]) -> dict[str, str]:
    """Write the index of all ranks' chunks and return the checksums of all files so far. Raises
    CheckpointError unless the files of every rank can be seen here, and the index can be read.
    """
    index.storage_data = {key: place for rank in written for key, place in rank.places.items()}
    with writing(folder / METADATA), HashedFile(folder / METADATA) as file:
        pickle.dump(index, file)
    problems = file_problems(
        folder, index.storage_data.values(), do="save to a folder that all machines share"
    )
    refuse("the files of some ranks have not arrived:", problems)
    size = size_of(folder / METADATA)
    do = "save from fewer ranks, whose parts are larger"
    require_size(folder / METADATA, size, largest_index(folder, size), do=do)
    sums = {name: digest for rank in written for name, digest in rank.sums.items()}
    return {**sums, METADATA: file.sum}


def file_problems(folder: Path, places: Iterable[Any], *, do: str) -> list[str]:
    """Return a line for each file that is missing, no regular file, or too short for its chunks;
    ``places`` has their (relative_path, offset, length)."""
    needed: dict[str, int] = {}
    for place in places:
        end = place.offset + place.length
        needed[place.relative_path] = max(needed.get(place.relative_path, 0), end)
    problems = []
    for name, size in sorted(needed.items()):
        path = folder / name
        try:
            status = path.stat()
        except OSError as error:
            problems.append(
                describe(path, got=error.strerror, expected=f"a file of {size} bytes", do=do)
            )
            continue
        # A device or a pipe may have no end. Links to files are a hub's cache, or a user's.
        if not is_remote(path) and not stat.S_ISREG(status.st_mode):
            expected = f"a file of {size} bytes"
            problems.append(describe(path, got="no regular file", expected=expected, do=do))
        elif status.st_size < size:
            expected = f"{size}: it was cut off"
            problems.append(describe(path, got=f"{status.st_size} bytes", expected=expected, do=do))
    return problems


def refuse(title: str, problems: list[str]) -> None:
    """Raise CheckpointError with the problems, if there are any."""
    if problems:
        more = [f"and {len(problems) - LISTED} more"] if len(problems) > LISTED else []
        raise CheckpointError(listing(title, [*problems[:LISTED], *more]))
