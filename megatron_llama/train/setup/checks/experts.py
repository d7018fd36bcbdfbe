"""Checks of models with experts."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from megatron_llama.config.parse import flag
from megatron_llama.config.schema import Config, ModelConfig
from megatron_llama.engine.offload_options import ZENFLOW
from megatron_llama.errors import counted, describe, nearest_divisors
from megatron_llama.model.plan.experts import sparse_layers


def routing_problems(model: ModelConfig) -> Iterator[str]:
    """Yield numbers of experts, and of dense blocks, that do not fit each other."""
    if model.num_experts > 0 and not 0 < model.num_experts_per_tok <= model.num_experts:
        yield describe(
            flag("num_experts_per_tok"),
            got=model.num_experts_per_tok,
            expected=f"a number from 1 to num_experts {model.num_experts}",
            do="give --num-experts-per-tok",
        )
    layers = model.num_hidden_layers
    strange = [layer for layer in model.mlp_only_layers if not 0 <= layer < layers]
    if strange and layers > 0:
        yield describe(
            flag("mlp_only_layers"),
            got=" ".join(map(str, strange)),
            expected=f"numbers of blocks, from 0 to {layers - 1}",
            do="leave these out",
        )


def division_problems(config: Config, dp: int) -> Iterator[str]:
    """Yield problems of ranks that divide experts among them. ``dp``: data-parallel ranks; 0:
    unknown."""
    parallel = config.parallel
    ep = parallel.expert_model_parallel_size
    name = flag("expert_model_parallel_size")
    experts = config.model.num_experts
    common = gcd(experts, dp)
    if experts == 0:
        yield describe(name, got=ep, expected="1 for a model without experts", do="leave it out")
    elif experts % ep:
        yield describe(
            name,
            got=ep,
            expected=f"a divisor of num_experts {experts}",
            do=f"choose {nearest_divisors(common, ep)}",
        )
    if dp and dp % ep:
        yield describe(
            name,
            got=ep,
            expected=f"a divisor of the {counted(dp, 'data-parallel rank')}",
            do=f"choose {nearest_divisors(common, ep)}, or start processes for a multiple of {ep} "
            "data-parallel ranks",
        )
    excluded = (
        (
            parallel.exchanges_tokens and config.training.fp8 == "tensorwise",
            "--moe-token-dispatcher-type alltoall and --fp8 tensorwise",
            "allgather or blockwise: rows that have been exchanged do not say of which microbatch "
            "they are, and each has a scale of its own",
        ),
        (
            parallel.data_parallel_shard_size % ep > 0,
            f"--data-parallel-shard-size {parallel.data_parallel_shard_size}",
            f"a multiple of {ep}, so that ranks with the same experts share buckets",
        ),
    )
    for is_given, got, expected in excluded:
        if is_given:
            yield describe(
                name, got=f"{ep} with {got}", expected=expected, do="change one of the two"
            )


def expert_problems(config: Config) -> Iterator[str]:
    """Yield options that are not written for models with experts."""
    parallel = config.parallel
    training = config.training
    tp = parallel.tensor_model_parallel_size
    excluded = (
        (
            tp > 1 and not parallel.sequence_parallel,
            f"--tensor-model-parallel-size {tp} without --sequence-parallel",
            "both: every tensor-parallel rank sends its own part of the sequence through whole "
            "experts",
        ),
        (
            tp > 1 and parallel.tp_comm_overlap != "0",
            f"--tp-comm-overlap {parallel.tp_comm_overlap}",
            "0: between attention and experts no message is cut",
        ),
        (
            training.compile and parallel.exchanges_tokens,
            "--compile and --moe-token-dispatcher-type alltoall",
            "allgather, by which experts have as many rows in each step: kernels are compiled for "
            "a number of rows",
        ),
        (
            training.cuda_graph_scope != "none",
            f"--cuda-graph-scope {training.cuda_graph_scope}",
            "none: tokens of experts are counted into other tensors in each pass, and nothing "
            "shows that their products can be captured",
        ),
        (
            config.offload.optimizer_offload == ZENFLOW,
            f"--optimizer-offload {ZENFLOW}",
            "exact: columns are chosen for a whole parameter, and those of one expert have nothing "
            "in common with those of the next",
        ),
    )
    for is_given, got, expected in excluded:
        if is_given:
            yield describe(
                flag("num_experts"),
                got=f"{config.model.num_experts} with {got}",
                expected=expected,
                do="change one of the two",
            )


def router_loss_problems(config: Config) -> Iterator[str]:
    """Yield losses of routers that have no coefficient, no type, or no routers with a softmax."""
    training = config.training
    kind = training.moe_router_load_balancing_type
    coefficient = training.moe_aux_loss_coeff
    missing = (
        "a model with blocks of experts, whose routers have such losses"
        if not sparse_layers(config.model)
        else "none of them: they are of the softmax of a router, and this one's is a sigmoid"
        if config.model.moe_router_score_function == "sigmoid"
        else ""
    )
    if missing:
        names = ("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff")
        given = [name for name in names if getattr(training, name) not in ("none", 0.0)]
        yield describe(
            ", ".join(map(flag, given)),
            got=" and ".join(str(getattr(training, name)) for name in given),
            expected=missing,
            do="leave it out",
        )
    elif coefficient >= 0 and (kind == "none") != (coefficient == 0):
        yield describe(
            flag("moe_aux_loss_coeff"),
            got=f"{coefficient:g} with {flag('moe_router_load_balancing_type')} {kind}",
            expected="a loss and its coefficient, or neither",
            do="give --moe-router-load-balancing-type seq_aux_loss or another, and a coefficient "
            "as 0.01, or leave both out",
        )
