"""Processes of a run, by axis, and the fewer of them that show the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from math import prod

from megatron_llama.config.schema import Config
from megatron_llama.config.world import dp_size
from megatron_llama.errors import ConfigError

GROWING = ("pp", "cp", "dp", "tp")
"""The axes in the order in which they get more than they need. Of two pipeline ranks none is in the
middle, and a ring of two has one step."""
ENOUGH = 4
"""No axis gets more: beyond the first, the middle and the last rank nothing new happens."""


@dataclass(frozen=True)
class World:
    """How many processes each axis has."""

    tp: int
    cp: int
    pp: int
    dp: int

    @staticmethod
    def of(config: Config, world_size: int) -> World:
        """Return the axes of a configuration. Raises ConfigError when the processes do not fit."""
        parallel = config.parallel
        return World(
            parallel.tensor_model_parallel_size,
            parallel.context_parallel_size,
            parallel.pipeline_model_parallel_size,
            dp_size(config, world_size),
        )

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis by its name."""
        return asdict(self)

    @property
    def world_size(self) -> int:
        """All processes."""
        return prod(self.sizes.values())

    @property
    def above_one(self) -> tuple[str, ...]:
        """The axes that have more than one process."""
        return tuple(axis for axis, size in self.sizes.items() if size > 1)

    @property
    def replicas(self) -> int:
        """The ranks that a bucket is reduced over: data- and context-parallel ones."""
        return self.dp * self.cp

    def __str__(self) -> str:
        return " ".join(f"{axis} {self.sizes[axis]}" for axis in self.above_one) or "one process"


def worlds(yours: World, ranks: int, least: Mapping[str, int]) -> tuple[World, ...]:
    """Return worlds of at most ``ranks`` processes that together have every axis of ``yours``: one
    where all fit, else one for each largest group of axes that do. An axis that is above 1 has
    ``least`` processes, 2 where that does not say more, and up to 4 where ranks are left.

    Raises ConfigError where not one axis fits."""
    if yours.world_size == 1:
        return (yours,)
    needed = {axis: min(yours.sizes[axis], least.get(axis, 2)) for axis in yours.above_one}
    groups = [
        set(group)
        for count in range(len(needed), 0, -1)
        for group in combinations(needed, count)
        if prod(needed[axis] for axis in group) <= ranks
    ]
    if not groups:
        raise ConfigError(
            "--ranks",
            got=ranks,
            expected=f"{min(needed.values())} or more, for an axis of {yours}",
            do="give --ranks 8",
        )
    largest = [group for group in groups if not any(group < other for other in groups)]
    return tuple(
        _grown({axis: needed[axis] if axis in group else 1 for axis in yours.sizes}, yours, ranks)
        for group in largest
    )


def _grown(sizes: dict[str, int], yours: World, ranks: int) -> World:
    world = World(**sizes)
    # An axis that needs more than is left for it can still have two.
    for wanted in (2, ENOUGH):
        for axis in GROWING:
            size = min(wanted, yours.sizes[axis])
            larger = replace(world, **{axis: size})
            if size > world.sizes[axis] and larger.world_size <= ranks:
                world = larger
    return world
