"""Reads files that are small in every real checkpoint: whole, and only if they are."""

from __future__ import annotations

from pathlib import Path

from megatron_llama.errors import CheckpointError


def read_small(path: Path, *, largest: int, do: str) -> bytes:
    """Return the content of a file of at most ``largest`` bytes. ``do`` is the remedy, for
    messages. Raises CheckpointError, also for what is no regular file: a device may have no end,
    and a pipe may have no beginning."""
    expected = "a readable file"
    try:
        if not path.is_file():
            path.stat()  # says what is wrong with a missing one
            raise CheckpointError(path, got="no regular file", expected=expected, do=do)
        with path.open("rb") as file:
            # Room is made for what is asked for, so no more is than the file has.
            content: bytes = file.read(min(path.stat().st_size, largest) + 1)
    except OSError as error:
        got = error.strerror or error
        raise CheckpointError(path, got=got, expected=expected, do=do) from error
    if len(content) > largest:
        expected = f"at most {largest} bytes, far more than a real one has"
        raise CheckpointError(path, got=f"more than {largest} bytes", expected=expected, do=do)
    return content
