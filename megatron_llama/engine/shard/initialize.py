"""The first values of what was on the meta device: a function of the user makes them, unit by unit.

Imported where it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch
from torch import nn

from megatron_llama.engine.shard.values import ModuleValues, named
from megatron_llama.errors import ConfigError


def initialize(
    values: ModuleValues,
    units: Collection[nn.Module],
    fn: Callable[[nn.Module], object] | None = None,
) -> None:
    """Give values to everything that has none: call ``fn`` for every module, in the order of
    ``model.apply(fn)``, while the parameters of its unit are whole, in the dtype of the masters.
    What rank 0 computes counts on all ranks; what has values keeps them. Collective.

    Without ``fn`` a model of transformers uses its ``_init_weights``, and other modules use their
    ``reset_parameters``. ``units`` are the modules that are gathered together: only one of them is
    whole at a time. Raises ConfigError, on all ranks, for what ``fn`` has left without values."""
    values.engine.settle()
    fn = fn or _default_initialization(values.model)
    wanted = frozenset(values.uninitialized)
    for modules in _parts(values.model, units):
        names = [n for n in values.aliases if any(m in modules for m, _ in values.places(n))]
        buffers = [n for n, (module, _, _) in values.buffers().items() if module in modules]
        # Most buffers are not parameters' neighbours but constants: what has values stays.
        missing = wanted.intersection((*names, *buffers))
        if missing:
            # A function for a module sets all that it has.
            ignored = {
                held: held.detach().clone()
                for held in values.ignored.values()
                if any(held is own for module in modules for own in module._parameters.values())
            }
            with values.changing(names, wanted.intersection(buffers), missing), torch.no_grad():
                for module in modules:
                    fn(module)
            with torch.no_grad():
                for held, value in ignored.items():
                    held.copy_(value)
    values.engine.publish()
    if values.uninitialized:
        raise ConfigError(
            "engine.initialize",
            got=f"no values of {named(values.uninitialized)}",
            expected="values of all parameters and buffers",
            do="give engine.initialize a function that sets them, module by module",
        )


def _parts(root: nn.Module, units: Collection[nn.Module]) -> Iterator[list[nn.Module]]:
    """Yield the modules that are initialized together, in the order of ``apply``: a unit or a
    module without units in it with all that is in it, and of other modules each for itself."""
    if root in units or not any(below in units for below in root.modules()):
        together: list[nn.Module] = []
        root.apply(together.append)
        yield together
        return
    for child in root.children():
        yield from _parts(child, units)
    yield [root]


def _default_initialization(model: nn.Module) -> Callable[[nn.Module], object]:
    """Return what ``initialize`` calls where the user gives nothing."""
    initializers: dict[nn.Module, Callable[[nn.Module], object]] = {}
    # Outer modules first, so that the innermost model of transformers counts: an encoder has
    # initial values of its own.
    for module in model.modules():
        own = getattr(module, "_init_weights", None)
        if callable(own):
            initializers |= dict.fromkeys(module.modules(), own)

    def initialize_module(module: nn.Module) -> None:
        # nn.MultiheadAttention and nn.Transformer have it with an underscore.
        names = ("reset_parameters", "_reset_parameters")
        candidates = (getattr(module, name, None) for name in names)
        if module in initializers:
            initializers[module](module)
        else:
            reset = next((candidate for candidate in candidates if callable(candidate)), None)
            if reset is not None:
                reset()

    return initialize_module
