"""The functions of ``bodies.py`` through torch's compiler: each becomes one pass over its tensors.

Functions, not layers: what surrounds them (homes of weights, messages, gradients that are put off)
stays as it is, and each compiles in seconds. A compiler is a thing that a machine may lack: then
everything runs as before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_llama.distributed.comm.collectives import all_reduce
from megatron_llama.distributed.mesh import Mesh
from megatron_llama.nn import ops
from megatron_llama.nn.ops import PLAIN, Ops, at_least_fp32

SMALLEST = 2**16
"""Elements of the first tensor below which calling compiled code takes longer than it saves."""
SHAPES = 4
"""Combinations of arguments for which a function is compiled. Training and evaluation have one
each; samples of text have a new one with every token, and run plain."""


class Compiled:
    """A function that is compiled when it is first called, once for each of its first SHAPES
    combinations of shapes."""

    def __init__(self, plain: Callable[..., Any], text: Callable[..., Any]) -> None:
        self._plain = plain
        self._fast = torch.compile(text, dynamic=False, fullgraph=True)
        self._known = set[object]()

    def __call__(self, *args: Any) -> Any:
        """The same as the plain function, but for roundings."""
        if args[0].numel() < SMALLEST:
            return self._plain(*args)
        key = tuple(
            (arg.shape, arg.stride(), arg.dtype) if isinstance(arg, Tensor) else arg for arg in args
        )
        if key not in self._known:
            if len(self._known) == SHAPES:
                return self._plain(*args)
            self._known.add(key)
        return self._fast(*args)


def chosen_ops(mesh: Mesh, *, compiled: bool) -> Ops:
    """What the layers of this process run: with ``compiled`` the compiled functions, if every rank
    can compile. Collective then."""
    if not compiled:
        return PLAIN
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
    return PLAIN


def compiled_ops() -> Ops:
    """What is worth it compiled. Compiling is put off until a function is called."""
    compiled: dict[str, Any] = {
        name: Compiled(getattr(PLAIN, name), text) for name, text in _TEXTS.items()
    }
    return replace(PLAIN, **compiled)


def _swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    gate, up = gate_up.to(at_least_fp32(grad.dtype)).chunk(2, dim=-1)
    share = torch.sigmoid(gate)
    return torch.cat(
        (grad * up * share * (1.0 + gate * (1.0 - share)), grad * gate * share), dim=-1
    ).to(grad.dtype)


def _rotate_back(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    parts = [part.chunk(2, dim=-1) for part in (query, key)]
    turned = [
        torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)
        for first, second in parts
    ]
    return torch.cat((*turned, value), dim=2).to(query.dtype)


_TEXTS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "add_norm": ops.add_norm,
        "norm_backward": ops.norm_backward,
        "rotate": ops.rotate,
        "rotate_back": _rotate_back,
        "swiglu_backward": _swiglu_backward,
    }
)
"""What is compiled for a function of ``bodies.py``: itself, or the same without operators that
write into given places, which compilers do not fuse with others. The two that are missing are not
faster compiled."""


def compiler_problem(device: torch.device) -> str | None:
    """Why nothing can be compiled for the device here; None: a small function was."""
    try:
        torch.compile(torch.neg, fullgraph=True)(torch.zeros(64, device=device))
    except Exception as error:  # whatever compilers raise
        return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return None
