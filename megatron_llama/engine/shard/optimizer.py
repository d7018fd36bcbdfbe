"""A user's description of the optimizer: ``AdamW``, ``group``, or a torch.optim.AdamW instance.

``parameter_groups`` makes one list of groups of all three. Everything in a group is updated with
the same learning rate, betas, eps and weight decay, as in torch.optim.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from weakref import ref

import torch
from torch import Tensor, nn

from megatron_llama.engine.options import UpdateOptions
from megatron_llama.engine.shard.names import ParameterNames
from megatron_llama.errors import ConfigError, counted, listing

Match = str | Callable[[str, nn.Parameter], bool] | tuple[ref[nn.Parameter], ...]
"""Which parameters a group has: a pattern of names, a predicate, or references to the parameters
themselves. A script that keeps the group shall not keep the whole model in memory with it."""
UNSUPPORTED = (
    ("amsgrad", False),
    ("maximize", False),
    ("capturable", False),
    ("differentiable", False),
    ("decoupled_weight_decay", True),
)
"""Options of torch.optim.AdamW that must have these values, their defaults. ``foreach`` and
``fused`` may have any: they choose an implementation, and the engine has one of its own."""


@dataclass(frozen=True)
class Group:
    """Parameters with options of their own. ``group`` makes it; None stands for the value of
    ``AdamW``."""

    match: Match
    lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None

    def __str__(self) -> str:
        """Return the words by which messages name it."""
        if isinstance(self.match, str):
            return f"ml.group({self.match!r})"
        if isinstance(self.match, tuple):
            return f"ml.group of {counted(len(self.match), 'parameter')}"
        return f"ml.group({getattr(self.match, '__qualname__', repr(self.match))})"


def group(
    match: str | Callable[[str, nn.Parameter], bool] | Iterable[nn.Parameter],
    *,
    lr: float | None = None,
    betas: tuple[float, float] | None = None,
    eps: float | None = None,
    weight_decay: float | None = None,
) -> Group:
    """Give some parameters options of their own; what is None is as in ``AdamW``.

    ``match`` is a pattern of names with ``*`` and ``?``, such as ``"*.bias"``; a predicate that
    gets (name, parameter); or an iterable of parameters. A ``weight_decay`` that is given here
    applies to all of them, whatever their dims. Raises ConfigError for a value that AdamW does not
    have, TypeError for another ``match``."""
    chosen: Match
    if isinstance(match, str):
        chosen = match
    elif isinstance(match, Tensor):
        raise TypeError("ml.group: got one tensor, expected an iterable; write [parameter]")
    elif isinstance(match, Iterable):
        given = tuple(match)
        wrong = next(
            (parameter for parameter in given if not isinstance(parameter, nn.Parameter)), None
        )
        if wrong is not None:
            raise TypeError(
                f"ml.group: got an iterable with {wrong!r} in it, expected parameters; "
                "give each pattern a group of its own"
            )
        chosen = tuple(map(ref, given))
    elif callable(match):
        chosen = match
    else:
        raise TypeError(
            f"ml.group: got {match!r}, expected a pattern, a predicate or parameters; "
            'write ml.group("*.bias", ...)'
        )
    made = Group(chosen, lr, betas, eps, weight_decay)
    require_valid(str(made), lr, betas, eps, weight_decay)
    return made


@dataclass(frozen=True)
class AdamW:
    """AdamW with decoupled weight decay (Loshchilov and Hutter, 2019) and torch's defaults.

    ``weight_decay`` applies to parameters with two or more dims. ``groups`` are made by ``group``;
    a parameter belongs to the first one that matches it. Raises ConfigError for values that AdamW
    does not have."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    groups: Sequence[Group] = ()

    def __post_init__(self) -> None:
        """Check the values."""
        require_valid("ml.AdamW", self.lr, self.betas, self.eps, self.weight_decay)
        wrong = next(
            (candidate for candidate in self.groups if not isinstance(candidate, Group)), None
        )
        if wrong is not None:
            raise ConfigError(
                "ml.AdamW",
                got=f"{wrong!r} in groups",
                expected="what ml.group returns",
                do='write groups=[ml.group("*.bias", weight_decay=0.0)]',
            )


