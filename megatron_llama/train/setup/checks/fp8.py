"""Options and sizes with which layers cannot multiply in FP8 (``--fp8``)."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.config.parse import flag
from megatron_llama.config.schema import Config, ModelConfig
from megatron_llama.errors import describe
from megatron_llama.model.plan.fp8 import MULTIPLE, SIDE, TENSORWISE, fp8_layers
from megatron_llama.model.plan.params import kv_copies
from megatron_llama.model.plan.pieces import SYMMETRIC

MODEL_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


def fp8_problems(config: Config) -> Iterator[str]:
    """Yield what a resolved configuration with ``--fp8`` lacks, and what it excludes."""
    training = config.training
    parallel = config.parallel
    tp = parallel.tensor_model_parallel_size
    where = f"--fp8 {training.fp8}"
    if not training.bf16:
        other = "--fp16" if training.fp16 else "--fp64" if training.fp64 else "fp32"
        yield describe(
            where,
            got=other,
            expected="--bf16, in which all else is computed",
            do="give --bf16, or leave --fp8 out",
        )
    in_tensors = training.fp8 == TENSORWISE
    together = "layers in FP8 have not been tried with it"
    excluded = (
        (training.compile, "--compile", together),
        (
            training.cuda_graph_scope != "none",
            f"--cuda-graph-scope {training.cuda_graph_scope}",
            "weight codes that are made when a weight changes: a graph would make none",
        ),
        (
            tp > 1 and parallel.tp_comm_overlap == SYMMETRIC,
            f"--tp-comm-overlap {SYMMETRIC}",
            "a number of pieces or auto: the fused operators multiply in bf16",
        ),
        (
            in_tensors and tp > 1 and parallel.tp_comm_overlap not in ("0", SYMMETRIC),
            f"--tp-comm-overlap {parallel.tp_comm_overlap}",
            "whole messages, since a piece has no scale of its own",
        ),
    )
    for is_given, got, expected in excluded:
        if is_given:
            yield describe(where, got=got, expected=expected, do="leave one of the two out")
    if min(tp, *(getattr(config.model, name) for name in MODEL_SIZES)) <= 0:
        return
    if not fp8_layers(config):
        layers = config.model.num_hidden_layers
        yield describe(
            flag("fp8_bf16_layers"),
            got=f"{training.fp8_bf16_layers} first and last blocks of {layers}",
            expected="a block between them",
            do=f"give --fp8-bf16-layers {(layers - 1) // 2}, or leave --fp8 out",
        )
    if in_tensors and kv_copies(config.model, tp) > 1:
        keys = config.model.num_key_value_heads
        yield describe(
            where,
            got=f"--tensor-model-parallel-size {tp} with {keys} key/value heads",
            expected="a head for each rank: otherwise queries and shared heads are two tensors, "
            "which have one scale in one process",
            do=f"choose --tensor-model-parallel-size {keys} at most, or --fp8 blockwise",
        )
        return
    multiple = MULTIPLE if in_tensors else SIDE
    if strange := _strange_widths(config.model, tp, multiple):
        fitting = [s for s in range(1, tp) if not _strange_widths(config.model, s, multiple)]
        why = "as GPUs multiply them" if in_tensors else "so that no tile crosses a cut"
        yield describe(
            where,
            got=f"a rank's {', '.join(strange)} with --tensor-model-parallel-size {tp}",
            expected=f"multiples of {multiple}, {why}",
            do=f"choose --tensor-model-parallel-size {fitting[-1]}"
            if fitting
            else "leave --fp8 out: no layout of this model has them",
        )


def fp8_gather_problems(config: Config) -> Iterator[str]:
    """Yield what a resolved configuration with ``--fp8-gather`` lacks."""
    parallel = config.parallel
    if config.training.fp8 != TENSORWISE:
        yield describe(
            "--fp8-gather",
            got=f"--fp8 {config.training.fp8}",
            expected="--fp8 tensorwise, on whose scales all ranks agree",
            do="leave one of the two out",
        )
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        yield describe(
            "--fp8-gather",
            got="whole rows on every rank, which are not gathered",
            expected="--sequence-parallel",
            do="give it, or leave --fp8-gather out",
        )


def _strange_widths(model: ModelConfig, tp: int, multiple: int) -> list[str]:
    """Return the widths of a rank's matrices that are no such multiples, in words."""
    heads = model.num_attention_heads
    keys = model.num_key_value_heads
    copies = kv_copies(model, tp)
    shares = {
        "hidden size": (model.hidden_size, 1),
        "queries": (heads * model.head_dim, tp),
        "keys": (keys * copies * model.head_dim, tp),
        "intermediate size": (model.intermediate_size, tp),
    }
    if model.num_experts:
        from megatron_llama.model.plan.expert_fp8 import widths_of_experts  # of few models
        from megatron_llama.model.plan.experts import sparse_layers

        if sparse_layers(model) == model.num_hidden_layers:
            del shares["intermediate size"]  # which no block has
        shares |= {name: (width, 1) for name, width in widths_of_experts(model).items()}
    whole_heads = heads % tp == 0 and keys * copies % tp == 0
    return [
        f"{name} {width / ranks:g}"
        for name, (width, ranks) in shares.items()
        if width % (multiple * ranks) or not (whole_heads or ranks == 1)
    ]
