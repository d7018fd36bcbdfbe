"""The object that a module holds in place of a parameter whose values may not be read.

Outside of a forward or backward pass a parameter exists as shards, and its place in the slots holds
old values, half of the new ones, or another unit. So modules hold a placeholder then: it has the
shape, dtype and device of the parameter and no memory, and whatever needs values raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from megatron_llama.errors import UserError

_ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "requires_grad", "ndim", "itemsize", "nbytes"),
    *("grad_fn", "retains_grad", "output_nr"),
    *(name for name in dir(Tensor) if name.startswith("is_")),
)
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "get_device"),
    *("is_floating_point", "is_complex", "is_signed", "is_contiguous", "storage_offset"),
    *("is_inference", "__hash__"),
)
_ALLOWED = frozenset(
    {
        *(
            getattr(Tensor, name).__get__
            for name in _ATTRIBUTES
            if not callable(getattr(Tensor, name))
        ),
        *(getattr(Tensor, name) for name in _METHODS),
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    }
)
"""Functions that are answered without values."""
_SETS_REQUIRES_GRAD = frozenset(
    {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
)
Resolve = Callable[["Placeholder"], nn.Parameter | None]
"""Returns the parameter itself if it may be read now."""
AskToTrain = Callable[[str, bool], None]
"""Notes that a parameter, by name, shall be trained from now on, or not."""


class ShardedParameterError(UserError, RuntimeError):
    """Something needs the values or the gradient of a parameter that is sharded at the moment."""


@dataclass(frozen=True)
class Absence:
    """Why a parameter has no values here, for messages."""

    state: str
    """``while it is ...``"""
    do: str


SHARDED = Absence("sharded", "read or write parameters inside engine.gathered()")
NOT_CHOSEN = Absence(
    "not among those that engine.gathered(only=) names", "add it to only=, or leave only= out"
)
ON_RANK_0 = Absence(
    "whole on rank 0 only", "read or write it on rank 0, or gather without rank0=True"
)


class Placeholder(nn.Parameter):
    """A parameter without values: ``shape``, ``dtype``, ``device``, ``numel()`` and
    ``requires_grad`` are those of the parameter, ``requires_grad_`` is noted for the next pass, and
    everything else raises ``ShardedParameterError``.

    While the model runs, a parameter that has a slot of its own may be read anywhere in it (a tied
    weight, a weight that another module reads): then the operation gets the parameter itself."""

    parameter_name: str
    """For messages."""
    absence: Absence
    _resolve: Resolve
    _ask_to_train: AskToTrain | None

    @staticmethod
    def __new__(
        cls,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        resolve: Resolve,
        *,
        requires_grad: bool,
        ask_to_train: AskToTrain | None = None,
        absence: Absence = SHARDED,
    ) -> Placeholder:
        """Make the placeholder of one parameter; ``resolve`` is asked before anything is
        refused."""
        # It has no storage: a placeholder of a large matrix costs as little as one of a vector.
        made: Placeholder = Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=dtype, device=device, requires_grad=requires_grad
        )
        made.parameter_name = name
        made.absence = absence
        made._resolve = resolve
        made._ask_to_train = ask_to_train
        made._is_param = True
        return made

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Everything is done by ``__new__``."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            described = f"{self.parameter_name}, {tuple(self.shape)}, {self.dtype}"
            return f"Placeholder({described}: {self.absence.state})"

    def __deepcopy__(self, memo: object) -> Placeholder:
        raise _refused(self, "a copy")

    def __reduce_ex__(self, protocol: object) -> Any:
        raise _refused(self, "pickling")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # Libraries ask shapes and devices all the time, also of modules that do not run.
        if func in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _SETS_REQUIRES_GRAD and args[0]._ask_to_train is not None:
            placeholder = args[0]
            trained = bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
            placeholder._ask_to_train(placeholder.parameter_name, trained)
            with torch._C.DisableTorchFunctionSubclass():
                return func(placeholder, trained)
        return func(
            *(_resolved(value, func) for value in args),
            **{name: _resolved(value, func) for name, value in kwargs.items()},
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Operators that come below ``__torch_function__``, as those that C++ calls.
        placeholder = next(value for value in args if isinstance(value, Placeholder))
        raise _refused(placeholder, str(func))


def arrived(parameter: Tensor) -> Tensor:
    """Return the parameter itself, also where a placeholder stands for it. Raises
    ShardedParameterError if it may not be read now."""
    if not isinstance(parameter, Placeholder):
        return parameter
    resolved: Tensor = _resolved(parameter, linear)
    return resolved


def _resolved(value: Any, func: Callable[..., Any]) -> Any:
    """Return an argument with the parameters themselves in it. Raises ShardedParameterError."""
    if isinstance(value, Placeholder):
        parameter = value._resolve(value)
        if parameter is None:
            raise _refused(value, _described(func))
        return parameter
    if isinstance(value, list | tuple):
        return type(value)(_resolved(element, func) for element in value)
    return value


def _described(func: Callable[..., Any]) -> str:
    """Return the name of a function of torch, or of the property that it reads or sets."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        attribute = func.__self__.__name__  # type: ignore[attr-defined]
        return f"{attribute} = ..." if name == "__set__" else str(attribute)
    return str(name)


def _refused(placeholder: Placeholder, what: str) -> ShardedParameterError:
    if what in ("grad", "grad = ..."):
        do = "gradients live in the engine: clip with shard(clip=), read result.grad_norm"
    elif what in ("requires_grad_", "requires_grad = ..."):
        do = "freeze parameters outside of engine.gathered()"
    else:
        do = placeholder.absence.do
    return ShardedParameterError(
        placeholder.parameter_name,
        got=f"{what} while it is {placeholder.absence.state}",
        expected="a call inside of the model",
        do=do,
    )