def require_valid(
    where: str,
    lr: float | None,
    betas: tuple[float, float] | None,
    eps: float | None,
    weight_decay: float | None,
) -> None:
    """Raise ConfigError for a value that AdamW does not have. None is not looked at."""
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if value is not None and not 0.0 <= value < float("inf"):
            raise ConfigError(
                where, got=f"{name}={value!r}", expected="a number from 0", do=f"change {name}"
            )
    if betas is not None and not (len(betas) == 2 and all(0.0 <= beta < 1.0 for beta in betas)):
        raise ConfigError(
            where,
            got=f"betas={betas!r}",
            expected="two numbers from 0 and below 1",
            do="change betas",
        )


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are updated with the same options."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    names: tuple[str, ...]
    """The trainable parameters, by name."""

    def update_options(self) -> UpdateOptions:
        """Return the numbers as the engine's update rules read them."""
        return UpdateOptions(
            lr=self.lr,
            weight_decay=self.weight_decay,
            adam_beta1=self.betas[0],
            adam_beta2=self.betas[1],
            adam_eps=self.eps,
        )


def parameter_groups(
    optimizer: AdamW | torch.optim.Optimizer, names_of: ParameterNames
) -> tuple[ParameterGroup, ...]:
    """Return the groups of a model's trainable parameters, each parameter in one of them.
    ``names_of`` has all parameters of the model.

    Those of a torch.optim.AdamW are its own, in its order, so that schedulers with one function for
    each group go on to work; frozen parameters are left out. Those of ``AdamW`` are its ``groups``
    in their order, then the parameters that no group matches. Where the weight decay depends on
    the dims, a group is cut into two: parameters with two or more dims, and the others, without
    decay. Groups without a parameter do not appear, unless nothing is trained.

    Raises ConfigError where a group matches no trainable parameter, names a parameter that is not
    the model's, or asks for what the engine does not have. Raises ConfigError for a torch.optim
    optimizer that has been used."""
    if isinstance(optimizer, AdamW):
        return _matched_groups(optimizer, names_of)
    if type(optimizer) is torch.optim.AdamW:
        return _torch_groups(optimizer, names_of)
    raise ConfigError(
        "shard(optimizer=)",
        got=f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
        expected="ml.AdamW(...) or a torch.optim.AdamW",
        do="use one of these: the engine has no other update rule",
    )


def _matched_groups(optimizer: AdamW, names_of: ParameterNames) -> tuple[ParameterGroup, ...]:
    _require_own_parameters(optimizer.groups, names_of.keys())
    taken: dict[nn.Parameter, int] = {}
    """The first group that matches each trainable parameter."""
    result: list[ParameterGroup] = []
    for index, user_group in enumerate(optimizer.groups):
        matched = [
            parameter
            for parameter, names in names_of.items()
            if _matches(user_group.match, parameter, names)
        ]
        trainable = [parameter for parameter in matched if parameter.requires_grad]
        for parameter in trainable:
            taken.setdefault(parameter, index)
        if index not in taken.values():
            earlier = sorted({taken[parameter] for parameter in trainable})
            if earlier:
                others = ", ".join(str(optimizer.groups[number]) for number in earlier)
                got = f"only parameters that {others} matches before it"
            else:
                got = f"{'only frozen parameters' if matched else 'no parameter'}"
            first = next(iter(names_of.values()), ("none",))[0]
            raise ConfigError(
                str(user_group),
                got=f"a match of {got}",
                expected="at least one trainable parameter",
                do=f"mend or remove the group (a name of this model is {first})",
            )
    for index in (*range(len(optimizer.groups)), None):
        chosen = Group("*") if index is None else optimizer.groups[index]
        own = [p for p in names_of if p.requires_grad and taken.get(p) == index]
        by_decay = [(own, chosen.weight_decay)]
        if chosen.weight_decay is None:
            by_decay = [
                ([p for p in own if p.dim() >= 2], optimizer.weight_decay),
                ([p for p in own if p.dim() < 2], 0.0),
            ]
        result += [
            ParameterGroup(
                optimizer.lr if chosen.lr is None else chosen.lr,
                optimizer.betas if chosen.betas is None else chosen.betas,
                optimizer.eps if chosen.eps is None else chosen.eps,
                decay,
                tuple(names_of[parameter][0] for parameter in members),
            )
            for members, decay in by_decay
            if members and decay is not None
        ]
    # A frozen model has a group without parameters: torch.optim has no optimizer without groups.
    return tuple(result) or (_without_parameters(optimizer),)


