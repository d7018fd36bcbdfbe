"""The arguments of ``shard`` that say how: their checks, and what the engine obeys by them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from megatron_llama.engine.offload_options import OffloadConfig, ZenFlowConfig
from megatron_llama.engine.options import ADAM, EngineOptions, LossScaling, UpdateOptions
from megatron_llama.engine.plan.buckets import BY_TRAFFIC, NO_SHARD
from megatron_llama.engine.shard.buffers import WHOSE_BUFFERS
from megatron_llama.engine.shard.ignored import WHOSE_VALUES
from megatron_llama.engine.shard.optimizer import ParameterGroup
from megatron_llama.engine.shard.unit_policies import COMPUTE_DTYPES, DTYPE_NAMES, REDUCE_DTYPES
from megatron_llama.errors import describe

STRATEGIES = (NO_SHARD, *BY_TRAFFIC)
REDUCTIONS = ("mean", "sum")
OFFLOADS = ("none", "exact", "zenflow")
NO_FP8 = "none"
FP8 = (NO_FP8, "blockwise", "tensorwise")
SKIP = "skip"
WHAT_BECOMES_OF_UNUSED = (None, "zero", SKIP)


@dataclass(frozen=True)
class ShardOptions:
    """The arguments of ``shard``, where they are explained."""

    strategy: str
    clip: float
    microbatches: int
    param_slots: int | str
    grad_slots: int
    shard_size: int
    bucket_size: int
    dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    optimizer_offload: str
    reduction: str
    static_order: bool
    find_unused: bool
    ignored_values: str
    buffers: str
    loss_scaling: LossScaling | None
    offload_options: Mapping[str, Any]
    unused: str | None = None
    fp8: str = NO_FP8
    fp8_except: Sequence[str] = ()
    """The names of modules that the argument means."""

    def agreed(
        self, units: Sequence[str], groups: Sequence[ParameterGroup], ignored: Sequence[str]
    ) -> dict[str, object]:
        """Return everything that all ranks have to give alike, by name."""
        given = {name: value for name, value in vars(self).items() if name != "offload_options"}
        first = {"units": units, "strategy": self.strategy, "optimizer": groups}
        return {**first, "ignored": ignored, **given, **self.offload_options}

    def for_engine(
        self,
        dtype: torch.dtype,
        groups: Sequence[ParameterGroup],
        *,
        ranks: int,
        scales: bool = False,
    ) -> EngineOptions:
        """Return what the engine obeys. ``dtype`` is that in which it computes, ``scales`` says
        whether something is trained in fp16."""
        offload = OffloadConfig(optimizer_offload=self.optimizer_offload)  # type: ignore[arg-type]
        return EngineOptions(
            strategy=self.strategy,
            param_slots=None if self.param_slots == "all" else int(self.param_slots),
            grad_slots=self.grad_slots,
            bucket_size=self.bucket_size,
            dtype=DTYPE_NAMES[dtype],
            reduces_in_bf16=self.reduce_dtype == torch.bfloat16,
            grad_divisor=float(ranks) if self.reduction == "mean" else 1.0,
            find_unused=self.find_unused,
            clip=self.clip,
            # A frozen model has no groups, and its engine still wants the numbers of one.
            groups=tuple(group.update_options() for group in groups) or (UpdateOptions(),),
            rule=groups[0].rule if groups else ADAM,
            loss_scaling=(self.loss_scaling or LossScaling()) if scales else None,
            offload=_chosen(offload, self.offload_options),
            zenflow=_chosen(ZenFlowConfig(), self.offload_options),
        )

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the options alone."""
        for name, value, allowed in (
            ("strategy", self.strategy, STRATEGIES),
            ("reduction", self.reduction, REDUCTIONS),
            ("optimizer_offload", self.optimizer_offload, OFFLOADS),
            ("fp8", self.fp8, FP8),
            ("unused", self.unused, WHAT_BECOMES_OF_UNUSED),
            ("ignored_values", self.ignored_values, WHOSE_VALUES),
            ("buffers", self.buffers, WHOSE_BUFFERS),
            ("dtype", self.dtype, (None, *COMPUTE_DTYPES)),
            ("reduce_dtype", self.reduce_dtype, REDUCE_DTYPES),
        ):
            if value not in allowed:
                expected = f"one of {', '.join(map(str, allowed))}"
                yield describe(name, got=repr(value), expected=expected, do=f"give another {name}")
        for name, number, least in (
            ("microbatches", self.microbatches, 1),
            ("grad_slots", self.grad_slots, 1),
            ("bucket_size", self.bucket_size, 0),
            ("shard_size", self.shard_size, 0),
            *(() if self.param_slots == "all" else (("param_slots", self.param_slots, 1),)),
        ):
            if not isinstance(number, int) or isinstance(number, bool) or number < least:
                also = ', or "all"' if name == "param_slots" else ""
                expected = f"a whole number from {least}{also}"
                yield describe(name, got=repr(number), expected=expected, do=f"change {name}")
        # Refuses NaN as well, with which no comparison holds.
        if not 0.0 <= self.clip < float("inf"):
            yield describe(
                "clip", got=self.clip, expected="a norm, or 0 for none", do="change clip"
            )
        if self.loss_scaling is not None and not isinstance(self.loss_scaling, LossScaling):
            yield describe(
                "loss_scaling",
                got=repr(self.loss_scaling),
                expected="ml.LossScaling(...), or None for its defaults",
                do="write loss_scaling=ml.LossScaling(initial_loss_scale=4096.0)",
            )
        yield from self._offload_problems()

    def _offload_problems(self) -> Iterator[str]:
        """Yield keywords that are no option of the offload."""
        names = [
            option.name for group in (OffloadConfig, ZenFlowConfig) for option in fields(group)
        ]
        names = [name for name in names if name not in ("optimizer_offload", "zenflow_config")]
        for name, value in self.offload_options.items():
            if name not in names:
                expected = f"an argument of shard, or one of {', '.join(names)}"
                yield describe(name, got=repr(value), expected=expected, do="leave it out")


def _chosen(part: Any, options: Mapping[str, Any]) -> Any:
    """Return a part of the configuration with those of the options that belong to it."""
    names = {option.name for option in fields(part)}
    return replace(part, **{name: value for name, value in options.items() if name in names})
