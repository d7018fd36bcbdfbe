"""Indexed datasets behind a URL. PREFIX.idx is copied once, of PREFIX.bin the blocks are read that
samples touch (``block_cache.py``)."""

from __future__ import annotations

import numpy as np

from megatron_llama.config.schema import DataConfig
from megatron_llama.data.block_cache import BlockCache, cache_folder
from megatron_llama.data.byte_ranges import SourceFile, find_file, is_url
from megatron_llama.data.indexed import IndexedDataset, Tokens
from megatron_llama.data.meta import SUMS, read_meta
from megatron_llama.errors import ConfigError, DataError


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
        """The versions of the two files: every rank asks the server, at a time of its own."""
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
    found = find_file(url)
    if found is None:
        raise DataError(
            url,
            got="no such file",
            expected="PREFIX.bin and PREFIX.idx",
            do="give the common URL of the .bin and .idx files, without suffix",
        )
    if not found.version:
        raise DataError(
            url,
            got="a file without version: the server sends neither ETag nor Last-Modified",
            expected="one of them, by which a run notices that the file was replaced",
            do="serve the files with nginx, caddy or an object store, or copy them to a disk",
        )
    return found


def open_dataset(prefix: str, data: DataConfig) -> IndexedDataset:
    """Open an indexed dataset, on the disk or behind a URL. Raises DataError if it cannot be used,
    ConfigError for options of the cache that cannot."""
    if not is_url(prefix):
        return _as_written(IndexedDataset(prefix))
    if not data.data_cache_gib > 0:
        raise ConfigError(
            "--data-cache-gib",
            got=f"{data.data_cache_gib:g}",
            expected="more than 0 GiB",
            do="change it",
        )
    folder = cache_folder(data.data_cache_path) / "blocks"
    cache = BlockCache(folder, int(data.data_cache_gib * 2**30))
    return _as_written(RemoteIndexedDataset(prefix, cache))


def _as_written(dataset: IndexedDataset) -> IndexedDataset:
    """Return a dataset. Raises DataError if it is at once to be seen that it is not the one of
    which its meta.json has the sums."""
    sums = (read_meta(dataset.prefix) or {}).get(SUMS)
    if sums is not None:
        dataset.require_sums(sums)
    return dataset
