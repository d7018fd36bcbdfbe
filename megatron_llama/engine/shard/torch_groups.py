"""The groups of an optimizer of torch: what it says of the parameters, and who updates them.

The engine has an AdamW of its own, which is faster. Every other optimizer makes its own updates, on
flat shards (``TorchRule``): so it must be elementwise. Of torch's it is known which are. Others
need the user's promise (``ml.elementwise``), and a trial looks at all of them (``torch_trial.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from megatron_llama.engine.options import ADAM, TORCH, TorchGroup, UpdateOptions
from megatron_llama.engine.rules.torch_rule import bare_optimizer
from megatron_llama.engine.rules.torch_trial import describe_group
from megatron_llama.engine.shard.names import ParameterNames
from megatron_llama.engine.shard.optimizer import (
    Elementwise,
    Optimizer,
    ParameterGroup,
    torch_optimizers,
)
from megatron_llama.errors import ConfigError, counted, listing

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.Rprop,
)
"""Those of torch that treat each element by itself, whatever their options."""
NOT_ELEMENTWISE: Mapping[str, str] = MappingProxyType(
    {
        "Adafactor": "keeps numbers of rows and columns, and a rank has parts of them",
        "LBFGS": "calls for the loss several times in a step, and sums over all parameters",
        "Muon": "orthogonalises whole matrices, and a rank has parts of them",
        "SparseAdam": "needs sparse gradients, and those of the engine are dense",
    }
)
"""Why the others of torch cannot update shards."""
ENGINES_OWN = MappingProxyType(
    {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True}
)
"""Options of torch's AdamW with which the engine's own AdamW updates."""
NOT_OPTIONS = frozenset({"params", "param_names", "lr", "initial_lr"})
"""What a group of torch.optim has beside the options of the update."""
MUON = "torch.optim.Muon"
"""The only one that goes with others: the engine's Muon has AdamW for what is no matrix."""
IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options that choose an implementation: no state that is loaded changes them."""


def torch_groups(optimizer: Optimizer, names_of: ParameterNames) -> tuple[ParameterGroup, ...]:
    """Return the groups of an optimizer, for ``parameter_groups``, which says what is raised."""
    several = torch_optimizers(optimizer)
    kind = " and ".join(map(_kind, several))
    where = f"shard(optimizer={kind})"
    has_muon = _require_known(optimizer, where)
    problems = [*_problems(several, names_of)]
    # Its state is of whole parameters, on every rank; what engine.load_state_dict takes is checked
    # and may be sharded.
    problems += [
        f"got the state of {counted(len(used.state), 'parameter')}, expected an optimizer "
        "that has made no step; keep torch.distributed.checkpoint.state_dict.get_state_dict"
        "(model, optimizer) before shard(), and give it to engine.load_state_dict after"
        for used in several
        if _is_used(used)
    ]
    if problems:
        raise ConfigError(listing(f"{where}:", problems))
    if has_muon:
        from megatron_llama.engine.shard.muon import torchs_muon

        torchs = [group for each in several for group in each.param_groups]
        made = torchs_muon(torchs, [*map(plain_options, torchs)], kind)
        return tuple(
            replace(group, names=_trained(torch_group, names_of))
            for torch_group, group in zip(torchs, made, strict=True)
        )
    [given] = several
    is_own = _is_engines_adamw(given)
    bare = bare_optimizer(given)
    tried: list[TorchGroup] = []
    """The groups of each options that differ: a trial takes milliseconds."""
    groups = []
    for torch_group in given.param_groups:
        lr = float(torch_group["lr"])
        options = plain_options(torch_group)
        base = UpdateOptions()
        if is_own:
            options = {name: options[name] for name in ("betas", "eps", "weight_decay")}
        else:
            same = [group for group in tried if group.options == options]
            base = (
                same[0]
                if same
                else describe_group(where, bare, options, lr=lr, device=_device(torch_group))
            )
            tried.append(base)
        names = _trained(torch_group, names_of)
        groups.append(ParameterGroup(lr, options, names, kind, ADAM if is_own else TORCH, base))
    return tuple(groups)


def _is_engines_adamw(given: torch.optim.Optimizer) -> bool:
    """Whether the engine's own AdamW does what an optimizer does."""
    return type(given) is torch.optim.AdamW and all(
        group.get(name, needed) == needed
        for group in given.param_groups
        for name, needed in ENGINES_OWN.items()
    )


def _trained(torch_group: Mapping[str, Any], names_of: ParameterNames) -> tuple[str, ...]:
    """Return the names of what a group trains."""
    return tuple(
        names_of[own][0] for own in torch_group["params"] if own in names_of and own.requires_grad
    )


