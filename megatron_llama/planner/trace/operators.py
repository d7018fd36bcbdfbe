"""The cost of an operator: floating-point operations of products and attention, and bytes moved.

A multiplication with its addition is two operations; only matrix products and attention count.
Attention has two products forward and five backward, because scores are recomputed (Dao et al.,
2022, appendix B.4). With a causal mask half of the scores count. Every input is read once, every
output or changed tensor is written once. Views and new memory move no bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

FORWARD = 2
BACKWARD = 5
"""Matrix products of attention in the forward and in the backward pass."""
_OVERWRITES = frozenset({"aten::copy_", "aten::zero_", "aten::fill_", "aten::masked_fill_.Scalar"})
"""Operators that write a tensor without reading it."""
_FRESH = ("aten::empty", "aten::new_empty")
"""Prefixes of operators that allocate memory and compute nothing."""
_IDLE = frozenset({"aten::lift_fresh", "aten::_unsafe_view", "prim::device"})
"""Operators other than views that touch no element."""


def _of_product(left: Tensor, right: Tensor) -> int:
    """Return the FLOPs of [..., m, k] times [..., k, n]."""
    return 2 * left.numel() * right.shape[-1]


def _of_attention(query: Tensor, key: Tensor, value: Tensor, *, products: int, causal: bool) -> int:
    """Return the FLOPs of ``products`` products of attention. All tensors are [b, n, s, d]."""
    scores = prod(query.shape[:2]) * query.shape[2] * key.shape[2]
    return products * scores * value.shape[3] * (1 if causal else 2)


def _forward_attention(arguments: Sequence[Any]) -> int:
    return _of_attention(*arguments[:3], products=FORWARD, causal=_has(arguments, 4))


def _backward_attention(arguments: Sequence[Any]) -> int:
    return _of_attention(*arguments[1:4], products=BACKWARD, causal=_has(arguments, 7))


def _has(arguments: Sequence[Any], place: int) -> bool:
    """Whether a flag is set. The dispatcher leaves out trailing arguments with default values."""
    return len(arguments) > place and bool(arguments[place])


_FLOPS: Mapping[str, Callable[[Sequence[Any]], int]] = MappingProxyType(
    {
        "aten::mm": lambda arguments: _of_product(*arguments[:2]),
        "aten::bmm": lambda arguments: _of_product(*arguments[:2]),
        "aten::addmm": lambda arguments: _of_product(*arguments[1:3]),
        "aten::baddbmm": lambda arguments: _of_product(*arguments[1:3]),
        "aten::_scaled_mm": lambda arguments: _of_product(*arguments[:2]),
        "aten::_scaled_mm_v2": lambda arguments: _of_product(*arguments[:2]),
        "mkldnn::_linear_pointwise": lambda arguments: _of_product(arguments[0], arguments[1].t()),
        "megatron_llama::scaled_experts": lambda arguments: (
            2 * arguments[0].numel() * arguments[2].shape[1]
        ),
        "megatron_llama::addmm_fp32": lambda arguments: _of_product(*arguments[1:3]),
        "aten::_scaled_dot_product_flash_attention_for_cpu": _forward_attention,
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _backward_attention,
    }
)
"""FLOPs by the operator's name. All overloads have the same first arguments."""


@dataclass(frozen=True)
class Recipe:
    """The properties of an operator that do not depend on its arguments."""

    name: str
    works: bool
    """Whether it computes or moves anything."""
    flops: Callable[[Sequence[Any]], int] | None
    unread: frozenset[int | str]
    """Arguments that are written without being read, by place or name."""
    written: frozenset[int | str]

    @staticmethod
    def of(operator: torch._ops.OpOverload) -> Recipe:
        """Return the recipe that follows from the operator's schema."""
        schema = operator._schema
        name = schema.name
        arguments = list(enumerate(schema.arguments))
        written = {
            argument.name if argument.kwarg_only else place
            for place, argument in arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        out = {
            argument.name
            for _, argument in arguments
            if argument.kwarg_only and argument.name in written
        }
        fresh = name.startswith(_FRESH) or name in _IDLE or operator.is_view
        unread = written if name in _OVERWRITES else out
        return Recipe(name, not fresh, _FLOPS.get(name), frozenset(unread), frozenset(written))


@dataclass(frozen=True)
class Cost:
    """The cost of one call."""

    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the input tensors, in order."""
    dtype: str
    """Dtype of the first input, or of the result if there is no input."""
    flops: int
    bytes: int


def cost(recipe: Recipe, arguments: Sequence[Any], named: Mapping[str, Any], results: Any) -> Cost:
    """Return the cost of a call. ``named`` are the keyword arguments, ``results`` the operator's
    results."""
    shapes = []
    size = 0
    dtype = ""
    for place, value in [*enumerate(arguments), *named.items()]:
        for tensor in tensors(value):
            shapes.append(tuple(tensor.shape))
            dtype = dtype or str(tensor.dtype)
            size += tensor.nbytes * ((place not in recipe.unread) + (place in recipe.written))
    if not recipe.written:
        for tensor in tensors(results):
            size += tensor.nbytes
            dtype = dtype or str(tensor.dtype)
    flops = 0 if recipe.flops is None else recipe.flops(arguments)
    return Cost(tuple(shapes), dtype.removeprefix("torch."), flops, size)


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors of an argument or a result, which may be a tensor or a list."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors(item)]
    return []