def _without_parameters(optimizer: AdamW) -> ParameterGroup:
    return ParameterGroup(
        optimizer.lr, optimizer.betas, optimizer.eps, optimizer.weight_decay, names=()
    )


def _matches(match: Match, parameter: nn.Parameter, names: Sequence[str]) -> bool:
    """Whether a group has a parameter; a shared one is matched by any of its names."""
    if isinstance(match, tuple):
        return any(own() is parameter for own in match)
    if isinstance(match, str):
        return any(fnmatchcase(name, match) for name in names)
    return any(match(name, parameter) for name in names)


def _require_own_parameters(groups: Sequence[Group], own: Collection[nn.Parameter]) -> None:
    """Raise ConfigError for a group with a parameter that the model does not have."""
    for user_group in groups:
        foreign = (
            [given for given in user_group.match if given() not in own]
            if isinstance(user_group.match, tuple)
            else []
        )
        if foreign:
            first = foreign[0]()
            shape = "" if first is None else f", the first of shape {tuple(first.shape)}"
            raise ConfigError(
                str(user_group),
                got=f"{counted(len(foreign), 'parameter')} that the model does not have{shape}",
                expected="parameters of the model that is sharded",
                do="take them from the model after all its layers are in place",
            )


def _torch_groups(
    optimizer: torch.optim.Optimizer, names_of: ParameterNames
) -> tuple[ParameterGroup, ...]:
    where = "shard(optimizer=torch.optim.AdamW)"
    problems = []
    groups = []
    grouped: set[nn.Parameter] = set()
    for index, torch_group in enumerate(optimizer.param_groups):
        problems += [
            f"group {index}: got {name}={torch_group[name]!r}, expected {needed!r}; "
            "the engine has no such option, leave it out"
            for name, needed in UNSUPPORTED
            if name in torch_group and torch_group[name] != needed
        ]
        if "initial_lr" in torch_group:
            problems.append(
                f"group {index}: got a learning-rate scheduler, expected none before shard(); "
                "make it after shard(), of engine.optimizer: it would go on to change this one"
            )
        foreign = sum(parameter not in names_of for parameter in torch_group["params"])
        if foreign:
            problems.append(
                f"group {index}: got {counted(foreign, 'parameter')} that the model does not have, "
                "expected the model's own; make the optimizer of the model that is sharded"
            )
        own = [p for p in torch_group["params"] if p in names_of and p.requires_grad]
        grouped.update(own)
        first, second = torch_group["betas"]
        groups.append(
            ParameterGroup(
                float(torch_group["lr"]),
                (float(first), float(second)),
                float(torch_group["eps"]),
                float(torch_group["weight_decay"]),
                tuple(names_of[parameter][0] for parameter in own),
            )
        )
    problems += [
        f"{names[0]}: got a trainable parameter in no group, expected one group; "
        "add it, or freeze it with requires_grad_(False)"
        for parameter, names in names_of.items()
        if parameter.requires_grad and parameter not in grouped
    ]
    # Its state is of whole parameters, on every rank; what engine.load_state_dict takes is checked
    # and may be sharded.
    if optimizer.state:
        problems.append(
            f"got the state of {counted(len(optimizer.state), 'parameter')}, expected an optimizer "
            "that has made no step; keep torch.distributed.checkpoint.state_dict.get_state_dict"
            "(model, optimizer) before shard(), and give it to engine.load_state_dict after"
        )
    if problems:
        raise ConfigError(listing(f"{where}:", problems))
    return tuple(groups)
