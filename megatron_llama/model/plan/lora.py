"""Low-rank additions (LoRA) to the table of parameters: which weights get one, and its halves."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter

from megatron_llama.config.schema import LoraConfig, ModelConfig
from megatron_llama.engine.plan.specs import HFSlice, ParamSpec, UnitSpec
from megatron_llama.model.families import FAMILIES
from megatron_llama.model.plan.params import QKV, SCORE, stage_units, whole_model

PROJECTIONS = LoraConfig().lora_target_modules
"""The linear layers of a transformer block, by LLaMA's names in HuggingFace."""
MODULES = (*QKV, "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
"""The same with the module of each, in the order of LLaMA's block."""
ROW_PARALLEL = ("o_proj", "down_proj")
"""Projections whose inputs are split over tp; the others' outputs are."""
LORA_A = "lora_A"
LORA_B = "lora_B"
NO_LORA = LoraConfig()


def is_adapter(name: str) -> bool:
    """Whether a tensor with a HuggingFace name is half of a low-rank addition."""
    return f".{LORA_A}." in name or f".{LORA_B}." in name


def adapter_names(name: str) -> tuple[str, str]:
    """Return the names of both halves of a weight's low-rank addition, as PEFT has them."""
    owner = name.removesuffix(".weight")
    return f"{owner}.{LORA_A}.weight", f"{owner}.{LORA_B}.weight"


def projections(model: ModelConfig) -> tuple[str, ...]:
    """Return the linear layers of a transformer block that may have additions, by their names in
    the HuggingFace model: all, or those of attention in a model with experts."""
    rows = dict.fromkeys(MODULES, 0)
    family = FAMILIES[model.model_type]
    # Experts get no additions, and neither do the MLPs of dense blocks beside them.
    modules = MODULES[: 4 if model.num_experts else None]
    theirs = (family.place(module, rows)[0] for module in modules)
    return tuple(dict.fromkeys(name.rpartition(".")[2] for name in theirs))


def projection_of(name: str) -> str:
    """Return ``q_proj`` of ``model.layers.0.self_attn.q_proj.weight``."""
    return name.split(".")[-2]


def with_adapters(
    unit: UnitSpec, lora: LoraConfig, tp: int, *, sequence_parallel: bool
) -> UnitSpec:
    """Return the unit with all its weights frozen except the score, which is new, and an addition
    after each weight that gets one."""
    if not lora.lora_rank:
        return unit
    params: list[ParamSpec] = []
    for spec in unit.params:
        params.append(replace(spec, trainable=spec.name == SCORE))
        if not unit.is_block or len(spec.shape) < 2:
            continue
        for name, parts in groupby(spec.slices, attrgetter("name")):
            if projection_of(name) in lora.lora_target_modules:
                params += _adapter(
                    spec, tuple(parts), lora.lora_rank, tp, sequence_parallel=sequence_parallel
                )
    return replace(unit, params=tuple(params))


def _adapter(
    spec: ParamSpec, parts: tuple[HFSlice, ...], rank: int, tp: int, *, sequence_parallel: bool
) -> tuple[ParamSpec, ParamSpec]:
    """Return A [rank, inputs] and B [outputs, rank] of the slices of a weight that are one
    HuggingFace tensor.

    The half at the weight's split side is split over tp too, the other half is repeated. A repeated
    half sees only a part of its gradient where the tp ranks compute with different inputs
    (row-parallel) or different positions (sequence parallelism)."""
    name = parts[0].name
    a, b = adapter_names(name)
    projection = projection_of(name)
    (outputs, inputs) = parts[0].shape
    rows = sum(piece.rows for piece in parts)
    local = f"{spec.name.removesuffix('.weight')}.adapters.{projection}"
    in_a = HFSlice(a, (rank, inputs), 0, rank, hf_col=parts[0].hf_col)
    in_b = tuple(
        HFSlice(b, (outputs, rank), piece.row - parts[0].row, piece.rows, hf_row=piece.hf_row)
        for piece in parts
    )
    build = partial(ParamSpec, decay=True, stage=spec.stage, adapter=True)
    first = build(f"{local}.{LORA_A}.weight", (rank, spec.shape[1]), (in_a,))
    second = build(f"{local}.{LORA_B}.weight", (rows, rank), in_b)
    if projection in ROW_PARALLEL:
        return first, replace(second, copies=tp, partial_grad=tp > 1)
    return replace(first, copies=tp, partial_grad=sequence_parallel and tp > 1), replace(
        second, copies=spec.copies, partial_grad=spec.partial_grad
    )


def adapter_shapes(model: ModelConfig, lora: LoraConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of both halves of every low-rank addition, in forward order; PEFT's
    names without its prefix."""
    units = stage_units(model, whole_model(model), 0)
    adapted = (with_adapters(unit, lora, 1, sequence_parallel=False) for unit in units)
    return {
        hf_slice.name: hf_slice.shape
        for unit in adapted
        for spec in unit.params
        for hf_slice in spec.slices
        if spec.adapter
    }


def trained_beside_adapters(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of the weights that ``--lora-rank`` trains whole: the score of a reward
    model, which is new. PEFT calls them modules to save."""
    return {SCORE: (model.num_labels, model.hidden_size)} if model.num_labels else {}
