"""How far ``shard`` is from DDP, and how far it may be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_llama.prove.pool import WorkerError, WorkerPool
from tools.zoo.training import LR, MODELS, STRATEGIES, Trained, train_by_ddp, train_by_shard

LOSS_BOUND, NORM_BOUND, VALUE_BOUND = 1e-6, 2e-5, 0.05
"""Relative differences of losses and of gradient norms, and the difference of a final value in
learning rates, by which one step of AdamW may move an element (docs/numerics.md). Where torch's own
fp32 is further than half of this from its fp64, twice that distance is the bound."""
SECONDS = 300.0
"""The most that one training may take."""


@dataclass(frozen=True)
class Differences:
    """The largest differences of two trainings."""

    loss: float
    norm: float
    values: Mapping[str, float]
    """By parameter or buffer, in learning rates."""

    @property
    def value(self) -> float:
        """The largest of all parameters and buffers."""
        return max(self.values.values(), key=_size)


@dataclass(frozen=True)
class Compared:
    """A model, trained in one way by both."""

    name: str
    ranks: int
    strategy: str
    units: int
    parameters: int
    found: Differences
    bound: str
    """Which bound was held, or what is wrong."""
    holds: bool


def compare(pool: WorkerPool, name: str, ranks: int) -> list[Compared]:
    """Train a model by DDP and by every strategy of ``shard``. Raises WorkerError where DDP does
    not train it."""
    expected = pool.run(ranks, train_by_ddp, name, timeout=SECONDS)
    exact: Differences | str | None = None
    compared = []
    for strategy in STRATEGIES:
        try:
            got: list[Trained] = pool.run(ranks, train_by_shard, name, strategy, timeout=SECONDS)
        except WorkerError as error:
            nothing = Differences(math.nan, math.nan, {"": math.nan})
            last = next(iter(error.errors.values())).strip().splitlines()[-1]
            compared.append(Compared(name, ranks, strategy, 0, 0, nothing, last, holds=False))
            continue
        found = differences(got, expected)
        bound = ""
        if len({trained.digest for trained in got}) > 1:
            bound = "ranks hold different parameters"
        elif not _within(found, None):
            if exact is None:
                exact = _rounding(pool, name, ranks, expected)
            if isinstance(exact, str):
                bound = f"beyond, and in fp64 DDP fails: {exact}"
            elif not _within(found, exact):
                bound = f"BEYOND ({_worst(found, exact)})"
        holds = not bound
        if holds:
            bound = "fixed" if _within(found, None) else _doubled(exact)
        trained = got[0].trained
        numel = sum(value.numel() for key, value in got[0].values.items() if key in trained)
        compared.append(
            Compared(name, ranks, strategy, got[0].units, numel, found, bound, holds=holds)
        )
    return compared


def differences(found: Sequence[Trained], expected: Sequence[Trained]) -> Differences:
    """Return the largest differences over all ranks, microbatches and steps."""
    pairs = list(zip(found, expected, strict=True))
    first, other = found[0].values, expected[0].values
    assert first.keys() == other.keys(), first.keys() ^ other.keys()
    assert found[0].trained == expected[0].trained
    return Differences(
        max((_relative(one.losses, two.losses) for one, two in pairs), key=_size),
        max((_relative(one.norms, two.norms) for one, two in pairs), key=_size),
        {name: _distance(first[name], other[name]) for name in other},
    )


def _distance(found: Tensor, expected: Tensor) -> float:
    if not expected.numel():
        return 0.0
    return float((found.double() - expected.double()).abs().max()) / LR


def _relative(found: Sequence[float], expected: Sequence[float]) -> float:
    one = torch.tensor(found, dtype=torch.float64)
    return float((one / torch.tensor(expected, dtype=torch.float64) - 1).abs().max())


def _size(value: float) -> tuple[bool, float]:
    """Order numbers with NaN above all."""
    return value != value, value


def _rounding(
    pool: WorkerPool, name: str, ranks: int, expected: Sequence[Trained]
) -> Differences | str:
    """Return how far DDP in fp32 is from DDP in fp64, or why that cannot be said."""
    try:
        return differences(
            expected, pool.run(ranks, train_by_ddp, name, torch.float64, timeout=SECONDS)
        )
    except WorkerError as error:
        return next(iter(error.errors.values())).strip().splitlines()[-1]


def _limits(name: str, exact: Differences | None) -> float:
    """Return the bound of a parameter's or buffer's value."""
    return max(VALUE_BOUND, 2 * exact.values[name] if exact else 0.0)


def _within(found: Differences, exact: Differences | None) -> bool:
    return (
        found.loss <= max(LOSS_BOUND, 2 * exact.loss if exact else 0.0)
        and found.norm <= max(NORM_BOUND, 2 * exact.norm if exact else 0.0)
        and all(value <= _limits(name, exact) for name, value in found.values.items())
    )


def _doubled(exact: Differences | str | None) -> str:
    """Return the words for a bound that is twice the rounding of torch's fp32, and that rounding:
    where it is large, nothing has been shown."""
    assert isinstance(exact, Differences)
    return f"twice fp32's {exact.loss:.1e}, {exact.norm:.1e}, {exact.value:.1e}"


def _worst(found: Differences, exact: Differences) -> str:
    """Return what is beyond twice the rounding of torch's fp32, and what that is."""
    words = []
    if not found.loss <= max(LOSS_BOUND, 2 * exact.loss):
        words.append(f"loss; fp32 is {exact.loss:.1e} from fp64")
    if not found.norm <= max(NORM_BOUND, 2 * exact.norm):
        words.append(f"norm; fp32 is {exact.norm:.1e} from fp64")
    for name, value in found.values.items():
        if not value <= _limits(name, exact):
            words.append(f"{name} by {value:.2g}; fp32 is {exact.values[name]:.2g} from fp64")
    return "; ".join(words)


def known(names: Sequence[str]) -> list[str]:
    """Return the models of these names, by default all. Raises ValueError for another name."""
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        raise ValueError(f"no {', '.join(unknown)}; there are {', '.join(MODELS)}")
    return list(names or MODELS)
