"""nn.Linear of a user's model in FP8 (``shard(fp8=)``). Imported where it is asked for.

Forward products and input gradients are in FP8, by a recipe that another room offers
(``hooks.py``). The rest of a layer is that of ``linear.py``. Chosen are layers that are exactly an
nn.Linear in a unit; everything else with a matrix of its own stays as it is, and a warning names
it. A chosen layer never falls back to a product of torch: where plain torch would be needed, it
raises.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_llama.engine.param_handle import param_handle_of
from megatron_llama.engine.shard.accesses import PassError
from megatron_llama.engine.shard.linear import AttachedLinears, Linear, mark_called, was_called
from megatron_llama.engine.shard.names import ParameterNames, clean_name
from megatron_llama.engine.shard.placeholders import arrived
from megatron_llama.engine.shard.specs import ModuleUnit, own_dtypes
from megatron_llama.engine.shard.values import named
from megatron_llama.errors import ConfigError, counted, describe, listing
from megatron_llama.hooks import fp8_recipes

Except = str | nn.Module | Iterable[str | nn.Module]
"""Which layers stay as they are: names of modules, patterns of names, modules."""
BASE = "base_layer"
"""The child of an adapter (of peft) that is the layer which it adapts."""
EXCEPTED = "in fp8_except"


class CodedProducts(Protocol):
    """Products of x or grad [rows, ...] by weights [n, k] of the engine, which have been waited
    for."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x [rows, k] by the weight, and add bias [n]: bf16, [rows, n]."""

    def gradient(self, grad: Tensor) -> Any:
        """Return what ``linear_backward`` takes of the gradient [rows, n] of an output."""

    def linear_backward(self, grad: Any, weight: Tensor) -> Tensor:
        """Return the gradient [rows, k] of the input."""


class Recipe(Protocol):
    """A way of making codes, for one model."""

    @property
    def multiple(self) -> int:
        """The number that divides inputs and outputs of a layer."""

    @property
    def products(self) -> Callable[[], CodedProducts]:
        """Makes the products of a process."""

    def refusal(self, device: torch.device, where: str) -> str | None:
        """Return why a device cannot multiply so; None if it can. ``where`` is how it was asked
        for."""

    def warning(self, device: torch.device, where: str) -> str | None:
        """Return what is unusual on a device that can; None: nothing."""


