"""Classes of modules whose calls go to the engine first.

The model, its units and its root parts get a class of their own, derived from theirs, whose
``__call__`` comes before everything else: before hooks that users add, sooner or later, before a
compiled forward (``module.compile()``), and before what a library does in ``__call__``. So a unit
is announced once for a call, no hook is inside of a compiled region, and a user's hooks see the
parameters themselves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, nn

from megatron_llama.engine.shard.placeholders import Placeholder, ShardedParameterError

Forward = Callable[..., Any]
"""The call of a module as its class defines it."""
Interceptor = Callable[[Forward, tuple[Any, ...], dict[str, Any]], Any]
_INTERCEPTOR = "_megatron_llama_interceptor"
_REQUIRE_NO_GRADIENT = "_megatron_llama_require_no_gradient"
_LOAD_STATE = "_megatron_llama_load_state"
_REQUIRE_SAVABLE = "_megatron_llama_require_savable"
_OWN = (_INTERCEPTOR, _REQUIRE_NO_GRADIENT, _LOAD_STATE, _REQUIRE_SAVABLE)
"""What the engine keeps in a module."""
_STATE_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
"""Where a module keeps the hooks of ``state.hook_state_dict``."""


class Intercepted(nn.Module):
    """A module whose calls go to the engine first."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module as an access to its weights."""
        return self.__dict__[_INTERCEPTOR](super().__call__, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle the module as it is without an engine. While parameters are sharded their
        placeholders refuse it."""
        # Of later protocols pickle demands that the class is the object's own.
        reduced: Any = super().__reduce_ex__(1)
        make, arguments, *rest = reduced
        plain = type(self).__bases__[1]
        arguments = tuple(plain if argument is type(self) else argument for argument in arguments)
        if rest and isinstance(rest[0], dict):
            rest[0] = {
                name: _without_engine(value) if name in _STATE_HOOKS else value
                for name, value in rest[0].items()
                if name not in _OWN
            }
        return make, arguments, *rest


class InterceptedModel(Intercepted):
    """The model that was given to ``shard``."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Convert the buffers, where ``to`` and its like leave the parameters as they are. Raises
        ShardedParameterError where they would change."""
        # torch would convert placeholder by placeholder, and stop in the middle.
        sharded = [p for p in self.parameters() if isinstance(p, Placeholder)]
        if not sharded:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            return self
        for dtype, device in dict.fromkeys((p.dtype, p.device) for p in sharded):
            converted = fn(torch.empty(0, dtype=dtype, device=device))
            if (converted.dtype, converted.device) != (dtype, device):
                raise ShardedParameterError(
                    "model",
                    got=f"a move to {converted.dtype} on {converted.device}",
                    expected=f"{dtype} on {device}, as in shard()",
                    do="move it before shard(), or give shard(dtype=)",
                )
        for module in self.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else fn(buffer)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: each step starts with the gradients of its own backward passes. Those of
        parameters that ``shard`` was told to ignore are the user's, and are zeroed. Raises
        TrainingError between a backward pass and its step, where ``engine.discard`` throws
        gradients away."""
        self.__dict__[_REQUIRE_NO_GRADIENT]("model.zero_grad")
        for parameter in self.parameters():
            if not isinstance(parameter, Placeholder) and parameter.grad is not None:
                if set_to_none:
                    parameter.grad = None
                else:
                    parameter.grad = torch.zeros_like(parameter.grad)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Take over the values of a state dict by ``engine.load_state_dict``, whatever ``assign``
        is, or as torch does where the parameters are whole."""
        loaded = self.__dict__[_LOAD_STATE](state_dict, strict=strict)
        return super().load_state_dict(state_dict, strict, assign) if loaded is None else loaded


def _save_pretrained(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Save whole parameters as the model's class does. Raises ShardedParameterError, before
    anything is written, where it would save a part of them."""
    model.__dict__[_REQUIRE_SAVABLE](kwargs)
    return super(type(model), model).save_pretrained(*args, **kwargs)  # type: ignore[misc]


def _without_engine(hooks: Mapping[int, Any]) -> OrderedDict[int, Any]:
    """Return the hooks that are not of this room."""
    room = __name__.rpartition(".")[0]
    others = (
        (number, hook)
        for number, hook in hooks.items()
        if not getattr(hook, "__module__", "").startswith(room)
    )
    return OrderedDict(others)


@cache
def _intercepted(base: type[nn.Module], mixin: type[Intercepted]) -> type[nn.Module]:
    """Return the class of modules of class ``base`` whose calls go to the engine."""
    names: dict[str, Any] = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    # Libraries look whether a model has it.
    if mixin is InterceptedModel and hasattr(base, "save_pretrained"):
        names["save_pretrained"] = _save_pretrained
    return type(base.__name__, (mixin, base), names)


def intercept(module: nn.Module, interceptor: Interceptor) -> None:
    """Let calls of a module go to ``interceptor(forward, args, kwargs)``."""
    # Past ``nn.Module.__setattr__``, and so past any that a user's class has.
    object.__setattr__(module, _INTERCEPTOR, interceptor)
    module.__class__ = _intercepted(type(module), Intercepted)  # type: ignore[arg-type]


def intercept_model(
    model: nn.Module, interceptor: Interceptor, *, require_no_gradient: Callable[[str], None]
) -> None:
    """Let calls of the model that was given to ``shard`` go to ``interceptor(forward, args,
    kwargs)``. ``require_no_gradient(what)`` raises where gradients wait for a step."""
    object.__setattr__(model, _INTERCEPTOR, interceptor)
    object.__setattr__(model, _REQUIRE_NO_GRADIENT, require_no_gradient)
    model.__class__ = _intercepted(type(model), InterceptedModel)  # type: ignore[arg-type]


def intercept_states(
    model: nn.Module,
    *,
    load_state: Callable[..., Any],
    require_savable: Callable[[Mapping[str, Any]], None],
) -> None:
    """Let ``load_state_dict`` of the model that was given to ``shard`` go to
    ``load_state(state, strict=)`` first, which returns None where the parameters are whole.
    ``require_savable(keywords)`` raises where ``save_pretrained`` would save parts."""
    object.__setattr__(model, _LOAD_STATE, load_state)
    object.__setattr__(model, _REQUIRE_SAVABLE, require_savable)
