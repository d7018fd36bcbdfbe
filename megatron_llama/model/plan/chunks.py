"""How much of a step's activations exists at once: what is recomputed, and chunks of logits."""

from __future__ import annotations

from typing import Literal

Granularity = Literal["none", "selective", "full"]
GRANULARITIES: tuple[Granularity, ...] = ("none", "selective", "full")
HEAD_CHUNK = 2**28
"""Logits that a rank holds at once where it need not hold those of all tokens: 512 MiB in bf16.
Each chunk reads and writes the fp32 gradient of the whole head, so smaller chunks would cost
time."""
CHUNK_ROWS = 256
"""Tokens of which a chunk has a multiple. A GPU computes matrix products in tiles of up to 256
rows, and a product with one row more takes as long as one with another tile."""
LOSS_CHUNK = 2**19
"""Logits whose cross entropy a host computes at once: what its cache holds."""


def head_rows(head_chunk: int, columns: int) -> int:
    """Returns the tokens of a chunk of at most ``head_chunk`` logits with ``columns`` of a rank: a
    multiple of CHUNK_ROWS, or fewer than that where not even so many fit, but at least one."""
    rows = max(1, head_chunk // columns)
    return rows if rows < CHUNK_ROWS else rows // CHUNK_ROWS * CHUNK_ROWS
