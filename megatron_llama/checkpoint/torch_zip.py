"""The zip archives that ``torch.save`` writes: one pickle, and one entry for each storage.

No entry may be compressed, or share bytes with another: the content that an archive claims is
bounded by its size. The values are not read here. Their checksums are for the code that reads
them."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import IO

from megatron_llama.config.limits import LARGEST_ENTRIES, LARGEST_PICKLE

TAIL_BYTES = 2**12
"""The directory at the end of an archive with one tensor has some 600 bytes."""
LOCAL_HEADER = 30
"""Bytes in front of the name of an entry."""


@dataclass(frozen=True)
class Entry:
    """One entry of a zip archive: the place of its bytes, and their checksum."""

    start: int
    size: int
    crc: int


def read_entries(
    file: IO[bytes], size: int, *, largest: int = LARGEST_PICKLE
) -> tuple[bytes, dict[str, Entry]]:
    """Return the pickle in an archive of ``size`` bytes, and the entries with the tensors' values
    by their keys.

    Entries of other purposes have at most ``largest`` bytes: they are read, which checks them.
    Raises BadZipFile for bytes that are compressed, shared by two entries, or missing."""
    if file.read(4) != b"PK\x03\x04":
        raise zipfile.BadZipFile("no zip archive: torch before 1.6 wrote others")
    with zipfile.ZipFile(file) as archive:
        infos = archive.infolist()
        if len(infos) > LARGEST_ENTRIES:
            got = f"{len(infos):,} entries, where {LARGEST_ENTRIES:,} are allowed"
            raise zipfile.BadZipFile(got)
        _require_stored(infos)
        places = {info.filename: _place(file, info) for info in infos}
        if len(places) != len(infos):
            raise zipfile.BadZipFile("two entries of one name")
        _require_apart(infos, places, size)
        pickles = [name for name in places if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise zipfile.BadZipFile("no single data.pkl")
        root = pickles[0].removesuffix("data.pkl")
        values = f"{root}data/"
        text = b""
        for info in infos:
            if info.filename.startswith(values):
                continue
            if info.file_size > largest:
                got = f"{info.filename} of {info.file_size:,} bytes"
                raise zipfile.BadZipFile(f"{got}, where {largest:,} are allowed")
            content = archive.read(info)
            if info.filename == pickles[0]:
                text = content
            if info.filename == f"{root}byteorder" and content != b"little":
                raise zipfile.BadZipFile(f"byte order {content[:10]!r}, where 'little' is read")
    entries = {name.removeprefix(values): place for name, place in places.items()}
    return text, entries


def find_entry(entries: Mapping[str, Entry], key: str, nbytes: int) -> Entry:
    """Return the entry of a storage that has ``nbytes`` by the pickle. Raises UnpicklingError."""
    entry = entries.get(key)
    if entry is None or entry.size != nbytes:
        size = "none" if entry is None else f"{entry.size:,}"
        raise pickle.UnpicklingError(f"storage {key} of {nbytes:,} bytes, where {size} are")
    return entry


def values_crc32(tail: bytes) -> int | None:
    """Return the CRC-32 of the values in an archive that ``torch.save`` has just written for one
    tensor, from the directory in the ``tail``, the last bytes of the file. None if torch wrote an
    archive of another kind."""
    try:
        # The directory is enough for zipfile, which looks for the entries only to read them.
        with zipfile.ZipFile(io.BytesIO(tail)) as archive:
            sums = [info.CRC for info in archive.infolist() if info.filename.endswith("/data/0")]
    except (zipfile.BadZipFile, ValueError):
        return None
    return sums[0] if sums else None


def _require_stored(infos: Iterable[zipfile.ZipInfo]) -> None:
    """Raise BadZipFile for compressed entries: torch writes none, and 6 kB can be 8 GB."""
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            sizes = f"{info.compress_size:,} bytes that become {info.file_size:,}"
            raise zipfile.BadZipFile(f"{info.filename} is compressed, {sizes}")


def _place(file: IO[bytes], info: zipfile.ZipInfo) -> Entry:
    """Return the place of an entry's bytes, by the header in front of them."""
    file.seek(info.header_offset)
    header = file.read(LOCAL_HEADER)
    if len(header) != LOCAL_HEADER or header[:4] != b"PK\x03\x04":
        raise zipfile.BadZipFile(f"no header of {info.filename}")
    name, extra = struct.unpack_from("<HH", header, LOCAL_HEADER - 4)
    start = info.header_offset + LOCAL_HEADER + name + extra
    return Entry(start, info.file_size, info.CRC)


def _require_apart(
    infos: Iterable[zipfile.ZipInfo], places: Mapping[str, Entry], size: int
) -> None:
    """Raise BadZipFile if entries share bytes or end behind the file."""
    last = 0
    for info in sorted(infos, key=lambda info: info.header_offset):
        place = places[info.filename]
        if info.header_offset < last:
            raise zipfile.BadZipFile(f"{info.filename} shares bytes with another entry")
        last = place.start + place.size
        if last > size:
            raise zipfile.BadZipFile(
                f"{info.filename} ends at {last:,}, behind the file's {size:,}"
            )
