"""Floating-point operations of a step, counted a second time from shapes of weights: padding, copies
and what is computed again included.

Matrix products and attention count, by the conventions of ``planner/kernels.py``: attention does two
products forward and five backward, of half of the square of scores. ``step_flops`` is for models of
which everything is trained.
"""

from __future__ import annotations

from math import prod

from megatron_llama.config.schema import Config
from megatron_llama.config.world import dp_size
from megatron_llama.engine.plan.specs import ParamSpec
from megatron_llama.model.plan.activation_memory import Activations
from megatron_llama.model.plan.lora import adapter_shapes
from megatron_llama.model.plan.params import padded_vocab_size, partition_of
from megatron_llama.model.plan.run_params import rank_units
from megatron_llama.planner.candidate import Candidate
from megatron_llama.planner.training_job import Matmul

PASSES = 3
"""Products with each weight: forward, the gradient of the input, that of the weight."""


def planned_flops(candidate: Candidate) -> float:
    """Forward and backward FLOPs of a token by the products that are planned, all scores counted and nothing twice. With low-rank
    additions the products with frozen weights have no third part. Of experts those that a token is sent to."""
    job = candidate.job
    model = candidate.config.model
    products = sum(product.n * product.k for product in job.matmuls) * job.tp * model.num_hidden_layers
    if (work := job.experts) is not None:
        # Of the tokens of a tensor-parallel rank; of a rank's experts those of all ranks that divide them.
        of_experts = sum(work.count * product.flops for product in work.grouped)
        of_experts += sum(product.flops for product in (work.router, *work.shared))
        in_place = of_experts // (2 * work.router.m) - sum(product.n * product.k for product in job.mlp) * job.tp
        products += round(job.sparse * model.num_hidden_layers) * in_place
    head = model.vocab_size * model.hidden_size
    additions = sum(map(prod, adapter_shapes(model, candidate.config.lora).values())) if job.additions else 0
    weights = (4.0 if job.additions else 6.0) * (products + head) + 6.0 * additions
    return weights + 12.0 * model.num_hidden_layers * model.num_attention_heads * model.head_dim * job.seq


def step_flops(config: Config, world_size: int, rank: int) -> int:
    """Of a pipeline rank in one step. ``config`` is resolved, with every ``auto`` decided."""
    training = config.training
    parallel = config.parallel
    shape = Activations.from_config(config)
    partition = partition_of(config)
    microbatches = training.global_batch_size // (training.micro_batch_size * dp_size(config, world_size))
    wanted = parallel.recompute_num_layers
    queries = config.model.num_attention_heads * config.model.head_dim // shape.tp
    scores = shape.tokens * training.seq_length * queries
    total = 0
    for stage, units in zip(partition.stages_of(rank), rank_units(config, rank=rank), strict=True):
        blocks = [unit for unit in units if unit.is_block]
        again = 0
        if parallel.recompute_granularity == "full":
            again = min(int(wanted), len(blocks)) if wanted.isdecimal() else len(blocks)
        for number, block in enumerate(blocks):
            products = sum(_product(spec, shape.tokens) for spec in block.params)
            total += (PASSES + (number < again)) * products + (2 + 5 + 2 * (number < again)) * scores
        if stage == partition.stages - 1:
            # A head that is the embedding of this rank is not listed with the stage.
            total += PASSES * Matmul(shape.tokens, *_head(config)).flops
    return microbatches * total


def _product(spec: ParamSpec, tokens: int) -> int:
    return Matmul(tokens, *spec.shape).flops if len(spec.shape) > 1 else 0


def _head(config: Config) -> tuple[int, int]:
    tp = config.parallel.tensor_model_parallel_size
    return padded_vocab_size(config.model, tp) // tp, config.model.hidden_size
