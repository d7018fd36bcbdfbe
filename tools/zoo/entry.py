"""A model of the zoo: how it is built, what it reads, and what its loss is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Generator, Tensor, nn

Inputs = Mapping[str, Tensor]
"""The arguments of a model's forward pass by name, and ``target``, which only the loss reads."""


def own_loss(output: Any, inputs: Inputs) -> Tensor:
    """Return the loss that a model computes itself, as those of transformers do."""
    loss: Tensor = output.loss
    return loss


@dataclass(frozen=True)
class Entry:
    """A model of the zoo."""

    package: str
    """The package that has it; empty for a model of our own."""
    build: Callable[[], nn.Module]
    inputs: Callable[[Generator], Inputs]
    """Draws a microbatch."""
    units: tuple[str, ...]
    """The names of the classes of its units."""
    loss: Callable[[Any, Inputs], Tensor] = own_loss
    """Of what the model returns."""
    eps: float = 1e-8
    """Of AdamW. Batch norm of few numbers makes rounding large, and AdamW with a small eps as large
    as a step: a larger one leaves something to compare."""
    frozen: tuple[str, ...] = ()
    """Patterns of the names of parameters that this use of the model gives no gradient. DDP and
    ``shard`` alike want them frozen."""

    def is_unit(self, module: nn.Module) -> bool:
        """Whether a module is a unit."""
        return type(module).__name__ in self.units


def built(package: str, model: str, config: str = "", /, **sizes: Any) -> Callable[[], nn.Module]:
    """Return what builds a model by the name of its class, from its configuration if it has a class
    of its own. The package is imported when the model is built."""

    def build() -> nn.Module:
        module = import_module(package)
        if not config:
            return getattr(module, model)(**sizes)  # type: ignore[no-any-return]
        return getattr(module, model)(getattr(module, config)(**sizes))  # type: ignore[no-any-return]

    return build


def noise(*shape: int) -> Callable[[Generator], Tensor]:
    """Return what draws a tensor of normal numbers."""
    return lambda generator: torch.randn(shape, generator=generator)


def numbers(limit: int, *shape: int, first: int = 0) -> Callable[[Generator], Tensor]:
    """Return what draws integers from ``first`` up to below ``limit``."""
    return lambda generator: torch.randint(first, limit, shape, generator=generator)


def drawn(**fields: Callable[[Generator], Tensor]) -> Callable[[Generator], Inputs]:
    """Return what draws each field by its own function, in this order."""
    return lambda generator: {name: draw(generator) for name, draw in fields.items()}