class FP8Layers:
    """The layers that the arguments ``fp8`` and ``fp8_except`` of ``shard`` mean."""

    def __init__(self, model: nn.Module, recipe: str, excepted: Except) -> None:
        """Raises TypeError for what can name no module."""
        self._where = f"fp8={recipe!r}"
        self._recipe: Recipe = fp8_recipes()[recipe]()
        self._names = {module: clean_name(name) for name, module in model.named_modules()}
        self.excepted: list[str] = []
        """Names of modules that the user leaves out."""
        self._missing: list[str] = []
        """What means no module of this model, in words."""
        self._left_out: set[nn.Module] = set()
        single = isinstance(excepted, str | nn.Module)
        for choice in [excepted] if single else list(excepted):  # type: ignore[arg-type]
            self._leave_out(choice)
        self.layers: dict[nn.Linear, str] = {}
        """The layers in FP8, with their names."""
        self._others: dict[str, list[str]] = {}
        """The other modules that have a matrix of their own, by what keeps them as they are."""

    def _leave_out(self, choice: object) -> None:
        if isinstance(choice, str):
            matched = [m for m, name in self._names.items() if fnmatchcase(name, choice)]
        elif isinstance(choice, nn.Module):
            matched = [choice] if choice in self._names else []
        else:
            raise TypeError(
                f"shard(fp8_except=): got {type(choice).__name__}, expected names or patterns of "
                'modules, or modules; write fp8_except="*.0.mlp" or fp8_except=[model.head]'
            )
        if not matched:
            named_so = isinstance(choice, str)
            self._missing.append(repr(choice) if named_so else f"{type(choice).__name__}(...)")
        self.excepted += [self._names[module] for module in matched]
        self._left_out |= {below for module in matched for below in module.modules()}

    def choose(
        self, units: Sequence[ModuleUnit], names: ParameterNames, compute_dtype: torch.dtype | None
    ) -> Iterator[str]:
        """Choose the layers. Yields what is wrong. ``names`` has the parameters of the engine,
        ``compute_dtype`` is that of parameters whose units have none of their own."""
        for text in self._missing:
            yield describe(
                "fp8_except",
                got=f"{text}, which is no module of the model",
                expected="names or patterns of modules, or modules of the model",
                do="mend it, as model.named_modules() has the names",
            )
        in_units = {module for unit in units if not unit.is_root_part for module in unit.owned}
        dtypes = own_dtypes(units)
        adapters = set(self._beside_base_layers())
        read_past = {
            layer
            for module in self._names
            if isinstance(module, nn.TransformerEncoderLayer)
            for layer in (module.linear1, module.linear2)
        }
        for module, name in self._names.items():
            own = [held for held in module._parameters.values() if held is not None]
            if not any(held.dim() > 1 for held in own):
                continue
            reason = (
                EXCEPTED
                if module in self._left_out
                else _class_problem(module)
                or _weight_problem(module, names, dtypes, compute_dtype)
                or ("an adapter" if module in adapters else None)
                or ("outside of units" if module not in in_units else None)
                or (
                    "read past the layer in evaluation, by nn.TransformerEncoderLayer"
                    if module in read_past
                    else None
                )
                or _size_problem(module, self._recipe.multiple)
            )
            if reason is None:
                assert isinstance(module, nn.Linear)
                self.layers[module] = name
            else:
                self._others.setdefault(reason, []).append(name)
        if not self.layers:
            yield describe(
                self._where,
                got=f"no layer to multiply so: {self._listed(self._others)}",
                expected="an nn.Linear in a unit, in torch.bfloat16, with inputs and outputs that "
                f"are multiples of {self._recipe.multiple}",
                do="give shard(units=) and shard(dtype=torch.bfloat16), or leave fp8 out",
            )

    def _beside_base_layers(self) -> Iterator[nn.Module]:
        for module in self._names:
            base = module._modules.get(BASE)
            if base is not None:
                inside = set(base.modules())
                yield from (below for below in module.modules() if below not in inside)

    def _listed(self, others: Mapping[str, Sequence[str]]) -> str:
        return "; ".join(f"{why}: {_patterns(names)}" for why, names in others.items()) or "none"

    def require_device(self, device: torch.device) -> None:
        """Raise ConfigError where a device cannot multiply so."""
        problem = self._recipe.refusal(device, self._where)
        if problem is not None:
            raise ConfigError(listing("shard:", [problem]))

    def warn(self, device: torch.device) -> None:
        """Warn of what stays as it is, and of a device that emulates."""
        others = {why: names for why, names in self._others.items() if why != EXCEPTED}
        if others:
            warnings.warn(
                describe(
                    f"shard({self._where})",
                    got=f"what stays as it is: {self._listed(others)}",
                    expected=f"to be told: {counted(len(self.layers), 'nn.Linear', 'nn.Linear')} "
                    "multiply in FP8",
                    do="name what is to stay in fp8_except, which ends this warning",
                ),
                stacklevel=4,
            )
        emulated = self._recipe.warning(device, f"shard({self._where})")
        if emulated is not None:
            warnings.warn(emulated, stacklevel=4)

    def attach(self, model: nn.Module) -> FP8Linears:
        """Let the layers multiply in FP8, and the other nn.Linear as ever."""
        return FP8Linears(model, self.layers, self._recipe.products())


class FP8Linears(AttachedLinears):
    """``AttachedLinears`` of which some multiply in FP8."""

    def __init__(
        self, model: nn.Module, layers: Mapping[nn.Linear, str], products: CodedProducts
    ) -> None:
        self._layers = layers
        hidden = partial(torch.compiler.disable, reason="shard(fp8=) multiplies outside of graphs")
        super().__init__(
            model,
            {
                layer: hidden(partial(_forward, layer, name, _Rows(products)))
                for layer, name in layers.items()
            },
        )

    def end_first_step(self) -> None:
        """Warn of layers that no pass has called: what reads their weights multiplies in bf16."""
        idle = [name for layer, name in self._layers.items() if not was_called(layer)]
        if idle:
            warnings.warn(
                describe(
                    f"shard(fp8=): {named(idle)}",
                    got="no call in the first step",
                    expected="calls of the layers: a model that reads their weights itself "
                    "multiplies in bf16",
                    do="call the layers, or name these in fp8_except",
                ),
                stacklevel=3,
            )


