"""Linear layers over tp by torch's fused operators over symmetric memory: a rank reads the others'
rows over NVLink while it multiplies, and writes its partial sums to their owners.

The operators are those of torchtitan's asynchronous tensor parallelism
(``torch.distributed._symmetric_memory``). They compute what ``linear.py`` computes, from whole
tensors. Not measured yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_llama.engine.comm import autograd
from megatron_llama.engine.comm.device import is_host
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.engine.param_handle import ParamHandle, wait_unsharded
from megatron_llama.errors import ConfigError, describe
from megatron_llama.model.nn.linear import RowLinear, start_input_again, weight_gradient
from megatron_llama.model.nn.overlap import Products
from megatron_llama.model.nn.recompute import Recomputable


@dataclass(frozen=True)
class Operators:
    """The two operators of torch, both over the first dim."""

    gather_multiply: Callable[..., tuple[Tensor | None, list[Tensor]]]
    multiply_scatter: Callable[..., Tensor]

    @staticmethod
    def of_torch(device: torch.device) -> Operators:
        """Return those of this torch. Raises ConfigError where they cannot run."""
        import torch.distributed._symmetric_memory

        known = torch.ops.symm_mem
        names = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
        if is_host(device) or not all(hasattr(known, name) for name in names):
            raise ConfigError(
                describe(
                    "--tp-comm-overlap",
                    got=f"symm_mem on {device.type} with torch {torch.__version__}",
                    expected="GPUs that NVLink joins, and a torch with fused operators for them",
                    do="give a number of pieces or auto",
                )
            )
        return Operators(known.fused_all_gather_matmul, known.fused_matmul_reduce_scatter)


class SymmetricMemory:
    """``TensorOverlap`` by the fused operators."""

    def __init__(self, mesh: Mesh, operators: Operators | None = None) -> None:
        self.operators = operators or Operators.of_torch(mesh.device)

    def gather(self, shard: Tensor, tp: Axis) -> Gathered:
        return Gathered(shard, tp, self.operators)

    def sum(self, x: Tensor | Recomputable, layer: RowLinear, addition: Tensor | None) -> Tensor:
        value, recompute = (x.value, x) if isinstance(x, Recomputable) else (x, None)
        out: Tensor = _Row.apply(  # type: ignore[no-untyped-call]
            value, layer, self.operators, recompute, layer.weight
        )
        # A low-rank addition has a message of its own: the operator sums one product.
        return out if addition is None else out + autograd.scatter_sequence(addition, layer.tp)


@dataclass(frozen=True)
class Gathered:
    """``GatheredInput``: nothing is sent before the product."""

    shard: Tensor
    tp: Axis
    operators: Operators

    def products(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], products: Products
    ) -> Tensor:
        # The operator multiplies itself, so products in FP8 are refused with it.
        outputs = self.gathered_products([weight.t() for weight in weights], keep=False)[1]
        for out, bias in zip(outputs, biases, strict=True):
            if bias is not None:
                out.add_(bias)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def gathered_products(
        self, factors: list[Tensor], *, keep: bool
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Multiply all rows by factors [d, f]. With ``keep`` also return the rows, [s, b, d]."""
        name = _group_name(self.tp)
        # Over all ranks, as the recorder counts a gather.
        self.tp.recorder.count(self.tp.name, "all_gather", self.shard.nbytes * self.tp.size)
        return self.operators.gather_multiply(
            self.shard.contiguous(), factors, gather_dim=0, group_name=name, return_A=keep
        )


def _group_name(tp: Axis) -> str:
    assert tp.communicator is not None, "an axis of several ranks has a group"
    return tp.communicator.group_name


class _Row(torch.autograd.Function):
    """The product of a row-parallel layer and its sum over tp."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        layer: RowLinear,
        operators: Operators,
        recompute: Recomputable | None,
        weight: Tensor,
    ) -> Tensor:
        sources = (x,) if recompute is None else recompute.sources
        ctx.save_for_backward(weight, *(sources if ctx.needs_input_grad[4] else ()))
        ctx.make_input = None if recompute is None else recompute.function
        ctx.layer = layer
        ctx.operators = operators
        ctx.unsharded = wait_unsharded(weight)
        tp = layer.tp
        rows = x.numel() // x.shape[-1]
        tp.recorder.count(tp.name, "reduce_scatter", rows * len(weight) * x.element_size())
        return operators.multiply_scatter(
            x.contiguous(), weight.t(), "sum", scatter_dim=0, group_name=_group_name(tp)
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *sources = ctx.saved_tensors
        needs_x, _, _, _, needs_weight = ctx.needs_input_grad
        x_grad = None
        if needs_x:
            ctx.unsharded.check()
            gathered = Gathered(grad, ctx.layer.tp, ctx.operators)
            whole, [x_grad] = gathered.gathered_products([weight], keep=needs_weight)
        else:
            whole, gathering = autograd.start_all_gather(grad, ctx.layer.tp, async_op=False)
            gathering.wait()
        weight_grad = None
        if needs_weight:
            handle: ParamHandle | None = ctx.unsharded.handle
            # Detached: a postponed weight gradient must not keep the graph below its input.
            detached = [source.detach() for source in sources]

            def write() -> Tensor | None:
                assert whole is not None
                x, _ = start_input_again(ctx.make_input, None, *detached)
                return weight_gradient(handle, whole, x)

            postponed = handle is not None and handle.keep_wgrad(write)
            weight_grad = None if postponed else write()
        return x_grad, None, None, None, weight_grad
