"""The distributed optimizer's state as Megatron-Core has it in memory (``dp_reshardable``): flat
buckets of one model-parallel rank each, which do not name the owners of their values.

    optimizer.distributed.dp_group_idx_G.gbuf_idx_C.dtype_(P, D).bucket_idx_B.exp_avg    [numel]

G is tp rank + tp size * pp rank, C is the model chunk of a virtual pipeline. A buffer has the
parameters of its chunk in the reverse of their order in the model, each at a multiple of 64; it is
cut into buckets behind a parameter. Tensor-parallel parameters are this rank's part, row by row.

The places of parameters follow from that order. Two checks prove it: where a parameter begins and
ends, the file has a boundary between two pieces; and the masters of the norms, rounded, are the
norms of the model. Of routers and experts, in ``expert_buckets``, the same is compared.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from megatron_llama.checkpoint.model_folders.safetensors_file import BLOCK_ELEMENTS
from megatron_llama.converter.megatron.names import BLOCKS, LOCAL, TE
from megatron_llama.converter.torch_dist.masters import require_masters
from megatron_llama.converter.torch_dist.names import (
    EMBEDDING_KEY,
    HALVES,
    HEAD_KEY,
    LAYERS,
    StoredWeight,
)
from megatron_llama.converter.torch_dist.reader import TorchDistReader
from megatron_llama.errors import CheckpointError

if TYPE_CHECKING:
    from megatron_llama.converter.torch_dist.expert_buckets import ExpertBuckets

BUCKET = re.compile(
    r"((?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)"
    r"\.dtype_\(.*\)\.bucket_idx_(\d+))\.(\w+)"
)
STATES = ("param", "exp_avg", "exp_avg_sq")
ALIGNMENT = 64
"""Parameters begin at multiples of so many elements."""
DO = "save it with --dist-ckpt-optim-fully-reshardable, which says whose values it holds"
_BEHIND_QKV = (
    "self_attn.qkv_proj.weight",
    "self_attn.qkv_proj.bias",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "post_attention_layernorm.weight",
    "mlp.gate_up_proj.weight",
    "mlp.gate_up_proj.bias",
    "mlp.down_proj.weight",
    "mlp.down_proj.bias",
)
_O_PROJ = ("self_attn.o_proj.weight", "self_attn.o_proj.bias")
_INPUT_NORM = "input_layernorm.weight"
ORDERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {TE: (*_O_PROJ, _INPUT_NORM, *_BEHIND_QKV), LOCAL: (_INPUT_NORM, *_O_PROJ, *_BEHIND_QKV)}
)
"""Order of a block's parameters in Megatron's modules, by our names. In TransformerEngine's layout
the norm before q, k and v belongs to their layer."""
GATE_AND_UP = ".linear_fc1"
"""The end of the names of such a matrix of one expert."""
EMBEDDING = "embedding"
HEAD = "head"
NORM = "norm"
WHOLE: Mapping[str, str] = MappingProxyType(
    {EMBEDDING: EMBEDDING_KEY, HEAD: HEAD_KEY, NORM: "decoder.final_layernorm.weight"}
)
"""Parameters outside of the blocks, and their keys."""
ROW_PARALLEL = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
COLUMN_PARALLEL = (
    EMBEDDING,
    HEAD,
    "self_attn.qkv_proj.weight",
    "self_attn.qkv_proj.bias",
    "mlp.gate_up_proj.weight",
    "mlp.gate_up_proj.bias",
)


Index: TypeAlias = tuple[int, ...]
"""A place in the first dimensions of a stacked tensor: layer, expert."""
Keys: TypeAlias = tuple[tuple[str, Index], ...]
Order: TypeAlias = Callable[[int], Sequence[str]]
"""The parameters of a layer, counted from 0, in their order."""


@dataclass(frozen=True)
class _Part:
    """The part of a tensor on one tensor-parallel rank: boxes with the same columns, one below the
    other."""

    rows: tuple[tuple[int, int], ...]
    """First row and number of rows of each box in the whole tensor."""
    column: int
    columns: int
    """1 for a vector."""

    @property
    def numel(self) -> int:
        return sum(count for _, count in self.rows) * self.columns


@dataclass(frozen=True)
class _Box:
    """A box of a stored tensor in a bucket."""

    row: int
    rows: int
    column: int
    columns: int
    bucket: str
    start: int


@dataclass(frozen=True)
class Bucket:
    """A bucket of one rank's buffer."""

    name: str
    numel: int
    boundaries: frozenset[int]
    """Places where pieces begin or end."""


@dataclass(frozen=True)
class Placed:
    """A parameter in the buffer of a model chunk."""

    leaf: str
    """EMBEDDING, HEAD, NORM, or our name within a block."""
    layer: int
    bucket: Bucket
    start: int


