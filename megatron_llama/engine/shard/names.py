"""The names of a module's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from torch import nn

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Attributes under which torch.compile and torch's checkpoint wrapper keep the wrapped module."""


@cache
def clean_name(name: str) -> str:
    """Return a parameter's name without the wrappers of torch.compile and of checkpointing: the
    name that it has in torch.distributed.checkpoint and in the unwrapped module."""
    return ".".join(attribute for attribute in name.split(".") if attribute not in WRAPPERS)


ParameterNames = Mapping[nn.Parameter, tuple[str, ...]]
"""All names of each parameter of a model, clean, in the order of registration."""


def parameter_names(model: nn.Module) -> ParameterNames:
    """Return all names of each parameter: a shared parameter has several. The first one, which is
    that of ``named_parameters``, is the parameter's name everywhere in the engine."""
    names: dict[nn.Parameter, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter] = (*names.get(parameter, ()), clean_name(name))
    return names
