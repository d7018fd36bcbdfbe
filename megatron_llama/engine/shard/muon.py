"""Muon in ``shard``: ``ml.Muon``, and torch.optim.Muon with the AdamW beside it.

Which parameters it has is decided here; ``engine/rules/muon.py`` updates them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

from torch import nn

from megatron_llama.engine.options import MUON, UpdateOptions
from megatron_llama.engine.rules.muon import COEFFICIENTS, EPS
from megatron_llama.engine.shard.names import ParameterNames
from megatron_llama.engine.shard.optimizer import AdamW, ParameterGroup, base_options, require_valid
from megatron_llama.engine.shard.specs import ModuleUnit
from megatron_llama.engine.shard.user_groups import Group
from megatron_llama.engine.shard.values import named
from megatron_llama.errors import ConfigError

MATCH_RMS_ADAMW = "match_rms_adamw"
ADJUSTMENTS = ("original", MATCH_RMS_ADAMW)
"""The rules by which a matrix's rate follows its shape, by torch's names."""
MOST_STEPS = 99
"""The most Newton-Schulz iterations, as in torch.optim.Muon."""
FIXED: Mapping[str, Any] = MappingProxyType({"ns_coefficients": COEFFICIENTS, "eps": EPS})
"""Options of torch.optim.Muon that have one value here."""


@dataclass(frozen=True)
class Muon(AdamW):
    """Muon (Jordan et al., 2024) for the matrices inside of units, AdamW for everything else.

    Matrices are parameters of two dims, but not those of ``nn.Embedding``; what is in no unit, such
    as the head, is AdamW's. ``ml.group(..., kind="adamw")`` takes some out, ``kind="muon"`` puts
    some in: a convolution's weight counts as a matrix [out, in * height * width] then, and is
    AdamW's otherwise. A fused weight (q, k and v in one) is one matrix, as in torch.optim.Muon.

    ``momentum``, ``nesterov``, ``ns_steps`` and ``adjust_lr_fn`` are those of torch.optim.Muon, and
    so are the results. With ``match_rms_adamw`` an update is as large as AdamW's, and one ``lr``
    serves both; with ``original`` give ``adamw_lr`` as well, the rate of AdamW's part. ``betas``,
    ``eps`` and the dtypes of moments are AdamW's alone, ``weight_decay`` and ``groups`` are for
    both. Raises ConfigError for values that it does not have."""

    has_kinds: ClassVar[bool] = True
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    adjust_lr_fn: str = MATCH_RMS_ADAMW
    adamw_lr: float | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        require_valid(str(self), self.adamw_lr, None, None, None)
        _require_valid(str(self), self._options(self.weight_decay))

    @property
    def rule(self) -> str:
        """The update rule, by its name in ``EngineOptions``."""
        return MUON

    def groups_of(
        self,
        chosen: Group | None,
        members: Sequence[nn.Parameter],
        names_of: ParameterNames,
        units: Sequence[ModuleUnit],
    ) -> Iterator[ParameterGroup]:
        """Yield the groups of the trainable parameters ``members``, whose own options ``chosen``
        has: Muon's, then AdamW's."""
        own = Group("*") if chosen is None else chosen
        muon: list[nn.Parameter] = []
        if own.kind != ADAMW:
            matrices = unit_matrices(units) if own.kind is None else frozenset(members)
            muon = [parameter for parameter in members if parameter in matrices]
        wrong = [names_of[p][0] for p in muon if p.dim() < 2 or not p.numel()]
        if wrong:
            raise ConfigError(
                str(own),
                got=f'kind="muon" for {named(wrong)}',
                expected="parameters with elements and two or more dims",
                do="let the pattern leave them out",
            )
        if muon:
            yield MuonGroup(
                self.lr if own.lr is None else own.lr,
                self._options(self.weight_decay if own.weight_decay is None else own.weight_decay),
                tuple(names_of[parameter][0] for parameter in muon),
                str(self),
                MUON,
                base_options(self),
            )
        taken = set(muon)
        rest = [parameter for parameter in members if parameter not in taken]
        own = replace(own, lr=self.adamw_lr if own.lr is None else own.lr)
        yield from super().groups_of(own, rest, names_of, units)

    def _options(self, decay: float) -> dict[str, Any]:
        return {
            "weight_decay": decay,
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            **FIXED,
            "ns_steps": self.ns_steps,
            "adjust_lr_fn": self.adjust_lr_fn,
        }


ADAMW = "adamw"
"""``Group.kind`` of what AdamW updates beside Muon. Muon's own kind is ``MUON``."""