@dataclass(frozen=True)
class Stage:
    """The layers of one pipeline rank's model chunk."""

    pp_rank: int
    chunk: int
    layers: range


class Boxes:
    """The boxes of each stored tensor, by its key and the index of a layer or an expert in it."""

    def __init__(self) -> None:
        self._boxes = defaultdict[tuple[str, Index], list[_Box]](list)
        self._depths = dict[str, int]()

    def add(self, key: str, index: Index, box: _Box) -> None:
        """Add a box of ``key``."""
        self._boxes[key, index].append(box)
        self._depths[key] = len(index)

    def split(self, key: str, offset: Sequence[int]) -> tuple[Index, Sequence[int]]:
        """Return the index in front of an offset, and the rest."""
        depth = self._depths[key]
        return tuple(offset[:depth]), offset[depth:]

    def at(self, key: str, index: Index) -> Sequence[_Box]:
        """Return the boxes of a matrix or vector."""
        return self._boxes.get((key, index), ())

    def cover(self, weight: StoredWeight) -> bool:
        """Whether the boxes are as large as the stored matrix or vector."""
        elements = sum(box.rows * box.columns for box in self.at(weight.key, weight.index))
        return elements == math.prod(weight.map.shape)


class FlatBuckets:
    """Reads the buckets by the keys of the model: ``exp_avg.decoder.final_layernorm.weight``."""

    def __init__(self, reader: TorchDistReader) -> None:
        """Find the place of each parameter. Raises CheckpointError if it is not certain."""
        self._container = reader.checkpoint.container
        self._folder = reader.folder
        self._tp = reader.checkpoint.tp
        self._layers = reader.model.num_hidden_layers
        self._experts = _experts_of(reader)
        self._examples = dict[str, int]()
        optimizer = self._experts.dense_optimizer if self._experts else ""
        self._buffers = self.find_buffers(optimizer, self._tp, f"tp {self._tp}")
        orders = self._experts.orders(self._orders()) if self._experts else self._orders()
        layouts = (self._layout(order) for order in orders)
        boxes = next((layout for layout in layouts if layout is not None), None)
        if boxes is None or not all(boxes.cover(weight) for weight in reader.weights):
            raise self.misfit()
        self._boxes = boxes
        # Boundaries do not tell whose values lie between them, nor whether they are whole masters.
        require_masters(reader, self, "param.", do=DO)

    def read(self, name: str, offset: Sequence[int], out: Tensor) -> None:
        """Fill ``out`` with the box of its size that begins at ``offset`` in a tensor of the model.
        ``name`` is one of STATES, a dot, and the key. Several threads may call it at a time. Raises
        CheckpointError."""
        state, _, key = name.partition(".")
        index, offset = self._boxes.split(key, offset)
        for _ in index:
            out = out.squeeze(0)
        if out.dim() == 1:
            offset = (*offset, 0)
            out = out.unsqueeze(1)
        row, column = offset
        rows, columns = out.shape
        for box in self._boxes.at(key, index):
            top = max(row, box.row)
            bottom = min(row + rows, box.row + box.rows)
            left = max(column, box.column)
            right = min(column + columns, box.column + box.columns)
            if top >= bottom or left >= right:
                continue
            # Only whole rows of a box lie end to end in the file, not some of their columns.
            step = max(1, BLOCK_ELEMENTS // box.columns)
            for first in range(top, bottom, step):
                last = min(first + step, bottom)
                values = torch.empty((last - first) * box.columns, dtype=torch.float32)
                start = box.start + (first - box.row) * box.columns
                self._container.read(f"{box.bucket}.{state}", (start,), values)
                inside = values.view(-1, box.columns)[:, left - box.column : right - box.column]
                out[first - row : last - row, left - column : right - column] = inside

    def find_buffers(
        self, optimizer: str, ranks: int, axes: str
    ) -> dict[tuple[int, int], list[Bucket]]:
        """Return the buckets of each data-parallel group and model chunk. ``optimizer`` is the
        number of one of several, and empty of one alone. There are ``ranks`` groups, which
        ``axes`` names, for each pipeline rank. Raises CheckpointError."""
        bases_at = defaultdict[tuple[int, int], dict[int, str]](dict)
        names = []
        for name in self._container.tensors:
            match = BUCKET.fullmatch(name)
            if match is None:
                continue
            base, number, group, chunk, index, state = match.groups()
            if (number or "") != optimizer:
                continue
            place = (int(group), int(chunk))
            if state not in STATES:
                expected = ", ".join(STATES)
                raise self._error(name, f"state {state}", f"that of Adam: {expected}")
            if bases_at[place].setdefault(int(index), base) != base:
                raise self._error(name, "gradients of several dtypes", "one dtype")
            names += [f"{base}.{kind}" for kind in STATES]
        self._container.require(dict.fromkeys(names))
        groups = 1 + max((group for group, _ in bases_at), default=-1)
        chunks = 1 + max((chunk for _, chunk in bases_at), default=-1)
        whole = bases_at.keys() == {(g, c) for g in range(groups) for c in range(chunks)}
        if not bases_at or groups % ranks or not whole:
            raise self._error(
                "optimizer.distributed",
                f"buffers {', '.join(f'{g}.{c}' for g, c in sorted(bases_at)) or 'none'}",
                f"{chunks} for each of {axes} x pp ranks",
            )
        buffers = {}
        for place, bases in bases_at.items():
            if sorted(bases) != list(range(len(bases))):
                got = f"buckets {sorted(bases)}"
                raise self._error(next(iter(bases.values())), got, "all from 0 on")
            buffers[place] = [self._bucket(bases[index]) for index in sorted(bases)]
        return buffers

    def _bucket(self, base: str) -> Bucket:
        tensors = [self._container.tensors[f"{base}.{state}"] for state in STATES]
        shapes = {tensor.shape for tensor in tensors}
        if len(shapes) != 1 or len(tensors[0].shape) != 1:
            got = f"shapes {', '.join(map(str, shapes))}"
            raise self._error(base, got, "three vectors of one length")
        ends = ((c.offset[0], c.offset[0] + c.size[0]) for c in tensors[0].chunks)
        return Bucket(base, tensors[0].shape[0], frozenset(at for pair in ends for at in pair))

    def _orders(self) -> Iterator[Order]:
        """Yield the possible orders of the parameters that are no routers and experts."""
        for order in ORDERS.values():
            yield partial(self._in_layer, order)

    def _in_layer(self, order: Sequence[str], layer: int) -> list[str]:
        return [leaf for leaf in order if self._stored(leaf, layer)]

    def _stored(self, leaf: str, layer: int) -> Keys:
        """Return the keys of a tensor, each with its index if layers are stacked: one, two if it is
        stored in halves, none if the layer has no such tensor."""
        tensors = self._container.tensors
        if leaf in WHOLE:
            return ((WHOLE[leaf], ()),) if WHOLE[leaf] in tensors else ()
        if self._experts and leaf not in BLOCKS[TE]:
            return self._experts.stored(leaf, layer)
        for theirs in dict.fromkeys((BLOCKS[TE][leaf], BLOCKS[LOCAL][leaf])):
            single = f"{LAYERS}{layer}.{theirs}"
            for index, key in (((layer,), LAYERS + theirs), ((), single)):
                if key in tensors:
                    return ((key, index),)
                if all(key + half in tensors for half in HALVES):
                    return tuple((key + half, index) for half in HALVES)
        return ()

    def _part(self, leaf: str, tp_rank: int) -> _Part:
        """Return the part of a tensor on a tensor-parallel rank. Raises CheckpointError."""
        # A tied head on another stage than the embedding is a copy of that.
        keys = self._stored(leaf, self._examples.get(leaf, 0)) or self._stored(EMBEDDING, 0)
        rows = 0
        columns = 1
        for key, index in keys:
            shape = self._container.tensors[key].shape[len(index) :]
            rows = rows + shape[0]
            columns = shape[1] if len(shape) == 2 else 1
        by_rows, by_columns, tp = self._cut(leaf)
        blocks = 2 if leaf.startswith("mlp.gate_up_proj") or leaf.endswith(GATE_AND_UP) else 1
        split = columns if by_columns else rows // blocks
        if (by_rows or by_columns) and split % tp:
            raise self._error(keys[0][0], f"{split} rows or columns", f"a multiple of tp {tp}")
        if by_columns:
            return _Part(((0, rows),), tp_rank * (columns // tp), columns // tp)
        if not by_rows:
            return _Part(((0, rows),), 0, columns)
        share = split // tp
        boxes = ((block * split + tp_rank * share, share) for block in range(blocks))
        return _Part(tuple(boxes), 0, columns)

    def _cut(self, leaf: str) -> tuple[bool, bool, int]:
        """Return whether ranks share a tensor by rows or by columns, and how many ranks do."""
        if self._experts and leaf not in BLOCKS[TE] and leaf not in WHOLE:
            return self._experts.cut(leaf)
        return leaf in COLUMN_PARALLEL, leaf in ROW_PARALLEL, self._tp

    def _layout(self, order: Order) -> Boxes | None:
        """Return the boxes of each stored tensor, if the buffers have the parameters of a block in
        this order; else None."""
        for layer in range(self._layers):
            self._examples |= dict.fromkeys(order(layer), layer)
        numel = {leaf: self._part(leaf, 0).numel for leaf in (*self._examples, *WHOLE)}
        groups = 1 + max(group for group, _ in self._buffers)
        chunks = 1 + max(chunk for _, chunk in self._buffers)
        pp = groups // self._tp
        boxes = Boxes()
        stages = []
        first_layer = 0
        # The pipeline ranks hold layers in turn, chunk after chunk.
        for stage in range(chunks * pp):
            chunk, pp_rank = divmod(stage, pp)
            ends = set()
            for tp_rank in range(self._tp):
                buckets = self._buffers[pp_rank * self._tp + tp_rank, chunk]
                placed = self._place(
                    buckets,
                    order,
                    numel,
                    first_layer,
                    first=stage == 0,
                    last=stage == chunks * pp - 1,
                )
                if placed is None:
                    return None
                layers = [parameter.layer for parameter in placed if parameter.leaf not in WHOLE]
                ends.add(max(layers, default=first_layer - 1) + 1)
                for parameter in placed:
                    self.add_boxes(boxes, parameter, tp_rank)
            if len(ends) != 1:
                return None
            stages.append(Stage(pp_rank, chunk, range(first_layer, *ends)))
            first_layer = ends.pop()
        if first_layer != self._layers:
            return None
        if self._experts and self._experts.has_own_optimizer:
            return boxes if self._experts.add_boxes(self, boxes, stages) else None
        return boxes

    def _place(
        self,
        buckets: Sequence[Bucket],
        order: Order,
        numel: Mapping[str, int],
        first_layer: int,
        *,
        first: bool,
        last: bool,
    ) -> list[Placed] | None:
        """Return the parameters of a stage in its buckets, whatever its number of layers; None if
        they do not fill the buckets."""
        tied = not self._stored(HEAD, 0)
        # The last parameter of the model comes first, because its gradient does.
        behind = [(HEAD, 0)] if last and not (tied and first) else []
        behind += [(NORM, 0)] if last else []
        for stop in range(first_layer, self._layers + 1):
            blocks = [(leaf, n) for n in range(first_layer, stop) for leaf in order(n)]
            before = [(EMBEDDING, 0)] if first else []
            placed = filled(buckets, [*behind, *reversed(blocks), *before], numel)
            if placed is not None:
                return placed
        return None

    def part_numel(self, leaf: str, layer: int) -> int:
        """Return the number of elements of a parameter of the layer on one rank."""
        self._examples[leaf] = layer
        return self._part(leaf, 0).numel

    def add_boxes(self, boxes: Boxes, placed: Placed, tp_rank: int) -> None:
        """Add the boxes of a parameter on a tensor-parallel rank, unless it is a copy."""
        keys = self._stored(placed.leaf, placed.layer)
        by_rows, by_columns, ranks = self._cut(placed.leaf)
        if not keys or tp_rank >= (ranks if by_rows or by_columns else 1):
            return
        part = self._part(placed.leaf, tp_rank)
        start = placed.start
        for number, (row, rows) in enumerate(part.rows):
            key, index = keys[number if len(keys) > 1 else 0]
            if len(keys) > 1:
                row -= number * self._container.tensors[key].shape[len(index)]
            box = _Box(row, rows, part.column, part.columns, placed.bucket.name, start)
            boxes.add(key, index, box)
            start += rows * part.columns

    def misfit(self) -> CheckpointError:
        """Return the error of buckets that do not have the expected parameters."""
        return self._error(
            "optimizer.distributed",
            "buckets that do not fit the order of the model's parameters",
            "the buffers of Megatron-Core's GPTModel",
        )

    def _error(self, name: str, got: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self._folder} {name}", got=got, expected=expected, do=DO)


def _experts_of(reader: TorchDistReader) -> ExpertBuckets | None:
    if not reader.model.num_experts:
        return None
    from megatron_llama.converter.torch_dist.expert_buckets import ExpertBuckets  # of few models

    return ExpertBuckets(reader)


def filled(
    buckets: Sequence[Bucket], parameters: Sequence[tuple[str, int]], numel: Mapping[str, int]
) -> list[Placed] | None:
    """Lay the parameters (leaf, layer) into the buckets, one behind the other. Return None if they
    do not fill them, or if one begins or ends where the file has no boundary."""
    placed = []
    number = 0
    end = 0
    for leaf, layer in parameters:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        if number < len(buckets) and start == buckets[number].numel:
            # The bucket ended before the padding in front of this parameter was known to belong to
            # it: Megatron gives tied embeddings on two stages a bucket of their own.
            number = number + 1
            start = 0
        if number == len(buckets):
            return None
        bucket = buckets[number]
        end = start + numel[leaf]
        if not {start, end} <= bucket.boundaries:
            return None
        placed.append(Placed(leaf, layer, bucket, start))
        if end == bucket.numel:
            number = number + 1
            end = 0
    return placed if number == len(buckets) else None
