"""Errors that users can cause. Every message names the field, file or rank, the value found, the
value expected, and the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from math import isqrt

_TRIED = 1_000_000
"""The number of divisors that are tried."""


class UserError(ValueError):
    """Base of everything a user can cause. The command line prints it as one message, without a
    traceback.

    It takes a whole message, or the parts of the usual sentence, as ``describe`` does:
    ``DataError(path, got="no such file", expected="a folder", do="check the path")``."""

    everywhere = False
    """Every rank raises it, so that one of them is enough to print it."""

    printed = False
    """It has been printed, before this rank left the others."""

    def __init__(
        self, where: object, *, got: object = "", expected: object = "", do: str | None = None
    ) -> None:
        # The message is the only argument that the base class keeps: so the error can be pickled.
        super().__init__(
            where if do is None else describe(where, got=got, expected=expected, do=do)
        )


class ConfigError(UserError):
    """A flag, a YAML key or a combination of them is wrong."""

    everywhere = True


class DataError(UserError):
    """A corpus, an indexed dataset or a tokenizer is missing, damaged or does not fit the model."""


class CheckpointError(UserError):
    """A checkpoint or a HuggingFace folder is missing, damaged, or belongs to another model."""


class LeaseError(CheckpointError):
    """Another run writes into the folder of this run's checkpoints, or has taken it over."""


class ClusterError(UserError):
    """Processes, devices or the network do not fit what was asked for."""


class LostRankError(ClusterError):
    """This rank cannot go on because another one is gone, stuck or has failed."""


class OffloadError(UserError):
    """The optimizer on the host cannot work: no memory, a copy that failed, a worker that died."""


class TrainingError(UserError):
    """Training cannot go on: the loss or the gradients are not finite."""

    everywhere = True


def describe(where: object, *, got: object, expected: object, do: str) -> str:
    """Return the sentence of every message: ``where: got X, expected Y; do Z``."""
    return f"{where}: got {got}, expected {expected}; {do}"


def listing(title: str, problems: Iterable[str]) -> str:
    """Return a title and one problem per line, so that a user mends everything in one go."""
    return "\n".join([title, *(f"  - {problem}" for problem in problems)])


def counted(count: int, thing: str, things: str = "") -> str:
    """Return ``1 token``, ``7 tokens``, ``1,200 tokens``. ``things``: the plural, if not by an
    s."""
    return f"{count:,} {thing if count == 1 else things or thing + 's'}"


def nearest_divisors(whole: int, value: int) -> str:
    """Return the divisors of ``whole`` next below and above ``value``, for a remedy: ``2 or 4``.
    Both numbers are positive. For numbers beyond 10**12 they are divisors near it."""
    # A divisor beyond the root has a partner below it.
    small = [n for n in range(1, min(isqrt(whole), _TRIED) + 1) if whole % n == 0]
    divisors = sorted({*small, *(whole // n for n in small)})
    below = [n for n in divisors if n < value]
    above = [n for n in divisors if n > value]
    return " or ".join(map(str, below[-1:] + above[:1]))


def nearest_multiples(value: int, unit: int) -> str:
    """Return the positive multiples of ``unit`` next to ``value``, for a remedy: ``96 or 128``."""
    below = max(value, 0) // unit * unit
    return " or ".join(str(n) for n in (below, below + unit) if n > 0)
