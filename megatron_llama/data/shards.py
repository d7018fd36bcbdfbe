"""The shards of a text corpus: the files that --data-path names, and the pieces of them. Only the
sizes of files are read, so that a corpus of any size is opened in a moment."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePosixPath

from megatron_llama.data.byte_ranges import SourceFile, local_file, remote_files
from megatron_llama.data.documents import files_below
from megatron_llama.data.words import COMPRESSED, JSON_LINES, WILD, is_text, is_url, kind
from megatron_llama.errors import DataError

LARGEST_PIECE = 64 << 20
SMALLEST_PIECE = 64 << 10
"""Bytes. A piece costs a seek, or a request to a server."""
PIECES_OF_A_LANE = 8
"""A lane takes so many pieces of a small corpus in each pass: all lanes end a pass at about the
same time."""
_BESIDE = re.compile(
    r"(readme|licen[cs]e|notice|citation|changelog|dataset_infos?|_success|sha256sums|md5sums)"
    r"(\..*)?|.*\.(md|ya?ml|py|bib|png|jpg|svg|sha256|md5|crc|idx|lock|html)",
    re.IGNORECASE,
)
"""Names of files beside the shards of a data set that are no shards."""
_SPLITS = re.compile(
    r"(?<![a-z])(train(?:ing)?|valid(?:ation)?|val|dev|test(?:ing)?|eval)(?![a-z])"
)
_VALIDATION = ("valid", "validation", "val", "dev")
_TRAINING = ("train", "training")


@dataclass(frozen=True)
class Shard:
    """A file of text."""

    name: str
    """Name relative to the folder that --data-path names, with slashes."""
    file: SourceFile


@dataclass(frozen=True)
class Piece:
    """Part of a shard that is read in one go: the lines that begin in the bytes [start, stop) of an
    uncompressed file, or the whole of any other."""

    shard: int
    start: int
    stop: int


def find_shards(word: str, pool: Executor) -> list[Shard]:
    """Return the files that a word of --data-path names, sorted by name. The threads of ``pool``
    ask for the sizes of remote ones. Raises DataError if there are no files of text, or if a file
    has an unknown suffix."""
    files = list(remote_files(word, pool) if is_url(word) else _local_files(word))
    named = [(name, file) for name, file in files if not _beside(name)]
    unknown = sorted(name for name, _ in named if not is_text(name))
    if unknown:
        arrow = any(name.endswith(".arrow") for name in unknown)
        do = (
            "write a folder of datasets.save_to_disk as parquet (Dataset.to_parquet)"
            if arrow
            else "give a pattern that leaves them out, such as 'FOLDER/*.jsonl'"
        )
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise DataError(
            f"--data-path {word}",
            got=f"{', '.join(unknown[:3])}{more}",
            expected="files .jsonl, .json (an object to a line) or .parquet, or these with .gz or "
            ".zst",
            do=do,
        )
    shards = [Shard(name, file) for name, file in sorted(named) if file.size > 0]
    if not shards:
        raise DataError(
            f"--data-path {word}",
            got="no file of text" if not named else "empty files",
            expected="PREFIX.bin and PREFIX.idx, or a folder, a pattern or a URL of .jsonl or "
            ".parquet files",
            do="check the path",
        )
    return shards


def _local_files(word: str) -> Iterator[tuple[str, SourceFile]]:
    folder = Path(word)
    if WILD.search(word) is not None and not folder.exists():
        paths = [Path(path) for path in glob.glob(word, recursive=True) if Path(path).is_file()]
        folder = Path(re.split(r"[^/]*[*?\[]", word)[0] or ".")
    elif folder.is_dir():
        paths = files_below(folder)
    else:
        paths = [folder]
        folder = folder.parent
    for path in paths:
        yield os.path.relpath(path, folder).replace(os.sep, "/"), local_file(path)


def _beside(name: str) -> bool:
    names = PurePosixPath(name).parts
    return any(name.startswith(".") for name in names) or (_BESIDE.fullmatch(names[-1]) is not None)


def split_of(shard: Shard) -> str:
    """Return the split to which a shard's name assigns it, as the names of data sets on the Hugging
    Face hub do: ``training``, ``validation``, ``test``, or nothing."""
    words = _SPLITS.findall(shard.name.lower())
    if not words:
        return ""
    # The file's own name says more than those of its folders.
    last = words[-1]
    return "training" if last in _TRAINING else "validation" if last in _VALIDATION else "test"


def shards_of(shards: Sequence[Shard], *, validation: bool) -> list[Shard]:
    """Return the shards of the validation split, or those for training: all whose name assigns
    them to no other split."""
    if validation:
        return [shard for shard in shards if split_of(shard) == "validation"]
    return [shard for shard in shards if split_of(shard) in ("", "training")]


def cut(shards: Sequence[Shard], lanes: int) -> list[Piece]:
    """Cut shards into pieces, in file order. The pieces depend on names and sizes alone."""
    total = sum(shard.file.size for shard in shards)
    size = total // (lanes * PIECES_OF_A_LANE)
    size = min(max(size, SMALLEST_PIECE), LARGEST_PIECE)
    pieces = []
    for shard_number, shard in enumerate(shards):
        length = shard.file.size
        name = Path(PurePosixPath(shard.name).name)
        count = 1
        if kind(name) in JSON_LINES and name.suffix not in COMPRESSED:
            count = max(1, round(length / size))
        ends = [length * number // count for number in range(count + 1)]
        pieces += [Piece(shard_number, start, stop) for start, stop in pairwise(ends)]
    return pieces
