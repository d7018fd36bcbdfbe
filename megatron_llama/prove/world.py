"""Processes of a run by axis, and smaller worlds that show the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from math import prod

from megatron_llama.config.schema import Config
from megatron_llama.config.world import dp_size
from megatron_llama.errors import ConfigError

GROWING = ("pp", "cp", "dp", "tp")
"""Axes in the order in which they get more ranks than they need."""
ENOUGH = 4
"""Most ranks of an axis. Beyond first, middle and last ranks nothing new happens."""


@dataclass(frozen=True)
class World:
    """Number of processes of each axis."""

    tp: int
    cp: int
    pp: int
    dp: int

    @staticmethod
    def of(config: Config, world_size: int) -> World:
        """Return the axes of a configuration. Raises ConfigError if the processes do not fit."""
        parallel = config.parallel
        return World(
            parallel.tensor_model_parallel_size,
            parallel.context_parallel_size,
            parallel.pipeline_model_parallel_size,
            dp_size(config, world_size),
        )

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each axis by name."""
        return asdict(self)

    @property
    def world_size(self) -> int:
        """Number of all processes."""
        return prod(self.sizes.values())

    @property
    def above_one(self) -> tuple[str, ...]:
        """Axes with more than one process."""
        return tuple(axis for axis, size in self.sizes.items() if size > 1)

    @property
    def replicas(self) -> int:
        """Number of data- and context-parallel ranks over which a bucket is reduced."""
        return self.dp * self.cp

    def __str__(self) -> str:
        return " ".join(f"{axis} {self.sizes[axis]}" for axis in self.above_one) or "one process"


def worlds(yours: World, ranks: int, needs: Mapping[str, int]) -> tuple[World, ...]:
    """Return worlds of at most ``ranks`` processes that together have every axis of ``yours``: one
    if all fit, else one for each largest group of axes that does. An axis above 1 has 2 processes,
    and up to 4 if ranks are left. ``needs`` has the processes that show everything for axes for
    which 2 are too few. An axis without so many in any world gets one more world.

    Raises ConfigError if no axis fits."""
    if yours.world_size == 1:
        return (yours,)
    if ranks < 2:
        expected = f"2 or more, for an axis of {yours}"
        raise ConfigError("--ranks", got=ranks, expected=expected, do="give --ranks 8")
    needed = {axis: min(yours.sizes[axis], needs.get(axis, 2)) for axis in yours.sizes}
    groups = [
        set(group)
        for count in range(len(yours.above_one), 0, -1)
        for group in combinations(yours.above_one, count)
        if 2**count <= ranks
    ]
    largest = [group for group in groups if not any(group < larger for larger in groups)]
    starts = [{axis: 2 if axis in group else 1 for axis in yours.sizes} for group in largest]
    grown = [_grown(start, yours, needed, ranks) for start in starts]
    for axis in GROWING:
        if needed[axis] <= ranks and all(world.sizes[axis] < needed[axis] for world in grown):
            alone = dict.fromkeys(yours.sizes, 1) | {axis: needed[axis]}
            grown.append(_grown(alone, yours, needed, ranks))
    return tuple(grown)


def _grown(sizes: Mapping[str, int], yours: World, needed: Mapping[str, int], ranks: int) -> World:
    """Return a larger world: first 2 ranks on each axis, then as many as needed, then ENOUGH."""
    world = World(**sizes)
    for wanted in (
        dict.fromkeys(sizes, 2),
        needed,
        *(dict.fromkeys(sizes, n) for n in (3, ENOUGH)),
    ):
        for axis in GROWING:
            size = min(wanted[axis], yours.sizes[axis])
            larger = replace(world, **{axis: size})
            if size > world.sizes[axis] and larger.world_size <= ranks:
                world = larger
    return world
