"""The limits on activations that exist at once: recomputation, and chunks of logits."""

from __future__ import annotations

from typing import Literal

Granularity = Literal["none", "selective", "full"]
GRANULARITIES: tuple[Granularity, ...] = ("none", "selective", "full")
HEAD_CHUNK = 2**28
"""Logits that a rank holds at once unless it must hold those of all tokens: 512 MiB in bf16. Each
chunk reads and writes the fp32 gradient of the whole head, so smaller chunks would cost time."""
CHUNK_ROWS = 256
"""A chunk has a multiple of so many tokens. A GPU computes matrix products in tiles of up to 256
rows, and a product with one row more takes as long as one with another tile."""
LOSS_CHUNK = 2**19
"""Logits whose cross entropy a host computes at once, as many as its cache holds."""


def head_rows(head_chunk: int, columns: int) -> int:
    """Return the tokens of a chunk of at most ``head_chunk`` logits, ``columns`` a token: a
    multiple of CHUNK_ROWS, or fewer if not even CHUNK_ROWS fit, but at least one."""
    rows = max(1, head_chunk // columns)
    return rows if rows < CHUNK_ROWS else rows // CHUNK_ROWS * CHUNK_ROWS
