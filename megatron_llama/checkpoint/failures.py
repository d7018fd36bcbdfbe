"""Turns errors of the operating system into CheckpointErrors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_llama.errors import CheckpointError, UserError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A section that writes ``path``. Whatever goes wrong in it becomes a CheckpointError that
    names the file and the cause."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise not_written(path, error) from error


def not_written(path: Path, error: BaseException) -> CheckpointError:
    """Return the error of a file that could not be written."""
    # The operating system's error may be the cause of causes: a full disk reaches us as a
    # RuntimeError of torch's zip writer.
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    where = path if cause is None else cause.filename or path
    got = f"{type(error).__name__}: {error}" if cause is None else cause.strerror
    do = "free space or mend the permissions, and try again; what was there before is untouched"
    return CheckpointError(where, got=got, expected="to write it", do=do)
