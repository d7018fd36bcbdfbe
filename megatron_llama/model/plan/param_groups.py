"""``--param-group``: learning rate, decay and initial size of some parameters, by patterns of their
HuggingFace names. No torch, and no model: names come from the caller."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from megatron_llama.config.schema import OptimizerConfig
from megatron_llama.engine.plan.specs import UnitSpec
from megatron_llama.errors import describe

FLAG = "--param-group"
LR = "lr"
LR_MULT = "lr_mult"
MIN_LR = "min_lr"
WEIGHT_DECAY = "weight_decay"
INIT_STD = "init_std"
KEYS = (LR, LR_MULT, MIN_LR, WEIGHT_DECAY, INIT_STD)
EXAMPLE = "'embed*: lr=1e-3, weight_decay=0'"


class Malformed(ValueError):
    """A group that cannot be read. Its text is the problem, as ``errors.describe`` makes it."""


@dataclass(frozen=True)
class ParamGroup:
    """One value of ``--param-group``."""

    text: str
    """The value as it was given."""
    pattern: str
    values: Mapping[str, float]
    """The numbers that it gives, by KEYS."""

    def matches(self, name: str) -> bool:
        """Whether the pattern matches the name of a HuggingFace parameter, whole or from some dot
        on."""
        return fnmatchcase(name, self.pattern) or fnmatchcase(name, f"*.{self.pattern}")


def read_group(text: str) -> ParamGroup:
    """Read ``PATTERN: key=value, key=value``. Raises Malformed."""
    pattern, colon, rest = (word.strip() for word in text.partition(":"))
    if not pattern or not colon or not rest:
        raise Malformed(
            describe(
                FLAG,
                got=text or "nothing",
                expected="PATTERN: key=value, key=value",
                do=f"write it as {EXAMPLE}",
            )
        )
    values: dict[str, float] = {}
    for entry in rest.split(","):
        key, equals, word = (word.strip() for word in entry.partition("="))
        key = key.replace("-", "_")
        if not equals or key not in KEYS:
            got = f"{entry.strip() or 'nothing'} in {text}"
            expected = f"{', '.join(KEYS[:-1])} or {KEYS[-1]}, each with =NUMBER"
            raise Malformed(
                describe(FLAG, got=got, expected=expected, do="separate them by commas")
            )
        if key in values:
            raise Malformed(
                describe(FLAG, got=f"{key} twice in {text}", expected="it once", do="leave one out")
            )
        try:
            values[key] = float(word)
        except ValueError:
            values[key] = math.nan
        if not 0 <= values[key] < math.inf:
            raise Malformed(
                describe(
                    FLAG,
                    got=f"{key}={word} in {text}",
                    expected="a number from 0",
                    do="correct the value",
                )
            )
    if LR in values and LR_MULT in values:
        raise Malformed(
            describe(
                FLAG,
                got=f"{LR} and {LR_MULT} in {text}",
                expected="one of them",
                do=f"{LR} is a rate, {LR_MULT} a factor of --lr",
            )
        )
    return ParamGroup(text, pattern, values)


def read_groups(texts: Sequence[str]) -> tuple[ParamGroup, ...]:
    """Read all values of the option. Raises Malformed."""
    return tuple(map(read_group, texts))


def merged(groups: Iterable[ParamGroup], name: str) -> dict[str, float]:
    """Return the values of all groups for a parameter. Conflicts have been refused before."""
    values: dict[str, float] = {}
    for group in groups:
        if group.matches(name):
            values.update(group.values)
    return values


def conflict(groups: Iterable[ParamGroup], name: str) -> tuple[ParamGroup, ParamGroup, str] | None:
    """Return two groups that contradict each other about a parameter, and the key; else None."""
    said: dict[str, ParamGroup] = {}
    for group in groups:
        if not group.matches(name):
            continue
        for key, value in group.values.items():
            # A rate and a factor of the rate give the same number.
            subject = LR if key == LR_MULT else key
            before = said.setdefault(subject, group)
            if before.values.get(key) != value:
                return before, group, subject
    return None


def with_values(optimizer: OptimizerConfig, values: Mapping[str, float]) -> OptimizerConfig:
    """Return the options of parameters to which groups give ``values``. Unless it is given, the
    least rate keeps its proportion to the peak."""
    factor = values.get(LR_MULT, 1.0)
    lr = values.get(LR, optimizer.lr * factor)
    if LR in values:
        # Without a peak there is no proportion.
        least = optimizer.min_lr * (lr / optimizer.lr) if optimizer.lr else optimizer.min_lr
    else:
        least = optimizer.min_lr * factor
    return replace(
        optimizer,
        lr=lr,
        min_lr=values.get(MIN_LR, least),
        weight_decay=values.get(WEIGHT_DECAY, optimizer.weight_decay),
    )


class ParamGroups:
    """The groups of a model's parameters. Number 0 holds all parameters whose update no group
    changes; the others are numbered in the order in which the model has them, so every rank finds
    the same."""

    def __init__(self, optimizer: OptimizerConfig, names: Iterable[str]) -> None:
        """``names``: the HuggingFace names of all parameters of the model, low-rank additions
        included."""
        self._groups = read_groups(optimizer.param_group)
        numbers: dict[tuple[tuple[str, float], ...], int] = {(): 0}
        for name in names if self._groups else ():
            numbers.setdefault(self._key(name), len(numbers))
        self._numbers = numbers
        self.configs = tuple(with_values(optimizer, dict(key)) for key in numbers)
        """The options of each group."""

    def number(self, name: str) -> int:
        """Return the number of a parameter's group."""
        return self._numbers[self._key(name)]

    def decays(self, name: str) -> bool:
        """Whether a group gives a parameter's decay: then it decays, whatever its dims."""
        return WEIGHT_DECAY in merged(self._groups, name)

    def _key(self, name: str) -> tuple[tuple[str, float], ...]:
        values = merged(self._groups, name)
        return tuple(sorted((key, values[key]) for key in values if key != INIT_STD))


def initial_std(texts: Sequence[str], name: str) -> float | None:
    """Return the standard deviation that groups give a parameter's initial values; None if none
    does."""
    return merged(read_groups(texts), name).get(INIT_STD)


def with_groups(unit: UnitSpec, groups: ParamGroups) -> UnitSpec:
    """Return the unit with the group of each parameter. ``checks/param_groups.py`` refuses patterns
    that cut a stored parameter in two."""
    if len(groups.configs) == 1:
        return unit
    params = []
    for spec in unit.params:
        name = spec.slices[0].name
        decay = spec.decay or groups.decays(name)
        params.append(replace(spec, group=groups.number(name), decay=decay))
    return replace(unit, params=tuple(params))
