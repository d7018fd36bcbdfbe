"""What goes wrong on the host says which bucket it concerns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_llama.errors import OffloadError, describe


@contextmanager
def of_bucket(label: str) -> Iterator[None]:
    """A section in which whatever a copy or the worker raises becomes an OffloadError about the
    bucket ``label``. One that is such an error already passes: it may be waited for by others than
    its own bucket."""
    try:
        yield
    except OffloadError:
        raise
    except Exception as error:
        where = f"optimizer offload, {label}"
        got = f"{type(error).__name__}: {error}"
        do = "look at the memory of this machine and at what it printed before; resume from the last checkpoint"
        raise OffloadError(
            describe(where, got=got, expected="an update on the host", do=do)
        ) from error
