"""Indexed datasets behind a URL. PREFIX.idx is copied once; from PREFIX.bin only those blocks are
read that hold samples (``block_cache.py``)."""

from __future__ import annotations

import hashlib

import numpy as np

from megatron_llama.config.schema import DataConfig
from megatron_llama.data.block_cache import BlockCache, cache_folder
from megatron_llama.data.byte_ranges import SourceFile, find_file, read_range
from megatron_llama.data.indexed import IndexedDataset, Tokens
from megatron_llama.data.sums import FileSums
from megatron_llama.errors import ConfigError, DataError

VERIFIED_BYTES = 8 << 20
"""Bytes of one request while a file is compared with its sums."""


class RemoteIndexedDataset(IndexedDataset):
    """The documents of a remote PREFIX.bin as one token stream."""

    is_remote = True

    def __init__(self, prefix: str, cache: BlockCache) -> None:
        """Raises DataError if a file is missing or damaged, or cannot be read."""
        self.prefix = prefix
        self._cache = cache
        self._idx = required_file(f"{prefix}.idx")
        self._bin = required_file(f"{prefix}.bin")
        self._open_index(cache.whole(self._idx), self._bin.size)

    @property
    def found(self) -> str:
        """Versions of the two files: every rank asks the server, at a time of its own."""
        return ", ".join(
            f"{suffix} of {file.size} bytes ({file.version})"
            for suffix, file in ((".idx", self._idx), (".bin", self._bin))
        )

    def _read(self, start: int, stop: int) -> Tokens:
        item = self.dtype.itemsize
        content = self._cache.read(self._bin, start * item, stop * item)
        return np.frombuffer(content, dtype=self.dtype)

    def fetch(self, start: int, stop: int) -> None:
        item = self.dtype.itemsize
        self._cache.fetch(self._bin, start * item, stop * item)


def required_file(url: str) -> SourceFile:
    """Return a file of a remote dataset. Raises DataError if it is not there, or if the server does
    not say which version of it there is."""
    file = find_file(url)
    if file is None:
        raise DataError(
            url,
            got="no such file",
            expected="PREFIX.bin and PREFIX.idx",
            do="give the common URL of the .bin and .idx files, without suffix",
        )
    if not file.version:
        raise DataError(
            url,
            got="a file without version: the server sends neither ETag nor Last-Modified",
            expected="one of them, by which a run notices that the file was replaced",
            do="serve the files with nginx, caddy or an object store, or copy them to a disk",
        )
    return file


def open_remote(prefix: str, data: DataConfig) -> RemoteIndexedDataset:
    """Open an indexed dataset behind a URL. Raises DataError if it cannot be used, ConfigError for
    options of the cache that cannot."""
    if not data.data_cache_gib > 0:
        raise ConfigError(
            "--data-cache-gib",
            got=f"{data.data_cache_gib:g}",
            expected="more than 0 GiB",
            do="change it",
        )
    folder = cache_folder(data.data_cache_path) / "blocks"
    cache = BlockCache(folder, int(data.data_cache_gib * 2**30))
    return RemoteIndexedDataset(prefix, cache)


def verify_remote(name: str, sums: FileSums) -> None:
    """Raise DataError unless a file behind a URL has the sums with which it was written."""
    file = required_file(name)
    sums.require_size(name, file.size)
    for piece in range(len(sums.pieces)):
        digest = hashlib.sha256()
        start, stop = sums.ends(piece)
        for first in range(start, stop, VERIFIED_BYTES):
            digest.update(read_range(file, first, min(first + VERIFIED_BYTES, stop)))
        sums.require_piece(name, piece, digest)
