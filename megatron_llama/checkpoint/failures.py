"""The operating system's complaints as CheckpointError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_llama.errors import CheckpointError, UserError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A section that writes ``path``: whatever goes wrong becomes a CheckpointError naming the file
    and the cause."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise not_written(path, error) from error


def not_written(path: Path, error: BaseException) -> CheckpointError:
    """The error of a file that could not be written."""
    system = _system_error(error)
    where, got = (
        (path, f"{type(error).__name__}: {error}")
        if system is None
        else (system.filename or path, system.strerror)
    )
    do = "free space or mend the permissions, and try again; what was there before is untouched"
    return CheckpointError(where, got=got, expected="to write it", do=do)


def _system_error(error: BaseException) -> OSError | None:
    """The cause of causes: a full disk reaches us as a RuntimeError of torch's zip writer."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, OSError):
        seen = seen.__cause__ or seen.__context__
    return seen
