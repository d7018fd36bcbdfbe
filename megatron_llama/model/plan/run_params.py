"""A run's changes to the table of parameters (``params.py``): low-rank additions, frozen
parameters, Muon's matrices, and the group of each parameter.

Every feature has its own module, a function from units to units. Only this module has their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_llama.config.schema import Config, LoraConfig
from megatron_llama.engine.options import MUON
from megatron_llama.engine.plan.specs import UnitSpec
from megatron_llama.model.plan.freeze import is_frozen, with_frozen
from megatron_llama.model.plan.lora import NO_LORA, adapter_shapes, with_adapters
from megatron_llama.model.plan.param_groups import ParamGroups, with_groups
from megatron_llama.model.plan.params import (
    EMBEDDING,
    hf_shapes,
    partition_of,
    stage_units,
    whole_model,
)


def trained_units(
    units: Iterable[UnitSpec],
    *,
    freeze: Sequence[str] = (),
    lora: LoraConfig = NO_LORA,
    muon: bool = False,
    tp: int = 1,
    sequence_parallel: bool = False,
) -> tuple[UnitSpec, ...]:
    """Return the units of a stage as a run trains them, in forward order. ``freeze`` holds patterns
    of HuggingFace names. ``muon``: whether Muon updates the matrices of blocks."""
    adapted = (with_adapters(unit, lora, tp, sequence_parallel=sequence_parallel) for unit in units)
    frozen = (with_frozen(unit, freeze) for unit in adapted)
    if not muon:
        return tuple(frozen)
    from megatron_llama.engine.plan.muon import with_muon  # of few runs

    # Last: it leaves out low-rank additions and frozen parameters.
    return tuple(with_muon(unit) for unit in frozen)


def whole_model_units(config: Config, *, tp: int = 1) -> tuple[UnitSpec, ...]:
    """Return the whole model's units in one stage, as the first of ``tp`` ranks trains them."""
    model = config.model
    return trained_units(
        stage_units(model, whole_model(model), 0, tp=tp),
        freeze=config.optimizer.freeze,
        lora=config.lora,
        muon=config.optimizer.optimizer == MUON,
        tp=tp,
    )


def rank_units(
    config: Config, *, rank: int = 0, tp_rank: int = 0, ep_rank: int = 0
) -> tuple[tuple[UnitSpec, ...], ...]:
    """Return the units of every stage of one pipeline rank of a resolved configuration. ``ep_rank``
    is its number among those that divide experts."""
    partition = partition_of(config)
    ep = config.parallel.expert_model_parallel_size
    tp = config.parallel.tensor_model_parallel_size
    sequence_parallel = config.parallel.sequence_parallel
    groups = param_groups(config)
    stages = []
    for stage in partition.stages_of(rank):
        units = trained_units(
            stage_units(
                config.model,
                partition,
                stage,
                tp=tp,
                tp_rank=tp_rank,
                sequence_parallel=sequence_parallel,
            ),
            freeze=config.optimizer.freeze,
            lora=config.lora,
            muon=config.optimizer.optimizer == MUON,
            tp=tp,
            sequence_parallel=sequence_parallel,
        )
        if ep > 1:
            from megatron_llama.model.plan.experts import with_own_experts  # of few models

            units = tuple(with_own_experts(unit, ep, ep_rank) for unit in units)
        stages.append(tuple(with_groups(unit, groups) for unit in units))
    return tuple(stages)


def param_groups(config: Config) -> ParamGroups:
    """Return the groups of all parameters of a resolved configuration."""
    if not config.optimizer.param_group:
        return ParamGroups(config.optimizer, ())
    model = config.model
    return ParamGroups(config.optimizer, [*hf_shapes(model), *adapter_shapes(model, config.lora)])


def logged_group(config: Config) -> int:
    """Return the group whose learning rate a log line has: number 0, or the first in the model if
    ``--param-group`` matches every trained parameter."""
    groups = param_groups(config)
    trained = [spec for unit in whole_model_units(config) for spec in unit.params if spec.trainable]
    return min((groups.number(spec.slices[0].name) for spec in trained), default=0)


def trains_embedding(config: Config) -> bool:
    """Whether the embedding is trained: not frozen, nor beside low-rank additions."""
    return not config.lora.lora_rank and not is_frozen(EMBEDDING, config.optimizer.freeze)
