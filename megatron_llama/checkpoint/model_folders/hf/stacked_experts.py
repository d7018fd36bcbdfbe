"""Experts as transformers 5 has them in memory, and in folders that it saves with
``save_original_format=False``: of a block one tensor [experts, rows, columns] for all gates and
ups, and one for all outputs. Other folders have three tensors for each expert, but for LLaMA 4's,
which have the two tensors of a block as [experts, columns, rows]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from megatron_llama.config.schema import ModelConfig
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.model.families import FAMILIES
from megatron_llama.model.plan.experts import expert_names, is_sparse, router_name
from megatron_llama.model.plan.fp8 import ROUTER
from megatron_llama.model.plan.params import hf_shapes


@dataclass(frozen=True)
class Place:
    """The place of a matrix in a tensor that holds several."""

    tensor: str
    shape: tuple[int, ...]
    """The shape of that tensor."""
    expert: int
    row: int
    """Its first row."""
    rows: int
    columns: int
    transposed: bool = False
    """Whether the tensor has columns before rows."""

    def of(self, whole: Tensor) -> Tensor:
        """View the matrix in its tensor."""
        if len(self.shape) == 2:
            return whole[self.row : self.row + self.rows]
        matrix = whole[self.expert].t() if self.transposed else whole[self.expert]
        return matrix[self.row : self.row + self.rows]


def stacked_places(model: ModelConfig) -> dict[str, Place]:
    """Return the place of each matrix of an expert, by the matrix's own name, and of the routers,
    which may have another name beside stacked experts."""
    hidden = model.hidden_size
    inner = model.moe_intermediate_size
    experts = model.num_experts
    family = FAMILIES[model.model_type]
    turned = family.stacked_experts
    owner = family.tensors.get("mlp.experts", "mlp.experts") if turned else "mlp.experts"
    stacks = [f"{owner}.{name}" for name in ("gate_up_proj", "down_proj")]
    places = {}
    for layer in filter(lambda layer: is_sparse(model, layer), range(model.num_hidden_layers)):
        prefix = f"model.layers.{layer}."
        shape = (experts, hidden)
        if not turned:
            router = Place(f"{prefix}{ROUTER}", shape, 0, 0, experts, hidden)
            places[prefix + router_name(model)] = router
        sizes = [(2 * inner, hidden), (hidden, inner)]
        both, output = (
            (prefix + name, (experts, *(size[::-1] if turned else size)))
            for name, size in zip(stacks, sizes, strict=True)
        )
        for expert in range(experts):
            gate, up, down = (prefix + name for name in expert_names(model, expert))
            places[gate] = Place(*both, expert, 0, inner, hidden, turned)
            places[up] = Place(*both, expert, inner, inner, hidden, turned)
            places[down] = Place(*output, expert, 0, hidden, inner, turned)
    return places


def stacked_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of transformers 5's model, in forward order."""
    places = stacked_places(model)
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in hf_shapes(model).items():
        place = places.get(name)
        found |= {name: shape} if place is None else {place.tensor: place.shape}
    return found


class MatrixSlice:
    """A matrix that is a part of a stored tensor, behind the interface of a stored tensor."""

    def __init__(self, stacked: Any, place: Place) -> None:
        """``stacked`` is the tensor as a slice of its file."""
        self._stacked = stacked
        self._place = place

    def get_shape(self) -> list[int]:
        """Return the shape of the matrix; of a tensor with another shape than the model has, that
        shape."""
        stored = tuple(self._stacked.get_shape())
        place = self._place
        return list(stored) if stored != place.shape else [place.rows, place.columns]

    def get_dtype(self) -> str:
        """Return the name of the dtype in safetensors."""
        name: str = self._stacked.get_dtype()
        return name

    def __getitem__(self, window: tuple[slice, slice]) -> Tensor:
        """Return the values of a window of the matrix."""
        place = self._place
        rows, columns = window
        within = slice(place.row + (rows.start or 0), place.row + _stop(rows, place.rows))
        if len(place.shape) == 2:
            values: Tensor = self._stacked[within, columns]
            return values
        expert = slice(place.expert, place.expert + 1)
        if place.transposed:
            turned: Tensor = self._stacked[expert, columns, within]
            return turned[0].t()
        values = self._stacked[expert, within, columns]
        return values[0]


def _stop(rows: slice, count: int) -> int:
    return count if rows.stop is None else min(count, int(rows.stop))


def by_file_names(model: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of transformers' model by the names of files: those that are stacked as views,
    one for each matrix."""
    places = {n: place for n, place in stacked_places(model).items() if place.tensor in tensors}
    stacked = {place.tensor for place in places.values()}
    found = {name: tensor for name, tensor in tensors.items() if name not in stacked}
    for name, place in places.items():
        found[name] = place.of(tensors[place.tensor])
    return found


class StackedExperts:
    """A source of weights that also has the stacked tensors, all rows of some or all experts, under
    their names in transformers 5."""

    def __init__(self, source: WeightSource, model: ModelConfig) -> None:
        self._source = source
        self._parts: dict[str, list[tuple[str, Place]]] = {}
        for name, place in stacked_places(model).items():
            self._parts.setdefault(place.tensor, []).append((name, place))

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        """Write the rectangle's values into ``out``, a tensor of its size."""
        if rectangle.name not in self._parts:
            self._source(rectangle, out)
            return
        first, count = rectangle.offset[0], rectangle.size[0]
        for name, place in self._parts[rectangle.name]:
            shape = (place.rows, place.columns)
            part = Rectangle(name, shape, (0, 0), shape, 0)
            if len(place.shape) == 2:
                self._source(part, place.of(out))
            elif place.transposed and first <= place.expert < first + count:
                # A source may need rows that are contiguous.
                values = out.new_empty(shape)
                self._source(part, values)
                replace(place, expert=place.expert - first).of(out).copy_(values)
            elif first <= place.expert < first + count:
                self._source(part, replace(place, expert=place.expert - first).of(out))
