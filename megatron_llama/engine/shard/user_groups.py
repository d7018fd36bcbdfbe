"""Groups that a user describes: ``group``, and which parameters each has."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from weakref import ref

from torch import Tensor, nn

from megatron_llama.engine.shard.names import ParameterNames
from megatron_llama.engine.shard.optimizer import AdamW, require_valid
from megatron_llama.errors import ConfigError, counted

Match = str | Callable[[str, nn.Parameter], bool] | tuple[ref[nn.Parameter], ...]
"""Which parameters a group has: a pattern of names, a predicate, or references to the parameters
themselves. A script that keeps the group shall not keep the whole model in memory with it."""


@dataclass(frozen=True)
class Group:
    """Parameters with options of their own. ``group`` makes it; None stands for the value of
    ``AdamW``."""

    match: Match
    lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    kind: str | None = None

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
    kind: str | None = None,
) -> Group:
    """Give some parameters options of their own; what is None is as in ``AdamW``.

    ``match`` is a pattern of names with ``*`` and ``?``, such as ``"*.bias"``; a predicate that
    gets (name, parameter); or an iterable of parameters. A ``weight_decay`` that is given here
    applies to all of them, whatever their dims. With ``ml.Muon`` a ``kind`` of ``"adamw"`` or
    ``"muon"`` says which of both updates them; ``betas`` and ``eps`` count for AdamW's part alone.
    Raises ConfigError for a value that AdamW does not have, TypeError for another ``match``."""
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
    made = Group(chosen, lr, betas, eps, weight_decay, kind)
    require_valid(str(made), lr, betas, eps, weight_decay)
    if kind not in (None, "adamw", "muon"):
        raise ConfigError(
            str(made), got=f"kind={kind!r}", expected='"adamw" or "muon"', do="change kind"
        )
    return made


def checked_groups(optimizer: AdamW) -> Sequence[Group]:
    """Return the groups of an optimizer. Raises ConfigError for what ``group`` has not made, and
    for kinds that the optimizer does not have."""
    wrong = next(
        (candidate for candidate in optimizer.groups if not isinstance(candidate, Group)), None
    )
    if wrong is not None:
        raise ConfigError(
            str(optimizer),
            got=f"{wrong!r} in groups",
            expected="what ml.group returns",
            do='write groups=[ml.group("*.bias", weight_decay=0.0)]',
        )
    for given in optimizer.groups:
        if given.kind is not None and not optimizer.has_kinds:
            raise ConfigError(
                str(given),
                got=f"kind={given.kind!r} with {optimizer}",
                expected="it with ml.Muon alone",
                do="leave kind out",
            )
    return optimizer.groups


def matched(optimizer: AdamW, names_of: ParameterNames) -> dict[nn.Parameter, int]:
    """Return the number of the first group that matches each trainable parameter, as
    ``parameter_groups`` says."""
    _require_own_parameters(optimizer.groups, names_of.keys())
    taken: dict[nn.Parameter, int] = {}
    """The first group that matches each trainable parameter."""
    for index, user_group in enumerate(optimizer.groups):
        members = [
            parameter
            for parameter, names in names_of.items()
            if _matches(user_group.match, parameter, names)
        ]
        trainable = [parameter for parameter in members if parameter.requires_grad]
        for parameter in trainable:
            taken.setdefault(parameter, index)
        if index not in taken.values():
            earlier = sorted({taken[parameter] for parameter in trainable})
            if earlier:
                others = ", ".join(str(optimizer.groups[number]) for number in earlier)
                got = f"only parameters that {others} matches before it"
            else:
                got = f"{'only frozen parameters' if members else 'no parameter'}"
            first = next(iter(names_of.values()), ("none",))[0]
            raise ConfigError(
                str(user_group),
                got=f"a match of {got}",
                expected="at least one trainable parameter",
                do=f"mend or remove the group (a name of this model is {first})",
            )
    return taken


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
