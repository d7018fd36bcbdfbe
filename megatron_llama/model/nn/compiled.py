"""The functions of ``ops.py`` through torch's compiler (``--compile``): each becomes one pass over
its tensors.

Functions are compiled, not layers: parameter handles, collectives and postponed weight gradients
around them stay as they are, and each function compiles in seconds. Where a machine has no working
compiler, the functions run as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_llama.engine.comm.collectives import all_reduce
from megatron_llama.engine.comm.device import is_host
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.tensors import at_least_fp32
from megatron_llama.model.nn import ops
from megatron_llama.model.nn.host.ops import HOST
from megatron_llama.model.nn.ops import PLAIN, Ops

MIN_ELEMENTS = 2**16
"""Elements of the first tensor from which on compiled code saves more than its call costs."""
GELU_SLOPE = math.sqrt(2.0 / math.pi)
GELU_CUBE = 0.044715
"""gelu by tanh is x / 2 * (1 + tanh(GELU_SLOPE * (x + GELU_CUBE * x^3))) (Hendrycks and Gimpel,
2016)."""
MAX_SHAPES = 4
"""Combinations of arguments for which a function is compiled. Training and evaluation have one
each; generated text has a new one with every token, and is not compiled."""


class Compiled:
    """A function that is compiled when it is called, for its first MAX_SHAPES combinations of
    shapes. ``source`` is compiled: the plain function, or one that the compiler fuses better."""

    def __init__(self, plain: Callable[..., Any], source: Callable[..., Any]) -> None:
        self._plain = plain
        self._fast = torch.compile(source, dynamic=False, fullgraph=True)
        self._known = set[object]()

    def __call__(self, *args: Any) -> Any:
        """Compute the same as the plain function, up to rounding."""
        if args[0].numel() < MIN_ELEMENTS:
            return self._plain(*args)
        key = tuple(
            (arg.shape, arg.stride(), arg.dtype) if isinstance(arg, Tensor) else arg for arg in args
        )
        if key not in self._known:
            if len(self._known) == MAX_SHAPES:
                return self._plain(*args)
            self._known.add(key)
        return self._fast(*args)


def chosen_ops(mesh: Mesh, *, compiled: bool) -> Ops:
    """Return the functions that the layers of this process run: with ``compiled`` the compiled
    ones, if every rank can compile, which is collective."""
    plain = HOST if is_host(mesh.device) else PLAIN
    if not compiled:
        return plain
    problem = compiler_problem(mesh.device)
    failed = torch.tensor(float(problem is not None), device=mesh.device)
    all_reduce(failed, mesh.world, dist.ReduceOp.MAX).wait()
    if not failed:
        return compiled_ops()
    if mesh.rank == 0:
        print(
            f" warning: --compile does nothing: {problem or 'another rank cannot compile'}",
            flush=True,
        )
    return plain


def compiled_ops() -> Ops:
    """Return the functions that are faster compiled. Each compiles when it is first called."""
    compiled: dict[str, Any] = {
        name: Compiled(getattr(PLAIN, name), source) for name, source in _SOURCES.items()
    }
    return replace(PLAIN, **compiled)


def _swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.to(at_least_fp32(grad.dtype)).chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    gate_grad = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return torch.cat((gate_grad, grad * gate * sigmoid), dim=-1).to(grad.dtype)


def _geglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.to(at_least_fp32(grad.dtype)).chunk(2, dim=-1)
    # 1 + tanh(u) is 2 sigmoid(2 u), and 1 - sigmoid(z) is sigmoid(-z), which keeps small numbers.
    z = 2.0 * GELU_SLOPE * (gate + GELU_CUBE * gate * gate * gate)
    sigmoid = torch.sigmoid(z)
    slope = 2.0 * GELU_SLOPE * (1.0 + 3.0 * GELU_CUBE * gate * gate) * torch.sigmoid(-z)
    gate_grad = grad * up * sigmoid * (1.0 + gate * slope)
    return torch.cat((gate_grad, grad * gate * sigmoid), dim=-1).to(grad.dtype)


def _rotate_back(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    rotated = []
    for grad in (query, key):
        sizes = [half, half, grad.shape[-1] - 2 * half]
        first, second, rest = torch.split(grad, sizes, dim=-1)
        turned = (first * cos + second * sin, second * cos - first * sin)
        rotated.append(torch.cat((*turned, rest), dim=-1))
    return torch.cat((*rotated, value), dim=2).to(query.dtype)


_SOURCES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "add_norm": ops.add_norm,
        "norm_backward": ops.norm_backward,
        "norm_heads": ops.norm_heads,
        "norm_heads_backward": ops.norm_heads_backward,
        "rotate": ops.rotate,
        "rotate_back": _rotate_back,
        "swiglu_backward": _swiglu_backward,
        "geglu_backward": _geglu_backward,
    }
)
"""The source that is compiled for each function of ``ops.py``: the function itself, or the same
without operators that write into given tensors, which the compiler does not fuse. Gated activations
and cross_entropy are not faster compiled."""


def compiler_problem(device: torch.device) -> str | None:
    """Return why nothing can be compiled for the device; None if a small function could."""
    try:
        torch.compile(torch.neg, fullgraph=True)(torch.zeros(64, device=device))
    except Exception as error:  # whatever compilers raise
        return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return None