@dataclass(frozen=True)
class MuonGroup(ParameterGroup):
    """Parameters that Muon updates. Their options are those of torch.optim.Muon."""

    by_muon: ClassVar[bool] = True

    def update_options(self, options: Mapping[str, Any] | None = None) -> UpdateOptions:
        """Return the numbers as the engine's update rules read them."""
        options = self.options if options is None else options
        return replace(
            self.base,
            lr=self.lr,
            weight_decay=float(options["weight_decay"]),
            muon_momentum=float(options["momentum"]),
            muon_nesterov=bool(options["nesterov"]),
            muon_num_ns_steps=int(options["ns_steps"]),
            muon_adjust_lr=options["adjust_lr_fn"] or ADJUSTMENTS[0],
        )

    def read(self, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the options of a loaded state: torch's default of one of them is None."""
        if saved.get("adjust_lr_fn", "") is None:
            return {**saved, "adjust_lr_fn": ADJUSTMENTS[0]}
        return saved

    def require_valid(self, where: str, options: Mapping[str, Any]) -> None:
        """Raise ConfigError for options that Muon does not have."""
        _require_valid(where, options)


def _require_valid(where: str, options: Mapping[str, Any]) -> None:
    require_valid(where, None, None, None, options["weight_decay"])
    steps = options["ns_steps"]
    for name, is_valid, expected in (
        ("momentum", 0.0 <= options["momentum"] < 1.0, "a number from 0 and below 1"),
        (
            "ns_steps",
            int(steps) == steps and 0 <= steps <= MOST_STEPS,
            f"a whole number from 0 to {MOST_STEPS}",
        ),
        (
            "adjust_lr_fn",
            options["adjust_lr_fn"] in (None, *ADJUSTMENTS),
            f"one of {', '.join(ADJUSTMENTS)}",
        ),
        *(
            (name, options[name] == value, f"{value}, which alone the engine has")
            for name, value in FIXED.items()
        ),
    ):
        if not is_valid:
            raise ConfigError(
                where, got=f"{name}={options[name]!r}", expected=expected, do=f"change {name}"
            )


def unit_matrices(units: Sequence[ModuleUnit]) -> frozenset[nn.Parameter]:
    """Return the parameters of two dims that units have, and nothing else. A table of embeddings
    has rows that are trained apart from each other, so it is no matrix in this sense."""
    inside: set[nn.Parameter] = set()
    elsewhere: set[nn.Parameter] = set()
    for unit in units:
        for module in unit.owned:
            is_table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
            place = elsewhere if unit.is_root_part or is_table else inside
            place.update(module.parameters(recurse=False))
    return frozenset(p for p in inside - elsewhere if p.dim() == 2 and p.numel())


def require_matrices(groups: Sequence[ParameterGroup]) -> None:
    """Raise ConfigError where Muon would update nothing."""
    if any(group.rule == MUON for group in groups) and not any(group.by_muon for group in groups):
        raise ConfigError(
            "shard(optimizer=ml.Muon)",
            got="no trainable matrix inside of units",
            expected="at least one",
            do='name the repeated layers in units=, or give ml.group(..., kind="muon")',
        )


def torchs_muon(
    torch_groups: Sequence[Mapping[str, Any]], options: Sequence[Mapping[str, Any]], kind: str
) -> Iterator[ParameterGroup]:
    """Yield groups, still without parameters, for those of torch's Muon and AdamW. ``options`` has
    all that each has but the rate. Raises ConfigError for what the engine's Muon does not have."""
    for torch_group, own in zip(torch_groups, options, strict=True):
        lr = float(torch_group["lr"])
        if "momentum" in own:
            _require_valid(f"shard(optimizer={kind})", own)
            yield MuonGroup(lr, own, (), kind, MUON)
        else:
            kept = {name: own[name] for name in ("betas", "eps", "weight_decay")}
            yield ParameterGroup(lr, kept, (), kind, MUON)
