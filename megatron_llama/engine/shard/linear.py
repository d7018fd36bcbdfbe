"""nn.Linear whose weight and bias gradients are written straight into the engine's slots.

Autograd would make the weight gradient in memory of its own, from which it is then copied: of n
elements n written, n read and n written, and room for n. Here the product itself writes the slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from types import MappingProxyType, MethodType
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_llama.engine.param_handle import accumulate_product, param_handle_of, wait_unsharded
from megatron_llama.engine.shard.placeholders import arrived
from megatron_llama.engine.tensors import accumulate
from megatron_llama.errors import TrainingError

Forward = Callable[[Tensor], Tensor]
NO_FORWARDS: Mapping[nn.Linear, Forward] = MappingProxyType({})
_CALLED = "_megatron_llama_called"
"""In an attached module that has been called outside of a compiled region."""


class OtherProducts(Protocol):
    """Products of a layer that are not torch's, of tensors of any shape."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output of a layer."""

    def linear_backward(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of its input."""


class AttachedLinears:
    """The modules of a model that are exactly an nn.Linear, and that give their gradients to the
    handles of their parameters.

    Each gets a ``forward`` of its own, which falls back to F.linear wherever plain torch is needed
    (``_needs_plain_torch``). Modules with a replaced ``forward`` are left as they are, and so are
    subclasses and parametrized layers."""

    def __init__(
        self, model: nn.Module, forwards: Mapping[nn.Linear, Forward] = NO_FORWARDS
    ) -> None:
        """Find them and attach them. ``forwards`` has those of layers that get others."""
        # On the instance: the class serves other models too. A compiler that has seen a forward
        # compiles again for another one, so each module keeps the same.
        self._forwards: dict[nn.Module, Forward] = {
            module: forwards.get(module) or MethodType(_forward, module)
            for module in model.modules()
            if type(module) is nn.Linear and "forward" not in vars(module)
        }
        self.attach()

    def attach(self) -> None:
        """Let them give their gradients to the engine."""
        for module, forward in self._forwards.items():
            # It may have got another one meanwhile.
            if "forward" not in vars(module):
                module.forward = forward

    def detach(self) -> None:
        """Make them the plain layers that they were, until ``attach``."""
        for module, forward in self._forwards.items():
            # A replacement since then may still call ours, which does no harm.
            if vars(module).get("forward") is forward:
                del module.forward
            vars(module).pop(_CALLED, None)

    def end_first_step(self) -> None:
        """Look at the layers when the first step is over."""


def mark_called(module: nn.Module) -> None:
    """Note that a layer has been called, and has asked for its parameters."""
    vars(module)[_CALLED] = True


def was_called(module: nn.Module) -> bool:
    """Whether ``mark_called`` has noted a call."""
    return _CALLED in vars(module)


def waits_itself(module: nn.Module, leaf: str) -> bool:
    """Whether a parameter of a module is one that ``_forward`` has read in a call: its module may
    be called before the parameter is there."""
    return was_called(module) and leaf in ("weight", "bias")


def _forward(module: nn.Linear, input: Tensor) -> Tensor:
    # First of all, so that a compiler sees F.linear and nothing else.
    if torch.compiler.is_compiling():
        return F.linear(input, module.weight, module.bias)
    mark_called(module)
    weight = arrived(module.weight)
    bias = None if module.bias is None else arrived(module.bias)
    if _needs_plain_torch(weight, input):
        return F.linear(input, weight, bias)
    out = Linear.apply(input, weight, bias)  # type: ignore[no-untyped-call]
    return cast(Tensor, out)


def _needs_plain_torch(weight: Tensor, input: Tensor) -> bool:
    """Whether autograd has to see the product: no gradient is asked for, the engine does not have
    the weight (a forward pre-hook may have put a tensor in its place), the weight is a DTensor, or
    something transforms what is computed: autocast, torch.func, torch.jit.trace, a subclass of
    Tensor."""
    return (
        not (torch.is_grad_enabled() and weight.requires_grad)
        or param_handle_of(weight) is None
        or type(weight) is not nn.Parameter
        or type(input) is not Tensor
        or torch.is_autocast_enabled(input.device.type)
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
    )


class Linear(torch.autograd.Function):
    """F.linear whose weight and bias gradients go to the handles of the parameters. The other
    products are torch's, or ``products`` makes them."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        products: OtherProducts | None = None,
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.products = products
        ctx.read = wait_unsharded(weight)
        ctx.parameters = (weight, bias)  # for their hooks; a checkpoint saves a copy of the weight
        if products is not None:
            return products.linear(input, weight, bias)
        out = F.linear(input, weight, bias)
        # Not a view to autograd, which refuses to have one changed in place, as users do.
        return torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        # A unit's hook has waited. But a loss may reach this layer through a tensor that is no
        # output of its unit; then the slot may hold another bucket, and this raises.
        ctx.read.check()
        input_grad = _input_grad(ctx, grad, weight) if ctx.needs_input_grad[0] else None
        left = grad.reshape(-1, grad.shape[-1])
        weight_grad = bias_grad = None
        weight_use = _use(ctx, 1)
        if weight_use is not _Use.NONE:
            right = input.reshape(-1, input.shape[-1])
            if weight_use is _Use.ACCUMULATED:
                view, beta = ctx.read.handle.grad_view()
                if view.dtype == right.dtype:
                    # The product that autograd computes, so its bits. On some CPUs
                    # ``accumulate_product`` would take oneDNN's, at up to 14 % more time here.
                    torch.addmm(view, left.t(), right, beta=beta, out=view)
                else:
                    accumulate_product(view, beta, left.t(), right)
                ctx.read.handle.grad_written()
            else:
                weight_grad = left.t() @ right
        bias_use = _use(ctx, 2)
        if bias_use is not _Use.NONE:
            bias_grad = left.sum(0)
            bias_handle = param_handle_of(ctx.parameters[1])
            if bias_use is _Use.ACCUMULATED and bias_handle is not None:
                view, beta = bias_handle.grad_view()
                accumulate(view, beta, bias_grad)
                bias_handle.grad_written()
                bias_grad = None
        return input_grad, weight_grad, bias_grad, None


def _input_grad(ctx: Any, grad: Tensor, weight: Tensor) -> Tensor:
    if ctx.products is None:
        return torch.matmul(grad, weight)
    if torch.is_grad_enabled():
        raise TrainingError(
            "backward pass of a layer in FP8",
            got="a gradient that is to be differentiated itself (create_graph=True)",
            expected="gradients that are only used: codes have no derivative",
            do="name the layers of this pass in shard(fp8_except=)",
        )
    # Of the engine's own parameter, whose codes are known.
    input_grad: Tensor = ctx.products.linear_backward(grad, ctx.parameters[0])
    return input_grad


class _Use(Enum):
    """The use of the gradient of an input in this backward pass."""

    NONE = "nothing"
    RETURNED = "autograd takes it"
    ACCUMULATED = "it is added to the input's .grad, so to the engine's slot"


def _use(ctx: Any, index: int) -> _Use:
    """Return the use that autograd has for the gradient of an input. ``needs_input_grad`` does not
    tell: it is that of forward, and torch.autograd.grad and ``backward(inputs=...)`` ask for the
    gradients of some inputs only."""
    if not ctx.needs_input_grad[index]:
        return _Use.NONE
    try:
        executed = torch._C._will_engine_execute_node(ctx.next_functions[index][0])
    except RuntimeError:
        # torch.autograd.grad of this very parameter.
        return _Use.RETURNED
    if not executed:
        return _Use.NONE
    # With create_graph the gradient is to be differentiated itself, and hooks of the parameter
    # (``self.weight.register_hook`` in a user's forward) are to see it.
    seen = torch.is_grad_enabled() or ctx.parameters[index - 1]._backward_hooks
    return _Use.RETURNED if seen else _Use.ACCUMULATED
