"""Rows of tokens in the order of the experts that they are sent to, and the products of each
expert's rows with its weight.

A token that goes to k experts has k rows, so there are as many rows as tokens times k whatever is
chosen: shapes are known before. On a host the numbers of each expert's rows are integers, and each
expert's product is one of ``engine/host_gemm.py``. On a device they stay there: Triton's kernels
(``kernels/experts.py``, ``kernels/rows.py``) and torch's grouped product read them, the host waits
for nothing, and a graph can capture it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_llama.engine import host_gemm as gemm
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.kernels import runs_kernels
from megatron_llama.engine.param_handle import accumulate_product
from megatron_llama.engine.tensors import at_least_fp32
from megatron_llama.model.nn.ops import Gate


@dataclass(frozen=True)
class TokenRows:
    """Rows of t tokens, which are sent to up to k places each."""

    per_token: int
    """Places of each token, k."""
    order: Tensor
    """[n] int64: of each row, its place in the table [t, k]; n is t * k, or less where places of
    the table have no row."""
    elsewhere: Tensor | None
    """[t, k] bool: the places of the table that have no row. None: all have one."""

    @property
    def end(self) -> Tensor | None:
        """[1] int32: the end of the rows that hold something. None: all do."""
        return None

    def gather(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the rows [n, h] of tokens x [t, h], times the weights [t, k] of their places if
        there are any."""
        if waits_for_nothing(x, x.dtype):
            from megatron_llama.model.nn.kernels import rows as kernels  # where Triton is

            return kernels.gather(x, weights, self.order, self.per_token, self.end)
        gathered = x.index_select(0, self.order // self.per_token)
        return gathered if weights is None else (gathered * self._of_rows(weights)).to(x.dtype)

    def weighted(self, values: Tensor, weights: Tensor) -> Tensor:
        """Return the rows [n, d], each times the weight of its place, of weights [t, k]."""
        if waits_for_nothing(values, values.dtype):
            from megatron_llama.model.nn.kernels import rows as kernels  # where Triton is

            out = torch.empty_like(values, memory_format=torch.contiguous_format)
            kernels.weigh(values.contiguous(), weights, self.order, self.end, out)
            return out
        return (values * self._of_rows(weights)).to(values.dtype)

    def weigh(self, values: Tensor, weights: Tensor) -> None:
        """Multiply rows [n, d] in place, each by the weight of its place, of weights
        [t, k]."""
        if waits_for_nothing(values, values.dtype):
            from megatron_llama.model.nn.kernels import rows as kernels  # where Triton is

            kernels.weigh(values, weights, self.order, self.end, values)
        else:
            values.mul_(self._of_rows(weights))

    def sum(self, values: Tensor, weights: Tensor | None) -> Tensor:
        """Sum the rows [n, h] of each token, times its weights [t, k] if there are any, at
        least in fp32 and in the order of the table: [t, h] in the dtype of the rows."""
        if waits_for_nothing(values, values.dtype):
            from megatron_llama.model.nn.kernels import rows as kernels  # where Triton is

            table = self.places(), self.elsewhere, self.per_token
            return kernels.sum_rows(values, weights, *table)
        places = self.places().view(-1, self.per_token)
        total: Tensor | None = None
        for column in range(self.per_token):
            part = values.index_select(0, places[:, column]).to(at_least_fp32(values.dtype))
            if weights is not None:
                part.mul_(weights[:, column, None])
            if self.elsewhere is not None:
                part.masked_fill_(self.elsewhere[:, column, None], 0.0)
            total = part if total is None else total.add_(part)
        assert total is not None
        return total.to(values.dtype)

    def dots(self, left: Tensor, right: Tensor, weights: Tensor) -> Tensor:
        """Return the gradient of weights [t, k] that multiply rows: the scalar product of each row
        of right [n, d] with that of left, the gradient of its multiple."""
        if waits_for_nothing(left, left.dtype):
            from megatron_llama.model.nn.kernels import rows as kernels  # where Triton is

            grad = torch.zeros_like(weights, memory_format=torch.contiguous_format)
            kernels.dots(left, right, self.order, self.end, grad)
            return grad
        products = left.to(at_least_fp32(left.dtype)) * right
        grad = products.sum(-1)[self.places()].view_as(weights).to(weights.dtype)
        return grad if self.elsewhere is None else grad.masked_fill_(self.elsewhere, 0.0)

    def _of_rows(self, weights: Tensor) -> Tensor:
        """Return the weight of each row, [n, 1], of weights [t, k]."""
        return weights.flatten()[self.order].unsqueeze(-1)

    def places(self) -> Tensor:
        """Return the row of each place of the table, [t * k]; of places without a row any one."""
        rows = torch.arange(len(self.order), device=self.order.device)
        if self.elsewhere is None:
            places = torch.empty_like(self.order)
        else:
            places = self.order.new_zeros(self.elsewhere.numel())
        # No element is written twice, so no order of writes matters.
        return places.scatter_(0, self.order, rows)


@dataclass(frozen=True)
class ExpertRows(TokenRows):
    """The rows of t tokens with k experts each, sorted by expert; those of one expert are in the
    order of the tokens. Experts of other ranks have no rows here, and rows behind those of the last
    expert hold anything."""

    ends: Tensor
    """[E] int32: the end of each expert's rows."""
    sizes: tuple[int, ...] | None
    """Numbers of each expert's rows, where the host has to know them."""

    @property
    def end(self) -> Tensor | None:
        return None if self.elsewhere is None else self.ends[-1:]

    def gate(self, gate: Gate) -> Gate:
        """Return the gated activation of these rows: where it is a kernel, not of those behind the
        last expert's."""
        if self.end is None or self.sizes is not None:
            return gate
        from megatron_llama.model.nn.kernels import gate as kernels  # where Triton is

        return kernels.of_rows(gate, self.end)


def sorted_rows(
    experts: Tensor, count: int, dtype: torch.dtype, *, most: int | None = None
) -> ExpertRows:
    """Sort the rows of a table of experts [t, k], of ``count`` experts that multiply in this
    dtype. ``most``: other ranks have experts too, for all of which the number ``count`` stands, and
    those here have at most so many rows."""
    keys, order = torch.sort(experts.flatten(), stable=True)
    ends = expert_ends(keys, count)
    elsewhere = None
    if most is not None:
        order = order[:most]
        elsewhere = experts == count
    sizes = None if waits_for_nothing(experts, dtype) else _sizes(ends, len(order))
    return ExpertRows(experts.shape[1], order, elsewhere, ends, sizes)


def expert_ends(keys: Tensor, count: int) -> Tensor:
    """Return where the rows of each of ``count`` experts end among sorted keys, [count] int32."""
    bounds = torch.arange(count, device=keys.device)
    return torch.searchsorted(keys, bounds, right=True, out_int32=True)


def by_expert(weight: Tensor, count: int) -> Tensor:
    """View a weight [E * f, d] as [E, f, d]."""
    return weight.view(count, -1, weight.shape[1])


def waits_for_nothing(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether products of experts in this dtype, on the device of the tensor, need no number of
    rows on the host. Otherwise the host waits for these numbers in each block: with torch's fp64,
    or without Triton."""
    return not devices.is_fake(tensor) and runs_kernels(tensor.device, dtype)


def expert_warnings(device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """Yield a warning where an accelerator has no kernel for experts in this dtype."""
    if not devices.is_host(device) and not runs_kernels(device, dtype):
        yield (
            f"experts in {dtype} have no kernel on this device: in each of their blocks the host "
            "waits for the numbers of tokens"
        )


def _sizes(ends: Tensor, rows: int) -> tuple[int, ...]:
    """Return the numbers of each expert's rows."""
    if devices.is_fake(ends):
        # Nobody has been sent anywhere: as if all experts had as many.
        bounds = [rows * expert // len(ends) for expert in range(len(ends) + 1)]
    else:
        bounds = [0, *ends.tolist()]
    return tuple(end - start for start, end in pairwise(bounds))


def _parts(sizes: tuple[int, ...]) -> Iterator[tuple[int, slice]]:
    """Yield each expert with its rows."""
    start = 0
    for expert, size in enumerate(sizes):
        yield expert, slice(start, start + size)
        start += size


def linear(x: Tensor, weights: Tensor, groups: ExpertRows) -> Tensor:
    """Multiply each expert's rows of x [n, d] by its weight, of weights [E, f, d]: [n, f]."""
    if groups.sizes is None:
        if _has_grouped_kernel(x, weights):
            return F.grouped_mm(x, weights.mT, offs=groups.ends)
        from megatron_llama.model.nn.kernels import experts as kernels  # where Triton is

        return kernels.linear(x, weights, groups.ends)
    out = x.new_empty(len(x), weights.shape[1])
    for expert, part in _parts(groups.sizes):
        if part.start < part.stop:
            out[part] = gemm.linear(x[part], weights[expert])
    return out


def linear_backward(grad: Tensor, weights: Tensor, groups: ExpertRows) -> Tensor:
    """Return the gradient [n, d] of the rows of ``linear`` from that of its output, [n, f]."""
    if groups.sizes is None:
        return linear(grad, weights.mT, groups)
    out = grad.new_empty(len(grad), weights.shape[2])
    for expert, part in _parts(groups.sizes):
        if part.start < part.stop:
            out[part] = gemm.linear_backward(grad[part], weights[expert])
    return out


def accumulate(view: Tensor, beta: float, grad: Tensor, x: Tensor, groups: ExpertRows) -> None:
    """Set ``view = beta * view + grad.T @ x`` for each expert's view [f, d], of view [E, f, d], and
    rows of grad [n, f] and x [n, d]; beta is 0 or 1. An expert without rows adds zeros."""
    if groups.sizes is None:
        from megatron_llama.model.nn.kernels import experts as kernels  # where Triton is

        # torch's grouped product would round each contribution to bf16.
        kernels.accumulate(view, beta, grad, x, groups.ends)
        return
    for expert, part in _parts(groups.sizes):
        if part.start < part.stop:
            accumulate_product(view[expert], beta, grad[part].t(), x[part])
        elif beta == 0.0:
            view[expert].zero_()


class ExpertProducts(Protocol):
    """Products of experts' rows with their weight [E * f, d], which has been waited for: those of
    this module, or in FP8 (``model/nn/fp8/experts.py``). Rows behind those of the last expert may
    hold anything."""

    def linear(self, x: Tensor, weight: Tensor, groups: ExpertRows) -> Tensor:
        """Multiply each expert's rows of x [n, d] by its weight [f, d]: [n, f]."""

    def linear_backward(self, grad: Tensor, weight: Tensor, groups: ExpertRows) -> Tensor:
        """Return the gradient [n, d] of the rows from that of the output, [n, f]."""


class PlainProducts:
    """``ExpertProducts`` in the dtype of the rows."""

    def linear(self, x: Tensor, weight: Tensor, groups: ExpertRows) -> Tensor:
        return linear(x, by_expert(weight, len(groups.ends)), groups)

    def linear_backward(self, grad: Tensor, weight: Tensor, groups: ExpertRows) -> Tensor:
        return linear_backward(grad, by_expert(weight, len(groups.ends)), groups)


def _has_grouped_kernel(x: Tensor, weights: Tensor) -> bool:
    """Whether torch has one kernel for the products of all experts: in bf16, on Hopper, where rows
    are multiples of 16 bytes. Elsewhere it waits for their numbers, and loops on the host."""
    # On Blackwell torch has one as well; that of 2.10 failed to launch there.
    return (
        x.dtype is torch.bfloat16
        and len(x) > 0
        and devices.capability(x.device)[0] == 9
        and all(width % 8 == 0 for width in weights.shape[1:])
    )
