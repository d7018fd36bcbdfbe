"""torch.distributed as ``mesh.py`` sees it, with a note of each communicator that a rank uses, and whether the ranks' notes fit together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
from megatron_llama.engine.comm import groups
from megatron_llama.launch import mesh as meshes


@dataclass(frozen=True)
class Use:
    """One use of a communicator: the group's name, the ranks that meet there, and for a message the sender first."""

    group: str
    ranks: tuple[int, ...]
    operation: str


@dataclass
class Config:
    """Exactly the fields of ``ProcessGroupNCCL.NCCLConfig`` that a trainer may set: another name raises AttributeError."""

    __slots__ = ("blocking", "cga_cluster_size", "max_ctas", "min_ctas")


class Options:
    """As ``ProcessGroupNCCL.Options``, of which a torch without CUDA knows the type only."""

    __slots__ = ("_timeout", "config", "is_high_priority_stream")

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream, self.config = is_high_priority_stream, Config()
        self._timeout = timedelta(minutes=10)


@dataclass(frozen=True, eq=False)
class Group:
    """A group that nobody has joined, and how it was asked for."""

    group_name: str
    ranks: tuple[int, ...]
    timeout: timedelta
    backend: str | None
    options: Options | None


class Done:
    """A message that has arrived."""

    def wait(self) -> None:
        pass


@dataclass
class Imagined:
    """Takes the place of ``torch.distributed`` for one rank alone: groups are only asked for, each use is noted, and nothing is sent."""

    rank: int
    world_size: int = 1
    uses: list[Use] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    class ProcessGroupNCCL:
        Options = Options

    @property
    def group(self) -> Any:
        return mock.Mock(WORLD=Group("world", tuple(range(self.world_size)), timedelta(0), None, None))

    def new_group(self, ranks: list[int], *, timeout: timedelta, backend: str | None, pg_options: Options | None, group_desc: str) -> Group:
        self.groups.append(Group(str(len(self.groups)), tuple(ranks), timeout, backend, pg_options))
        return self.groups[-1]

    def all_reduce(self, tensor: Any, *args: Any, group: Any, **options: Any) -> Any:
        self.uses.append(Use(group.group_name, group.ranks, "all_reduce"))

    def all_to_all_single(self, received: Any, sent: Any, *, group: Any) -> None:
        self.uses.append(Use(group.group_name, group.ranks, "all_to_all"))

    def isend(self, tensor: Any, *, group: Any, group_dst: int) -> Done:
        self.uses.append(Use(group.group_name, (self.rank, group.ranks[group_dst]), "message"))
        return Done()

    def irecv(self, tensor: Any, *, group: Any, group_src: int) -> Done:
        self.uses.append(Use(group.group_name, (group.ranks[group_src], self.rank), "message"))
        return Done()

    def P2POp(self, op: Any, tensor: Any, *, group: Any, group_peer: int) -> Any:
        return group

    def batch_isend_irecv(self, batch: list[Any]) -> list[Done]:
        self.uses.append(Use(batch[0].group_name, batch[0].ranks, "ring"))
        return [Done()]


@contextmanager
def noted(noting: Imagined) -> Iterator[None]:
    """A section in which ``mesh.py`` and ``groups.py`` call ``noting``."""
    patches = [mock.patch.object(module, "dist", noting) for module in (meshes, groups)]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def waits_of(programs: Sequence[Sequence[Use]]) -> dict[int, Use]:
    """Where each rank waits for ever if every use waits for all its ranks to come to it; empty: all ranks come to the end."""
    cursors = [0] * len(programs)
    met = True
    while met:
        met = False
        for rank, program in enumerate(programs):
            if cursors[rank] == len(program):
                continue
            use = program[cursors[rank]]
            if all(cursors[other] < len(programs[other]) and programs[other][cursors[other]] == use for other in use.ranks):
                for other in use.ranks:
                    cursors[other] += 1
                met = True
    return {rank: program[cursors[rank]] for rank, program in enumerate(programs) if cursors[rank] < len(program)}