def plain_options(torch_group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group of torch.optim but the learning rate, tensors as numbers."""
    return {name: _plain(value) for name, value in torch_group.items() if name not in NOT_OPTIONS}


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _kind(optimizer: object) -> str:
    """Return the name of an optimizer's class, torch's by their short names."""
    module, name = type(optimizer).__module__, type(optimizer).__qualname__
    is_torchs = getattr(torch.optim, name, None) is type(optimizer)
    return f"torch.optim.{name}" if is_torchs else f"{module}.{name}"


def _require_known(optimizer: Any, where: str) -> bool:
    """Raise ConfigError for what is no optimizer of torch, may not be elementwise, or is several
    that do not go together. Returns whether it is torch's Muon, perhaps with AdamW."""
    promised = isinstance(optimizer, Elementwise)
    several = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
    if MUON in map(_kind, several) and all(
        _kind(one) == MUON or _is_engines_adamw(one) for one in several
    ):
        return True
    if isinstance(optimizer, list | tuple):
        raise ConfigError(
            "shard(optimizer=)",
            got=f"several: {', '.join(map(_kind, several)) or 'none'}",
            expected="one optimizer, or torch.optim.Muon with torch.optim.AdamW (without amsgrad "
            "and maximize)",
            do="make one optimizer with a group for each, or give ml.Muon(...)",
        )
    given = optimizer.optimizer if isinstance(optimizer, Elementwise) else optimizer
    name = type(given).__qualname__
    if getattr(torch.optim, name, None) is type(given) and name in NOT_ELEMENTWISE:
        raise ConfigError(
            where,
            got=f"an optimizer that {NOT_ELEMENTWISE[name]}",
            expected="one that treats each element by itself",
            do="use ml.AdamW, ml.Muon or an elementwise optimizer",
        )
    if isinstance(given, torch.optim.Optimizer) and (promised or type(given) in ELEMENTWISE):
        return False
    if isinstance(given, torch.optim.Optimizer):
        raise ConfigError(
            where,
            got="an optimizer of which is not known whether it treats each element by itself",
            expected="ml.AdamW(...) or one of torch.optim's that do",
            do="if it does, and asks for no norms, rows or columns, give ml.elementwise(optimizer)",
        )
    raise ConfigError(
        "shard(optimizer=)",
        got=_kind(given),
        expected="ml.AdamW(...) or a torch.optim.Optimizer",
        do="give one of these",
    )


def _problems(
    optimizers: Sequence[torch.optim.Optimizer], names_of: ParameterNames
) -> Iterator[str]:
    """Yield what is wrong with the groups of the optimizers."""
    grouped: set[nn.Parameter] = set()
    groups = [torch_group for optimizer in optimizers for torch_group in optimizer.param_groups]
    for index, torch_group in enumerate(groups):
        if torch_group.get("differentiable"):
            yield (
                f"group {index}: got differentiable=True, expected False; "
                "no gradient flows through the engine's updates, leave it out"
            )
        if "initial_lr" in torch_group:
            yield (
                f"group {index}: got a learning-rate scheduler, expected none before shard(); "
                "make it after shard(), of engine.optimizer: it would go on to change this one"
            )
        if not isinstance(torch_group.get("lr"), int | float | Tensor):
            yield (
                f"group {index}: got lr={torch_group.get('lr')!r}, expected a number; "
                "give the optimizer a learning rate"
            )
        foreign = sum(parameter not in names_of for parameter in torch_group["params"])
        if foreign:
            yield (
                f"group {index}: got {counted(foreign, 'parameter')} that the model does not have, "
                "expected the model's own; make the optimizer of the model that is sharded"
            )
        trained = {p for p in torch_group["params"] if p in names_of and p.requires_grad}
        if trained & grouped:  # one optimizer of torch would not have taken it twice
            yield (
                f"group {index}: got {counted(len(trained & grouped), 'parameter')} of another "
                "optimizer, expected each in one; take them out of one"
            )
        grouped |= trained
    if any(
        hooks
        for optimizer in optimizers
        for name, hooks in vars(optimizer).items()
        if name.endswith("_hooks")
    ):
        yield (
            "got hooks, expected none: the engine makes no step of this optimizer; "
            "call what they do in the training loop"
        )
    for parameter, names in names_of.items():
        if parameter.requires_grad and parameter not in grouped:
            yield (
                f"{names[0]}: got a trainable parameter in no group, expected one group; "
                "add it, or freeze it with requires_grad_(False)"
            )


def _is_used(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has made a step. Adagrad has state from the beginning."""
    if type(optimizer) is torch.optim.Adagrad:
        counts = [state["step"] for state in optimizer.state.values()]
        return any(float(count) for count in counts if not count.is_meta)
    return bool(optimizer.state)


def _device(torch_group: Mapping[str, Any]) -> torch.device:
    """Return the device of a trial: that of the parameters, where an optimizer may have kernels."""
    device = next((p.device for p in torch_group["params"]), torch.device("cpu"))
    return torch.device("cpu") if device.type == "meta" else device


def require_same_state(where: str, group: ParameterGroup, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for options of an optimizer of torch that are no finite numbers, or with
    which it keeps other state than with those that ``shard`` was given."""
    base = group.base
    assert isinstance(base, TorchGroup), base
    for name, value in options.items():
        numbers = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(number, float) and not isfinite(number) for number in numbers):
            raise ConfigError(
                where, got=f"{name}={value!r}", expected="finite numbers", do=f"change {name}"
            )
    pattern = frozenset(name for name, value in options.items() if value)
    # Only an option that is switched on or off can change the state. A schedule goes from one value
    # to the next, and must not cost a trial in each step.
    if not group.tried:
        group.tried.add(frozenset(name for name, value in base.options.items() if value))
    if pattern in group.tried:
        return
    now = describe_group(where, base.optimizer, options, lr=group.lr, device=torch.device("cpu"))
    if now.state != base.state or (now.initial is None) != (base.initial is None):
        switched = sorted(
            name for name, value in options.items() if bool(value) != bool(base.options.get(name))
        )
        raise ConfigError(
            where,
            got=", ".join(f"{name}={options[name]!r}" for name in switched)
            + ", with which the optimizer keeps other state",
            expected=", ".join(f"{name}={base.options.get(name)!r}" for name in switched)
            + " as in shard()",
            do="leave them as they are, or begin with a small value in the place of 0",
        )
    group.tried.add(pattern)
