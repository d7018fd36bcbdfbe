"""A user's description of the optimizer: ``AdamW``, ``group``, or optimizers of torch.

``parameter_groups`` makes one list of groups of all three. Everything in a group is updated with
the same learning rate and options, as in torch.optim. ``torch_groups.py`` reads torch's groups,
``user_groups.py`` those that ``group`` makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from megatron_llama.engine.options import (
    ADAM,
    BF16,
    EIGHT_BIT,
    FP32,
    TORCH,
    TorchGroup,
    UpdateOptions,
)
from megatron_llama.engine.shard.names import ParameterNames
from megatron_llama.errors import ConfigError

if TYPE_CHECKING:
    from megatron_llama.engine.shard.specs import ModuleUnit
    from megatron_llama.engine.shard.user_groups import Group

LEAST_BF16 = 2.0**-8
"""The least share by which any number in bf16 can fall."""


@dataclass(frozen=True)
class AdamW:
    """AdamW with decoupled weight decay (Loshchilov and Hutter, 2019) and torch's defaults.

    ``weight_decay`` applies to parameters with two or more dims. ``groups`` are made by ``group``;
    a parameter belongs to the first one that matches it. ``exp_avg_dtype`` and ``exp_avg_sq_dtype``
    are the dtypes in which the moments are kept: ``fp32``, ``bf16``, or ``8bit`` with a scale for
    each 64 elements (docs/optimizers.md). In bf16 a moment needs a beta of at most 0.996. Raises
    ConfigError for values that AdamW does not have."""

    has_kinds: ClassVar[bool] = False
    """Whether it has another update for some parameters, which ``group(kind=)`` chooses."""
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    groups: Sequence[Group] = ()
    exp_avg_dtype: str = FP32
    exp_avg_sq_dtype: str = FP32

    def __post_init__(self) -> None:
        """Check the values."""
        require_valid(str(self), self.lr, self.betas, self.eps, self.weight_decay)
        every_betas: list[tuple[float, float]] = [self.betas]
        if self.groups:
            # A feature of its own, which most scripts do without.
            from megatron_llama.engine.shard.user_groups import checked_groups

            every_betas += [g.betas for g in checked_groups(self) if g.betas is not None]
        for number, name in enumerate(("exp_avg_dtype", "exp_avg_sq_dtype")):
            kept = getattr(self, name)
            if kept not in (FP32, BF16, EIGHT_BIT):
                raise ConfigError(
                    str(self),
                    got=f"{name}={kept!r}",
                    expected="fp32, bf16 or 8bit",
                    do=f"change {name}",
                )
            largest = max(betas[number] for betas in every_betas)
            if kept == BF16 and 1 - largest < LEAST_BF16:
                raise ConfigError(
                    str(self),
                    got=f"{name}={kept!r} with a beta of {largest}",
                    expected=f"a beta of at most {1 - LEAST_BF16:.3f}: a step that takes less of a "
                    "moment is rounded back",
                    do="lower it (0.95 is usual), or keep this moment in fp32 or 8 bits",
                )

    @property
    def rule(self) -> str:
        """The update rule, by its name in ``EngineOptions``."""
        return ADAM

    def groups_of(
        self,
        chosen: Group | None,
        members: Sequence[nn.Parameter],
        names_of: ParameterNames,
        units: Sequence[ModuleUnit],
    ) -> Iterator[ParameterGroup]:
        """Yield the groups of the trainable parameters ``members``, whose own options ``chosen``
        has: one, or two where the weight decay depends on the dims."""
        options = {
            name: value
            for name in ("lr", "betas", "eps", "weight_decay")
            if (value := getattr(chosen, name, None)) is not None
        }
        options = {"lr": self.lr, "betas": self.betas, "eps": self.eps, **options}
        by_decay = [(members, options)]
        if "weight_decay" not in options:
            by_decay = [
                (
                    [p for p in members if p.dim() >= 2],
                    options | {"weight_decay": self.weight_decay},
                ),
                ([p for p in members if p.dim() < 2], options | {"weight_decay": 0.0}),
            ]
        for updated_alike, own in by_decay:
            if updated_alike:
                yield ParameterGroup(
                    own.pop("lr"),
                    own,
                    tuple(names_of[parameter][0] for parameter in updated_alike),
                    str(self),
                    self.rule,
                    base_options(self),
                )

    def __str__(self) -> str:
        """Return the words by which messages name it."""
        kept = self.exp_avg_dtype, self.exp_avg_sq_dtype
        moments = "" if kept == (FP32, FP32) else f" with moments in {kept[0]} and {kept[1]}"
        return f"ml.{type(self).__name__}{moments}"


@dataclass(frozen=True)
class Elementwise:
    """An optimizer of which its user promises that it is elementwise; ``elementwise`` makes it."""

    optimizer: torch.optim.Optimizer


Optimizer = AdamW | Elementwise | torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
"""What ``shard(optimizer=)`` takes."""


def torch_optimizers(optimizer: Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers of torch that ``shard`` was given, perhaps none."""
    given = optimizer.optimizer if isinstance(optimizer, Elementwise) else optimizer
    several = given if isinstance(given, Sequence) else (given,)
    return tuple(one for one in several if isinstance(one, torch.optim.Optimizer))


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

    by_muon: ClassVar[bool] = False
    """Whether they are matrices that Muon updates."""
    lr: float
    options: Mapping[str, Any]
    """All other options by torch's names. They may change between steps."""
    names: tuple[str, ...]
    """The trainable parameters, by name."""
    kind: str = "ml.AdamW"
    """The optimizer as messages call it."""
    rule: str = ADAM
    """The update rule, by its name in ``EngineOptions``."""
    base: UpdateOptions = field(default=UpdateOptions(), repr=False, compare=False)
    """What an update rule reads beside ``lr`` and ``options``."""
    tried: set[frozenset[str]] = field(default_factory=set, repr=False, compare=False)
    """The options that are switched on in each combination with which an optimizer of torch is
    known to keep the same state."""

    def update_options(self, options: Mapping[str, Any] | None = None) -> UpdateOptions:
        """Return the numbers as the engine's update rules read them: with the group's options, or
        with those it has now."""
        options = self.options if options is None else options
        if isinstance(self.base, TorchGroup):
            return replace(self.base, options=options)
        first, second = options["betas"]
        return replace(
            self.base,
            lr=self.lr,
            weight_decay=float(options["weight_decay"]),
            adam_beta1=float(first),
            adam_beta2=float(second),
            adam_eps=float(options["eps"]),
        )

    def read(self, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options of a loaded state. Those that are None count as not there."""
        return saved

    def require_valid(self, where: str, options: Mapping[str, Any]) -> None:
        """Raise ConfigError for options that the optimizer does not have: values that are no such
        numbers, or, of an optimizer of torch, that need other state."""
        if self.rule == TORCH:
            from megatron_llama.engine.shard.torch_groups import require_same_state

            require_same_state(where, self, options)
        else:
            numbers = (options["betas"], options["eps"], options["weight_decay"])
            require_valid(where, None, *numbers)


def parameter_groups(
    optimizer: Optimizer, names_of: ParameterNames, units: Sequence[ModuleUnit] = ()
) -> tuple[ParameterGroup, ...]:
    """Return the groups of a model's trainable parameters, each parameter in one of them.
    ``names_of`` has all parameters of the model, ``units`` those of its units and root parts.

    Those of an optimizer of torch are its own, in its order, so that schedulers with one function
    for each group go on to work; frozen parameters are left out. Those of ``AdamW`` are its
    ``groups`` in their order, then the parameters that no group matches. Where the weight decay
    depends on the dims, a group is cut into two: parameters with two or more dims, and the others,
    without decay. Groups without a parameter do not appear, unless nothing is trained.

    Raises ConfigError where a group matches no trainable parameter, names a parameter that is not
    the model's, or asks for what the engine does not have. Raises ConfigError for an optimizer of
    torch that has been used, or that is not known to be elementwise."""
    if isinstance(optimizer, AdamW):
        return _matched_groups(optimizer, names_of, units)
    # Most scripts have ml.AdamW or torch's AdamW, and need nothing of the optimizer's trial.
    from megatron_llama.engine.shard.torch_groups import torch_groups

    return torch_groups(optimizer, names_of)


def _matched_groups(
    optimizer: AdamW, names_of: ParameterNames, units: Sequence[ModuleUnit]
) -> tuple[ParameterGroup, ...]:
    taken: Mapping[nn.Parameter, int] = {}
    if optimizer.groups:
        from megatron_llama.engine.shard.user_groups import matched

        taken = matched(optimizer, names_of)
    result: list[ParameterGroup] = []
    for index in (*range(len(optimizer.groups)), None):
        chosen = None if index is None else optimizer.groups[index]
        own = [p for p in names_of if p.requires_grad and taken.get(p) == index]
        result += optimizer.groups_of(chosen, own, names_of, units)
    # A frozen model has a group without parameters: torch.optim has no optimizer without groups.
    return tuple(result) or (_without_parameters(optimizer),)


def _without_parameters(optimizer: AdamW) -> ParameterGroup:
    options = {name: getattr(optimizer, name) for name in ("betas", "eps", "weight_decay")}
    return ParameterGroup(
        optimizer.lr, options, (), str(optimizer), optimizer.rule, base_options(optimizer)
    )


def base_options(optimizer: AdamW) -> UpdateOptions:
    """Return what an update rule reads of it beside learning rate and options of groups."""
    return UpdateOptions(
        exp_avg_dtype=optimizer.exp_avg_dtype, exp_avg_sq_dtype=optimizer.exp_avg_sq_dtype
    )
