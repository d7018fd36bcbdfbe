"""The owners of the matrices that Muon orthogonalises, and the messages for that. Integers only.

Newton-Schulz needs whole matrices, and they are those of the HuggingFace model: q_proj, k_proj and
v_proj are three although they are stored as one, and each expert of a block has three of its own. A
rank has some rows of each, its shard, of the part that its tensor-parallel rank has. So every
matrix has an *owner*, one data-parallel and one tensor-parallel rank, that gets the momentum from
all others, orthogonalises it, and sends back to each the elements that it came with.

Nothing is sent twice. A message goes along dp to the owner among the ranks with the same
tensor-parallel rank, and from there along tp, whose links are fast. Most of a matrix is at its
owner already: that is a rank with a large part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter

from megatron_llama.engine.plan.buckets import BucketPlan
from megatron_llama.engine.plan.specs import HFSlice, ParamSpec, UnitSpec

ITEMSIZE = 2
"""Bytes of an element while a matrix is orthogonalised, and on its way: bf16, as in torch."""


@dataclass(frozen=True)
class Matrix:
    """The part of one HuggingFace matrix that a tensor-parallel rank has: whole rows of a
    parameter."""

    name: str
    shape: tuple[int, int]
    """The shape of the HuggingFace matrix: rows, and the elements of one."""
    bucket: int
    start: int
    """Its first element in the bucket."""
    rows: int
    width: int
    slices: tuple[HFSlice, ...]
    """The places of its rows in the HuggingFace matrix."""
    copies: int
    """Number of consecutive tensor-parallel ranks that have this part."""
    owner: int
    """The owner among the ranks that share a bucket."""
    tp_owner: int
    """The owner among the tensor-parallel ranks."""

    @property
    def numel(self) -> int:
        """Elements of this tensor-parallel rank."""
        return self.rows * self.width

    def senders(self, tp: int) -> tuple[int, ...]:
        """Return the tensor-parallel rank that sends each part to the owner: of those with the same
        part the first one, or the owner itself, which then sends nothing."""
        own = self.tp_owner // self.copies
        return tuple(
            self.tp_owner if part == own else part * self.copies
            for part in range(tp // self.copies)
        )


@dataclass(frozen=True)
class Part:
    """The elements of a matrix that are in one shard: ``length`` from each of two starts."""

    in_matrix: int
    in_shard: int
    length: int


@dataclass(frozen=True)
class MuonPlan:
    """The matrices of one pipeline rank on one tensor-parallel rank, in forward order. Owners and
    numbers of elements are the same on all tensor-parallel ranks."""

    bucket_plan: BucketPlan
    tp: int
    matrices: tuple[Matrix, ...]

    @property
    def buckets(self) -> tuple[int, ...]:
        """Buckets with matrices, in forward order."""
        return tuple(dict.fromkeys(matrix.bucket for matrix in self.matrices))

    def of(self, bucket: int) -> tuple[Matrix, ...]:
        """Return the matrices of a bucket."""
        return tuple(matrix for matrix in self.matrices if matrix.bucket == bucket)

    def part(self, matrix: Matrix, rank: int) -> Part:
        """Return the part of a matrix that ``rank`` of the bucket's ranks has, perhaps empty."""
        return _part(self.bucket_plan, matrix.bucket, matrix.start, matrix.numel, rank)

    def parts(self, matrix: Matrix) -> Iterator[tuple[int, Part]]:
        """Yield every rank that has a part of a matrix, with that part."""
        for rank in range(self.bucket_plan.shard_count(matrix.bucket)):
            part = self.part(matrix, rank)
            if part.length:
                yield rank, part

    @cached_property
    def shard_numel(self) -> int:
        """Elements of all shards of a rank that Muon updates, padding included."""
        return sum(self.bucket_plan.shard_numel(bucket) for bucket in self.buckets)

    @cached_property
    def gathered_numel(self) -> int:
        """Elements of the matrices that an owner gathers along dp: those of the rank with most, of
        experts that ranks divide and of all else. 0 if a shard is the whole bucket."""
        total = dict[tuple[int, ...], int]()
        for matrix in self.matrices:
            if self.bucket_plan.shard_count(matrix.bucket) > 1:
                owner = self._division(matrix), matrix.owner
                total[owner] = total.get(owner, 0) + matrix.numel
        return _of_ranks_with_most(total)

    @cached_property
    def whole_numel(self) -> int:
        """Elements of the matrices that an owner gathers along tp: those of the rank with most. 0
        without tensor parallelism."""
        if self.tp == 1:
            return 0
        total = dict[tuple[int, ...], int]()
        for matrix in self.matrices:
            owner = self._division(matrix), matrix.owner, matrix.tp_owner
            total[owner] = total.get(owner, 0) + matrix.numel * self.tp // matrix.copies
        return _of_ranks_with_most(total)

    def _division(self, matrix: Matrix) -> int:
        """Return the ranks that divide the experts among which the matrix is; 1 for all others. The
        owners of each kind are numbered by themselves."""
        return self.bucket_plan.buckets[matrix.bucket].kind.ep

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers in which matrices travel and are orthogonalised. All ranks have as
        many, whatever they own."""
        return (self.shard_numel + self.gathered_numel + self.whole_numel) * ITEMSIZE

    @property
    def working_bytes(self) -> int:
        """Bytes that one Newton-Schulz iteration of the largest matrix allocates: two matrices and
        two of the products of its shorter side, and with tensor parallelism the matrix itself, put
        together from its parts."""
        return max(
            (
                ((2 + (self.tp > 1)) * rows * columns + 2 * min(rows, columns) ** 2) * ITEMSIZE
                for rows, columns in (matrix.shape for matrix in self.matrices)
            ),
            default=0,
        )

    def sent(self, rank: int, tp_rank: int, ep: int = 1) -> tuple[int, int]:
        """Return the bytes that leave a rank in a step along dp and along tp, of matrices that are
        divided by ``ep``. ``rank`` is its number among the ranks that share their buckets."""
        along_dp = along_tp = 0
        for matrix in self.matrices:
            if self._division(matrix) != ep:
                continue
            for holder, part in self.parts(matrix):
                # To the owner, and back from it.
                along_dp += part.length * ((rank == holder) ^ (rank == matrix.owner))
            if rank == matrix.owner:
                if tp_rank != matrix.tp_owner:
                    along_tp += matrix.numel * (tp_rank in matrix.senders(self.tp))
                else:
                    along_tp += matrix.numel * (self.tp - 1)
        return along_dp * ITEMSIZE, along_tp * ITEMSIZE

    @property
    def lag(self) -> int:
        """Number of further buckets after which a bucket is orthogonalised: so many together have a
        matrix for every rank. A sooner wait would last while other owners still compute."""
        ranks = self.bucket_plan.shards * self.tp
        return max(1, -(-ranks * len(self.buckets) // max(1, len(self.matrices))))


def muon_plan(bucket_plan: BucketPlan, *, tp: int) -> MuonPlan:
    """Give every matrix an owner. ``bucket_plan`` is that of any tensor-parallel rank.

    Of the ranks with at least half as much of a matrix as the one with most, the owner has the
    fewest multiplications so far; of several it is the one with most of the matrix."""
    work_of_kinds: dict[int, list[list[int]]] = {}
    matrices = []
    for bucket in bucket_plan.forward_order:
        shards = bucket_plan.shard_count(bucket)
        ep = bucket_plan.buckets[bucket].kind.ep
        work = work_of_kinds.setdefault(ep, [[0] * tp for _ in range(shards)])
        for placed in bucket_plan.buckets[bucket].placements[::-1]:
            spec = placed.spec
            if not spec.muon:
                continue
            for name, slices in _hf_matrices(spec):
                first = slices[0].row
                rows = sum(hf_slice.rows for hf_slice in slices)
                start = placed.start + first * spec.width
                held = [
                    _part(bucket_plan, bucket, start, rows * spec.width, rank).length
                    for rank in range(shards)
                ]
                owner = min(
                    (rank for rank in range(shards) if 2 * held[rank] >= max(held)),
                    key=lambda rank: (sum(work[rank]), -held[rank]),
                )
                # Any rank may own what all of them have.
                candidates = range(0, tp, 1 if spec.copies == tp else spec.copies)
                tp_owner = min(candidates, key=lambda rank: work[owner][rank])
                # One with more than two dims, a convolution's, is flattened behind its first.
                height, width = slices[0].shape[0], slices[0].width
                work[owner][tp_owner] += height * width * min(height, width)
                matrices.append(
                    Matrix(
                        name,
                        (height, width),
                        bucket,
                        start,
                        rows,
                        spec.width,
                        slices,
                        spec.copies,
                        owner,
                        tp_owner,
                    )
                )
    return MuonPlan(bucket_plan, tp, tuple(matrices))


def _of_ranks_with_most(total: Mapping[tuple[int, ...], int]) -> int:
    """Return the elements of the owner with most, summed over the kinds of which the first number
    of an owner is one."""
    most: dict[int, int] = {}
    for (kind, *_), elements in total.items():
        most[kind] = max(most.get(kind, 0), elements)
    return sum(most.values())


def _hf_matrices(spec: ParamSpec) -> Iterator[tuple[str, tuple[HFSlice, ...]]]:
    """Yield the HuggingFace matrices that a parameter consists of, with their rows in it."""
    for name, slices in groupby(spec.slices, attrgetter("name")):
        yield name, tuple(slices)


def _part(bucket_plan: BucketPlan, bucket: int, start: int, numel: int, rank: int) -> Part:
    shard = bucket_plan.shard(bucket, rank)
    low = max(start, shard.start)
    high = min(start + numel, shard.stop)
    return Part(low - start, low - shard.start, max(0, high - low))


def split_matrices(units: Sequence[UnitSpec]) -> list[str]:
    """Return the HuggingFace matrices whose rows are in several parameters, so that no bucket has
    all rows of a rank."""
    holders: dict[str, set[str]] = {}
    for spec in (spec for unit in units for spec in unit.params if spec.muon):
        for hf_slice in spec.slices:
            holders.setdefault(hf_slice.name, set()).add(spec.name)
    return [name for name, names in holders.items() if len(names) > 1]


def with_muon(unit: UnitSpec) -> UnitSpec:
    """Return the unit, with its matrices marked for Muon if it is a block. Norms, biases, embedding
    and head do not have rows and columns of one kind; low-rank additions are no weights of the
    model."""
    if not unit.is_block:
        return unit
    params = (
        replace(
            spec,
            muon=len(spec.shape) == 2 and spec.trainable and not spec.adapter and not spec.resident,
        )
        for spec in unit.params
    )
    return replace(unit, params=tuple(params))
