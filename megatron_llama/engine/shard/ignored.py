"""The parameters of a model that ``shard`` leaves as they are."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

import torch
from torch import nn

from megatron_llama.engine.shard.names import ParameterNames
from megatron_llama.engine.shard.values import ModuleValues, named
from megatron_llama.errors import describe

Ignored = str | nn.Module | nn.Parameter | Iterable[str | nn.Module | nn.Parameter]
"""Which parameters are left as they are: names, patterns of names, modules, parameters."""
RANK0 = "rank0"
OWN = "own"
WHOSE_VALUES = (RANK0, OWN)


class IgnoredParameters:
    """The parameters that the argument ``ignored`` means, and what is wrong with it."""

    def __init__(self, ignored: Ignored, names: ParameterNames, *, own_values: bool) -> None:
        """``names`` has all parameters of the model. ``own_values`` says whether each rank has
        values of its own. Raises TypeError for what can mean no parameter."""
        self.own_values = own_values
        self.parameters: dict[str, nn.Parameter] = {}
        """By name, in the order of the model."""
        self._without: list[str] = []
        """What means no parameter of this model, in words."""
        chosen: set[nn.Parameter] = set()
        single = isinstance(ignored, str | nn.Module | nn.Parameter)
        for choice in [ignored] if single else list(ignored):  # type: ignore[arg-type]
            matched, text = _matches(choice, names)
            if not matched:
                self._without.append(text)
            chosen |= matched
        for parameter, (name, *_) in names.items():
            if parameter in chosen:
                self.parameters[name] = parameter
        self._names = names

    def without(self, names: ParameterNames) -> ParameterNames:
        """Return the names of the other parameters."""
        ignored = set(self.parameters.values())
        return {parameter: own for parameter, own in names.items() if parameter not in ignored}

    def aliases(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield all names of each of these parameters."""
        for parameter in self.parameters.values():
            for name in self._names[parameter]:
                yield name, parameter

    def problems(self, optimizer: object) -> Iterator[str]:
        """Yield what is wrong with them. ``optimizer`` is that of ``shard``."""
        for text in self._without:
            first = next((own[0] for own in self._names.values()), "none")
            yield describe(
                "ignored",
                got=f"{text}, which is no parameter of the model",
                expected="names or patterns of parameters, modules or parameters of the model",
                do=f"mend it (a name of this model is {first})",
            )
        if self.parameters and len(self.parameters) == len(self._names):
            yield describe(
                "ignored", got="all parameters", expected="some", do="leave some to the engine"
            )
        for name, parameter in self.parameters.items():
            if parameter.is_meta:
                yield describe(
                    name,
                    got="an ignored parameter on the meta device",
                    expected="values: the engine neither makes nor loads them",
                    do="build its module on a device",
                )
            elif type(parameter) is not nn.Parameter and not self.own_values:
                yield describe(
                    name,
                    got=f"an ignored {type(parameter).__name__}, whose values cannot be sent",
                    expected="a plain nn.Parameter where rank 0's values count",
                    do=f"give shard(ignored_values={OWN!r}), and load the same on all ranks",
                )
        if isinstance(optimizer, torch.optim.Optimizer):
            ids = {id(parameter): name for name, parameter in self.parameters.items()}
            listed = {
                ids[id(given)]
                for group in optimizer.param_groups
                for given in group["params"]
                if id(given) in ids
            }
            if listed:
                yield describe(
                    "optimizer",
                    got=f"ignored parameters: {named(listed)}",
                    expected="those that the engine updates",
                    do="give what is ignored an optimizer of its own",
                )

    def warn_of_gradients(self) -> None:
        """Warn of parameters that are trained, which nothing here reduces or updates."""
        trained = [name for name, held in self.parameters.items() if held.requires_grad]
        if trained:
            warnings.warn(
                describe(
                    f"shard: {named(trained)}",
                    got="ignored parameters that require gradients",
                    expected="to be told: their .grad is that of this rank alone, and no step of "
                    "the engine uses it",
                    do="reduce and update them yourself, or freeze them",
                ),
                stacklevel=3,
            )

    def share(self, values: ModuleValues) -> None:
        """Let the values of rank 0 be those of all ranks, unless each has its own. Collective."""
        if self.own_values:
            return
        with torch.no_grad():
            for parameter in self.parameters.values():
                whole = torch.empty(
                    parameter.numel(), dtype=parameter.dtype, device=parameter.device
                )
                for start, piece in values.broadcast(parameter):
                    whole[start : start + len(piece)].copy_(piece)
                if values.engine.mesh.dp.rank:
                    parameter.copy_(whole.view(parameter.shape))


def _matches(choice: object, names: ParameterNames) -> tuple[set[nn.Parameter], str]:
    """Return the parameters of the model that a choice means, and its words in messages."""
    if isinstance(choice, nn.Parameter):
        text = f"a parameter of {tuple(choice.shape)}"
        return ({choice} if choice in names else set()), text
    if isinstance(choice, nn.Module):
        own = set(choice.parameters())
        return {held for held in names if held in own}, f"{type(choice).__name__}(...)"
    if isinstance(choice, str):
        matched = {
            held
            for held, all_names in names.items()
            if any(fnmatchcase(n, choice) for n in all_names)
        }
        return matched, repr(choice)
    raise TypeError(
        f"shard(ignored=): got {type(choice).__name__}, expected names or patterns of parameters, "
        'modules or parameters; write ignored="*.experts.*" or ignored=[model.encoder]'
    )
