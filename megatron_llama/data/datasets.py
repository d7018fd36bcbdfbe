"""Opens indexed datasets, on the disk or behind a URL."""

from __future__ import annotations

from megatron_llama.config.schema import DataConfig
from megatron_llama.data.indexed import IndexedDataset
from megatron_llama.data.meta import SUMS, read_meta
from megatron_llama.data.words import is_url


def open_dataset(prefix: str, data: DataConfig) -> IndexedDataset:
    """Open an indexed dataset, on the disk or behind a URL. Raises DataError if it cannot be used,
    ConfigError for options of the cache that cannot."""
    if not is_url(prefix):
        return _as_written(IndexedDataset(prefix))
    # The cache and the readers of URLs are loaded where a dataset is behind one.
    from megatron_llama.data.remote_indexed import open_remote

    return _as_written(open_remote(prefix, data))


def _as_written(dataset: IndexedDataset) -> IndexedDataset:
    """Return a dataset. Raises DataError if a quick check shows that the sums in its meta.json are
    of another one."""
    sums = (read_meta(dataset.prefix) or {}).get(SUMS)
    if sums is not None:
        dataset.require_sums(sums)
    return dataset
