"""This rank's pieces of the masters between steps, live."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import NamedTuple, Self

from torch import Tensor

from megatron_llama.engine.shard.values import MASTER, ModuleValues, named
from megatron_llama.errors import TrainingError


class MasterPiece(NamedTuple):
    """The piece of one parameter's master that this rank has."""

    values: Tensor
    """Flat and live, on the device or in the host's memory, wherever the optimizer keeps it."""
    place: slice
    """Which elements of the flattened parameter these are."""


class Masters(Mapping[str, MasterPiece]):
    """This rank's pieces of the masters by parameter, until the next forward pass.

    ``engine.masters`` returns it. A parameter of which this rank has nothing is left out."""

    def __init__(self, values: ModuleValues, publish: Callable[[], None] | None) -> None:
        """``publish`` lets written pieces reach the weights that compute; None: they may only be
        read. Call ``engine.settle`` first."""
        self._publish = publish
        self._pieces: dict[str, MasterPiece] = {}
        for bucket in range(len(values.plan.buckets)):
            shard = values.tensors(bucket)[MASTER]
            for segment in values.plan.segments(bucket, values.engine.mesh.dp_shard.rank):
                in_shard = slice(segment.in_shard, segment.in_shard + segment.length)
                in_param = slice(segment.in_param, segment.in_param + segment.length)
                # ``.data`` has a version counter of its own: it counts what the user writes, and
                # not what the engine does.
                self._pieces[segment.spec.name] = MasterPiece(shard[in_shard].data, in_param)
        self._versions = self._present_versions()
        values.require_unwritten = self.require_unwritten

    def __getitem__(self, name: str) -> MasterPiece:
        return self._pieces[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After an error the other ranks may have written other pieces, or none: what is written
        # here stays an error of the next forward pass.
        if self._publish is not None and error is None:
            self._publish()
            self._versions = self._present_versions()

    def require_unwritten(self) -> None:
        """Raise TrainingError if a piece has been written that has not been published."""
        present = self._present_versions()
        written = [name for name, version in self._versions.items() if present[name] != version]
        if written:
            raise TrainingError(
                "engine.masters",
                got=f"a change of {named(written)} that the weights for computation do not have",
                expected="pieces that are only read",
                do="write them inside of: with engine.masters(modify=True) as masters",
            )

    def _present_versions(self) -> dict[str, int]:
        return {name: piece.values._version for name, piece in self._pieces.items()}


def publish_masters(values: ModuleValues) -> None:
    """Let the weights for computation be those of the masters, which were written on every rank.
    Where several ranks hold the same piece, the first one's counts. Collective."""
    axis = values.engine.mesh.dp_replica
    if axis.size > 1:
        for bucket in range(len(values.plan.buckets)):
            master = values.tensors(bucket)[MASTER]
            for start, piece in values.broadcast(master, axis):
                if axis.rank:
                    master[start : start + len(piece)].copy_(piece)
    values.engine.publish()
