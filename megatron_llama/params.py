"""Which parameters a pipeline stage owns, their local shapes, and where each element sits in the HuggingFace model.

Integers only. The model builds its modules from these specs, the layout packs them into buckets, checkpoints and imports
read the HuggingFace coordinates, and ``--dry-run`` counts them: one table, so the four cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_llama.config import ModelConfig


@dataclass(frozen=True)
class HFSlice:
    """Rows ``[row, row + rows)`` of a local parameter are the block at ``(hf_row, hf_col)`` of one HuggingFace tensor."""

    name: str
    shape: tuple[int, ...]
    row: int
    rows: int
    hf_row: int = 0
    hf_col: int = 0


@dataclass(frozen=True)
class ParamSpec:
    """One local parameter. ``shape`` is padded and tensor-parallel local; slices cover its unpadded rows."""

    name: str
    shape: tuple[int, ...]
    slices: tuple[HFSlice, ...]
    decay: bool
    """Weight decay applies: two or more dims."""
    replicated: bool
    """Every tensor-parallel rank holds the same values."""
    tied: bool = False
    """A copy of the same parameter lives on the other end of the pipeline."""
    contributions: int = 1
    """Gradient contributions in one backward pass: 2 for an embedding that is also the head of the same stage."""

    @property
    def numel(self) -> int:
        """Local elements, padding included."""
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """Elements of one row: 1 for a vector."""
        return self.numel // self.shape[0]


@dataclass(frozen=True)
class UnitSpec:
    """What is gathered together: the embedding, one transformer block, or the final norm with the head."""

    name: str
    params: tuple[ParamSpec, ...]


@dataclass(frozen=True)
class Rectangle:
    """A contiguous range of a local parameter that is a rectangle of one HuggingFace tensor."""

    name: str
    shape: tuple[int, ...]
    """Of the whole HuggingFace tensor."""
    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int
    """First element, in the flattened local parameter."""

    @property
    def numel(self) -> int:
        """Elements of the rectangle."""
        return math.prod(self.size)


def rectangles(spec: ParamSpec, start: int, stop: int) -> Iterator[Rectangle]:
    """The elements ``[start, stop)`` of the flattened parameter as HuggingFace rectangles, in order.

    At most three for each slice: the tail of a row, whole rows, the head of a row. Padding belongs to no slice.
    """
    width = spec.width
    for part in spec.slices:
        low, high = max(start, part.row * width), min(stop, (part.row + part.rows) * width)
        while low < high:
            row, col = divmod(low, width)
            rows = (high - low) // width if col == 0 else 0
            cols = width if rows else min(width - col, high - low)
            yield _rectangle(part, row, col, max(rows, 1), cols, low)
            low += max(rows, 1) * cols


def _rectangle(part: HFSlice, row: int, col: int, rows: int, cols: int, start: int) -> Rectangle:
    offset, size = (part.hf_row + row - part.row, part.hf_col + col), (rows, cols)
    dims = len(part.shape)
    return Rectangle(part.name, part.shape, offset[:dims], size[:dims], start)


def padded_vocab_size(model: ModelConfig, tp: int) -> int:
    """Rows of the embedding over all tensor-parallel ranks, padding included."""
    multiple = model.make_vocab_size_divisible_by * tp
    return -(-model.vocab_size // multiple) * multiple


@dataclass(frozen=True)
class Shapes:
    """Builds the specs of one tensor-parallel rank of a model."""

    model: ModelConfig
    tp: int = 1
    tp_rank: int = 0

    def embedding(self, *, tied: bool, contributions: int) -> UnitSpec:
        """The token embedding, rows split over tp."""
        weight = self._vocab("model.embed_tokens.weight", "model.embed_tokens.weight", tied, contributions)
        return UnitSpec("embed_tokens", (weight,))

    def block(self, layer: int) -> UnitSpec:
        """One transformer block, in the order of its forward pass."""
        m, prefix = self.model, f"model.layers.{layer}"
        query, key_value = m.num_attention_heads * m.head_dim, m.num_key_value_heads * m.head_dim
        attention = f"{prefix}.self_attn"
        return UnitSpec(
            f"layers.{layer}",
            (
                self._norm(f"{prefix}.input_layernorm.weight"),
                self._columns(f"{attention}.qkv_proj.weight", _qkv(attention, query, key_value)),
                self._rows(f"{attention}.o_proj.weight", query),
                self._norm(f"{prefix}.post_attention_layernorm.weight"),
                self._columns(f"{prefix}.mlp.gate_up_proj.weight", _gate_up(prefix, m.intermediate_size)),
                self._rows(f"{prefix}.mlp.down_proj.weight", m.intermediate_size),
            ),
        )

    def head(self, *, tied: bool, shared: bool) -> UnitSpec:
        """Final norm and output head. ``shared``: the head is the embedding of the same stage, and not listed again."""
        norm = self._norm("model.norm.weight")
        if shared:
            return UnitSpec("head", (norm,))
        source = "model.embed_tokens.weight" if tied else "lm_head.weight"
        return UnitSpec("head", (norm, self._vocab("lm_head.weight", source, tied, 1)))

    def _norm(self, name: str) -> ParamSpec:
        size = self.model.hidden_size
        return ParamSpec(name, (size,), (HFSlice(name, (size,), 0, size),), decay=False, replicated=True)

    def _columns(self, name: str, parts: Sequence[tuple[str, int]]) -> ParamSpec:
        """A fused column-parallel weight: each part is split by rows over tp, and the parts are stacked."""
        hidden, row, slices = self.model.hidden_size, 0, []
        for part, rows in parts:
            local = rows // self.tp
            slices.append(HFSlice(part, (rows, hidden), row, local, hf_row=self.tp_rank * local))
            row += local
        return ParamSpec(name, (row, hidden), tuple(slices), decay=True, replicated=False)

    def _rows(self, name: str, inputs: int) -> ParamSpec:
        """A row-parallel weight: its input columns are split over tp."""
        hidden, local = self.model.hidden_size, inputs // self.tp
        part = HFSlice(name, (hidden, inputs), 0, hidden, hf_col=self.tp_rank * local)
        return ParamSpec(name, (hidden, local), (part,), decay=True, replicated=False)

    def _vocab(self, name: str, source: str, tied: bool, contributions: int) -> ParamSpec:
        m = self.model
        local = padded_vocab_size(m, self.tp) // self.tp
        first = self.tp_rank * local
        rows = max(0, min(m.vocab_size - first, local))
        part = HFSlice(source, (m.vocab_size, m.hidden_size), 0, rows, hf_row=min(first, m.vocab_size))
        return ParamSpec(name, (local, m.hidden_size), (part,), True, False, tied, contributions)


def _qkv(attention: str, query: int, key_value: int) -> list[tuple[str, int]]:
    names = (("q_proj", query), ("k_proj", key_value), ("v_proj", key_value))
    return [(f"{attention}.{name}.weight", rows) for name, rows in names]


def _gate_up(prefix: str, size: int) -> list[tuple[str, int]]:
    return [(f"{prefix}.mlp.{name}.weight", size) for name in ("gate_proj", "up_proj")]


def stage_layers(num_hidden_layers: int, stages: int, stage: int) -> range:
    """The transformer blocks of one pipeline stage."""
    each = num_hidden_layers // stages
    return range(stage * each, (stage + 1) * each)


def stage_units(model: ModelConfig, *, tp: int = 1, tp_rank: int = 0, stages: int = 1, stage: int = 0) -> tuple[UnitSpec, ...]:
    """The units of one pipeline stage on one tensor-parallel rank, in forward order."""
    shapes, tie = Shapes(model, tp, tp_rank), model.tie_word_embeddings
    shared, apart = tie and stages == 1, tie and stages > 1
    units = [shapes.block(layer) for layer in stage_layers(model.num_hidden_layers, stages, stage)]
    if stage == 0:
        units.insert(0, shapes.embedding(tied=apart, contributions=2 if shared else 1))
    if stage == stages - 1:
        units.append(shapes.head(tied=apart, shared=shared))
    return tuple(units)


def hf_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the HuggingFace model, in forward order."""
    return {part.name: part.shape for unit in stage_units(model) for spec in unit.params for part in spec.slices}


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the whole model, as HuggingFace counts them: no padding, tied weights once."""
    return sum(math.prod(shape) for shape in hf_shapes(model).values())