def _patterns(names: Iterable[str]) -> str:
    """Return all names; those that differ in their numbers as one, with a star for each number and
    how many they are."""
    alike: dict[str, list[str]] = {}
    for name in names:
        pattern = ".".join("*" if word.isdigit() else word for word in name.split("."))
        alike.setdefault(pattern, []).append(name or "the model")
    return ", ".join(
        only[0] if len(only) == 1 else f"{pattern} ({len(only)})" for pattern, only in alike.items()
    )


def _class_problem(module: nn.Module) -> str | None:
    if type(module) is not nn.Linear:
        return type(module).__name__
    return "a replaced forward" if "forward" in vars(module) else None


def _weight_problem(
    module: nn.Module,
    names: ParameterNames,
    dtypes: Mapping[str, torch.dtype],
    compute_dtype: torch.dtype | None,
) -> str | None:
    weight = module._parameters.get("weight")
    if weight is None:
        return "a weight made by a hook"
    if weight not in names:
        return "ignored"
    if isinstance(weight, DTensor):
        return "a part of a DTensor"
    dtype = dtypes.get(names[weight][0], compute_dtype)
    return None if dtype == torch.bfloat16 else f"in {dtype}"


def _size_problem(module: nn.Module, multiple: int) -> str | None:
    assert isinstance(module, nn.Linear)
    if module.in_features % multiple or module.out_features % multiple:
        return f"inputs or outputs no multiples of {multiple}"
    return None


class _Rows:
    """Products of tensors of any shape."""

    def __init__(self, products: CodedProducts) -> None:
        self._products = products

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._by_rows(partial(self._products.linear, bias=bias), x, weight, weight.shape[0])

    def linear_backward(self, grad: Tensor, weight: Tensor) -> Tensor:
        return self._by_rows(self._backward, grad, weight, weight.shape[1])

    def _backward(self, grad: Tensor, weight: Tensor) -> Tensor:
        return self._products.linear_backward(self._products.gradient(grad), weight)

    def _by_rows(
        self, multiply: Callable[..., Tensor], x: Tensor, weight: Tensor, width: int
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        # No expert's token has a scale.
        out = multiply(rows, weight) if len(rows) else rows.new_empty(0, width)
        # Not a view to autograd: users change outputs in place.
        result: Tensor = torch.ops.aten._unsafe_view(out, [*x.shape[:-1], width])
        return result


def _forward(layer: nn.Linear, name: str, products: _Rows, input: Tensor) -> Tensor:
    mark_called(layer)
    weight = arrived(layer.weight)
    bias = None if layer.bias is None else arrived(layer.bias)
    strange = _strange(weight, input)
    if strange is not None:
        raise PassError(
            name,
            got=strange,
            expected="a plain tensor in torch.bfloat16, and the engine's weight, with fp8",
            do="call the layer so, or name it in fp8_except",
        )
    out: Tensor = Linear.apply(input, weight, bias, products)  # type: ignore[no-untyped-call]
    return out


def _strange(weight: Tensor, input: Tensor) -> str | None:
    """Return what a product in FP8 cannot be made of, where a layer in bf16 would leave the product
    to plain torch; None for nothing."""
    if param_handle_of(weight) is None or type(weight) is not nn.Parameter:
        return "another tensor in the place of its weight"
    if type(input) is not Tensor and type(input) is not nn.Parameter:
        return f"a {type(input).__name__}"
    if torch.is_autocast_enabled(input.device.type):
        return "a call under torch.autocast"
    if torch._C._are_functorch_transforms_active():
        return "a call under torch.func"
    if torch._C._get_tracing_state() is not None:
        return "a call under torch.jit.trace"
    return None if input.dtype == torch.bfloat16 else f"an input in {input.dtype}"
