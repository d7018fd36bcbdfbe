"""Bits that a disk or a memory has flipped."""

from __future__ import annotations

from pathlib import Path


def flip(path: Path, at: int, bits: int = 1) -> None:
    """Flip bits of the byte ``at``, from the end if it is negative."""
    content = bytearray(path.read_bytes())
    content[at] ^= bits
    path.write_bytes(content)
