"""The distributed optimizer's state as Megatron-Core has it in memory (``dp_reshardable``): flat
buckets of one model-parallel rank each, which do not name the owners of their values.

    optimizer.distributed.dp_group_idx_G.gbuf_idx_C.dtype_(P, D).bucket_idx_B.exp_avg    [numel]

G is tp rank + tp size * pp rank, C is the model chunk of a virtual pipeline. A buffer has the
parameters of its chunk in the reverse of their order in the model, each at a multiple of 64; it is
cut into buckets behind a parameter. Tensor-parallel parameters are this rank's part, row by row.

The places of parameters follow from that order. Two checks prove it: where a parameter begins and
ends, the file has a boundary between two pieces; and the masters of the norms, rounded, are the
norms of the model.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from megatron_llama.checkpoint.model_folders.safetensors_file import BLOCK_ELEMENTS
from megatron_llama.converter.megatron.names import BLOCKS, LOCAL, TE
from megatron_llama.converter.torch_dist.masters import require_masters
from megatron_llama.converter.torch_dist.names import EMBEDDING_KEY, HALVES, HEAD_KEY, LAYERS
from megatron_llama.converter.torch_dist.reader import TorchDistReader
from megatron_llama.errors import CheckpointError

BUCKET = re.compile(
    r"(optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_\(.*\)"
    r"\.bucket_idx_(\d+))\.(\w+)"
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
class _Bucket:
    name: str
    numel: int
    boundaries: frozenset[int]
    """Places where pieces begin or end."""


@dataclass(frozen=True)
class _Placed:
    """A parameter in the buffer of a model chunk."""

    leaf: str
    """EMBEDDING, HEAD, NORM, or our name within a block."""
    layer: int
    """Counted from 0 within the chunk."""
    bucket: _Bucket
    start: int


class FlatBuckets:
    """Reads the buckets by the keys of the model: ``exp_avg.decoder.final_layernorm.weight``."""

    def __init__(self, reader: TorchDistReader) -> None:
        """Find the place of each parameter. Raises CheckpointError if it is not certain."""
        self._container = reader.checkpoint.container
        self._folder = reader.folder
        self._tp = reader.checkpoint.tp
        self._layers = reader.model.num_hidden_layers
        self._buffers = self._find_buffers()
        orders = ([leaf for leaf in order if self._stored(leaf, 0)] for order in ORDERS.values())
        layouts = (self._layout(order) for order in orders)
        boxes = next((layout for layout in layouts if layout is not None), None)
        if boxes is None:
            raise self._error(
                "optimizer.distributed",
                "buckets that do not fit the order of the model's parameters",
                "the buffers of Megatron-Core's GPTModel",
            )
        self._boxes: Mapping[tuple[str, int | None], Sequence[_Box]] = boxes
        # Boundaries do not tell whose values lie between them, nor whether they are whole masters.
        require_masters(reader, self, "param.", do=DO)

    def read(self, name: str, offset: Sequence[int], out: Tensor) -> None:
        """Fill ``out`` with the box of its size that begins at ``offset`` in a tensor of the model.
        ``name`` is one of STATES, a dot, and the key. Several threads may call it at a time. Raises
        CheckpointError."""
        state, _, key = name.partition(".")
        layer: int | None = None
        if (key, None) not in self._boxes:
            layer, *offset = offset
            out = out.squeeze(0)
        if out.dim() == 1:
            offset = (*offset, 0)
            out = out.unsqueeze(1)
        row, column = offset
        rows, columns = out.shape
        for box in self._boxes[key, layer]:
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

    def _find_buffers(self) -> dict[tuple[int, int], list[_Bucket]]:
        """Return the buckets of each data-parallel group and model chunk. Raises
        CheckpointError."""
        bases_at = defaultdict[tuple[int, int], dict[int, str]](dict)
        names = []
        for name in self._container.tensors:
            match = BUCKET.fullmatch(name)
            if match is None:
                continue
            base, group, chunk, index, state = match.groups()
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
        if not bases_at or groups % self._tp or not whole:
            raise self._error(
                "optimizer.distributed",
                f"buffers {', '.join(f'{g}.{c}' for g, c in sorted(bases_at)) or 'none'}",
                f"{chunks} for each of tp {self._tp} x pp ranks",
            )
        buffers = {}
        for place, bases in bases_at.items():
            if sorted(bases) != list(range(len(bases))):
                got = f"buckets {sorted(bases)}"
                raise self._error(next(iter(bases.values())), got, "all from 0 on")
            buffers[place] = [self._bucket(bases[index]) for index in sorted(bases)]
        return buffers

    def _bucket(self, base: str) -> _Bucket:
        tensors = [self._container.tensors[f"{base}.{state}"] for state in STATES]
        shapes = {tensor.shape for tensor in tensors}
        if len(shapes) != 1 or len(tensors[0].shape) != 1:
            got = f"shapes {', '.join(map(str, shapes))}"
            raise self._error(base, got, "three vectors of one length")
        ends = ((c.offset[0], c.offset[0] + c.size[0]) for c in tensors[0].chunks)
        return _Bucket(base, tensors[0].shape[0], frozenset(at for pair in ends for at in pair))

    def _stored(self, leaf: str, layer: int) -> tuple[tuple[str, int | None], ...]:
        """Return the keys of a tensor, each with its index in dimension 0 if layers are stacked:
        one, two if it is stored in halves, none if the model has no such tensor."""
        tensors = self._container.tensors
        if leaf in WHOLE:
            return ((WHOLE[leaf], None),) if WHOLE[leaf] in tensors else ()
        for theirs in dict.fromkeys((BLOCKS[TE][leaf], BLOCKS[LOCAL][leaf])):
            for index, key in ((layer, LAYERS + theirs), (None, f"{LAYERS}{layer}.{theirs}")):
                if key in tensors:
                    return ((key, index),)
                if all(key + half in tensors for half in HALVES):
                    return tuple((key + half, index) for half in HALVES)
        return ()

    def _part(self, leaf: str, tp_rank: int) -> _Part:
        """Return the part of a tensor on a tensor-parallel rank. Raises CheckpointError."""
        # A tied head on another stage than the embedding is a copy of that.
        keys = self._stored(leaf, 0) or self._stored(EMBEDDING, 0)
        rows = 0
        columns = 1
        for key, index in keys:
            shape = self._container.tensors[key].shape[index is not None :]
            rows = rows + shape[0]
            columns = shape[1] if len(shape) == 2 else 1
        tp = self._tp
        blocks = 2 if leaf.startswith("mlp.gate_up_proj") else 1
        split = columns if leaf in ROW_PARALLEL else rows // blocks
        if (leaf in ROW_PARALLEL or leaf in COLUMN_PARALLEL) and split % tp:
            raise self._error(keys[0][0], f"{split} rows or columns", f"a multiple of tp {tp}")
        if leaf in ROW_PARALLEL:
            return _Part(((0, rows),), tp_rank * (columns // tp), columns // tp)
        if leaf not in COLUMN_PARALLEL:
            return _Part(((0, rows),), 0, columns)
        share = split // tp
        boxes = ((block * split + tp_rank * share, share) for block in range(blocks))
        return _Part(tuple(boxes), 0, columns)

    def _layout(self, order: Sequence[str]) -> dict[tuple[str, int | None], list[_Box]] | None:
        """Return the boxes of each stored tensor, if the buffers have the parameters of a block in
        this order; else None."""
        numel = {leaf: self._part(leaf, 0).numel for leaf in (*order, *WHOLE)}
        groups = 1 + max(group for group, _ in self._buffers)
        chunks = 1 + max(chunk for _, chunk in self._buffers)
        pp = groups // self._tp
        boxes = defaultdict[tuple[str, int | None], list[_Box]](list)
        first_layer = 0
        # The pipeline ranks hold layers in turn, chunk after chunk.
        for stage in range(chunks * pp):
            chunk, pp_rank = divmod(stage, pp)
            counts = set()
            for tp_rank in range(self._tp):
                buckets = self._buffers[pp_rank * self._tp + tp_rank, chunk]
                placed = self._place(
                    buckets, order, numel, first=stage == 0, last=stage == chunks * pp - 1
                )
                if placed is None:
                    return None
                counts.add(sum(parameter.leaf == order[0] for parameter in placed))
                for parameter in placed:
                    self._add_boxes(boxes, parameter, first_layer + parameter.layer, tp_rank)
            if len(counts) != 1:
                return None
            first_layer += counts.pop()
        return boxes if first_layer == self._layers else None

    def _place(
        self,
        buckets: Sequence[_Bucket],
        order: Sequence[str],
        numel: Mapping[str, int],
        *,
        first: bool,
        last: bool,
    ) -> list[_Placed] | None:
        """Return the parameters of a stage in its buckets, whatever its number of layers; None if
        they do not fill the buckets."""
        tied = not self._stored(HEAD, 0)
        # The last parameter of the model comes first, because its gradient does.
        behind = [(HEAD, 0)] if last and not (tied and first) else []
        behind += [(NORM, 0)] if last else []
        for layers in range(self._layers + 1):
            blocks = [(leaf, layer) for layer in range(layers) for leaf in order]
            before = [(EMBEDDING, 0)] if first else []
            placed = _filled(buckets, [*behind, *reversed(blocks), *before], numel)
            if placed is not None:
                return placed
        return None

    def _add_boxes(
        self,
        boxes: Mapping[tuple[str, int | None], list[_Box]],
        placed: _Placed,
        layer: int,
        tp_rank: int,
    ) -> None:
        keys = self._stored(placed.leaf, layer)
        part = self._part(placed.leaf, tp_rank)
        replicated = placed.leaf not in ROW_PARALLEL and placed.leaf not in COLUMN_PARALLEL
        if not keys or (replicated and tp_rank > 0):
            return  # a copy
        start = placed.start
        for number, (row, rows) in enumerate(part.rows):
            key, index = keys[number if len(keys) > 1 else 0]
            if len(keys) > 1:
                row -= number * self._container.tensors[key].shape[index is not None]
            box = _Box(row, rows, part.column, part.columns, placed.bucket.name, start)
            boxes[key, index].append(box)
            start += rows * part.columns

    def _error(self, name: str, got: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self._folder} {name}", got=got, expected=expected, do=DO)


def _filled(
    buckets: Sequence[_Bucket], parameters: Sequence[tuple[str, int]], numel: Mapping[str, int]
) -> list[_Placed] | None:
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
        placed.append(_Placed(leaf, layer, bucket, start))
        if end == bucket.numel:
            number = number + 1
            end = 0
    return placed if number == len(buckets) else None
