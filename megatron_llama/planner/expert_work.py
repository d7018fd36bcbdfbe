"""The work of a block with experts, in integers: products, rows that are moved, messages, bytes.

Counts are those of equally loaded experts. Memory and messages are read from the plans of a run
(``model/plan/expert_memory.py``, ``model/plan/dispatch.py``); they do not depend on the load.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from megatron_llama.config.schema import Config, ModelConfig
from megatron_llama.engine.plan.specs import ParamSpec
from megatron_llama.model.plan.activation_memory import Activations
from megatron_llama.model.plan.dispatch import dispatch_messages
from megatron_llama.model.plan.expert_memory import ExpertActivations
from megatron_llama.model.plan.experts import DOWN, GATE_UP, ROUTER, SHARED, is_sparse
from megatron_llama.model.plan.params import Shapes
from megatron_llama.model.plan.router_losses import count_bytes
from megatron_llama.model.plan.tensor_messages import BlockMessages
from megatron_llama.planner.training_job import Matmul


@dataclass(frozen=True)
class ExpertWork:
    """What a block with experts has in the place of an MLP: on one rank, for one microbatch."""

    ranks: int
    """Ranks that divide the experts, ep."""
    count: int
    """Experts of a rank."""
    grouped: tuple[Matmul, Matmul]
    """Forward products of one expert with the tokens that are sent to it."""
    shared: tuple[Matmul, ...]
    """Forward products of the expert of all tokens."""
    router: Matmul
    """Its forward product, which is at least in fp32."""
    moved: int
    """Bytes that a forward pass reads and writes without multiplying."""
    messages: BlockMessages
    """Those over the ranks that divide experts."""
    counted: int
    """Bytes of the message that counts the tokens of a sequence; 0 without one."""
    kept: int
    """Bytes that autograd keeps of the whole block, as it recomputes."""
    working: int
    """Bytes for its backward pass besides."""
    numel: int
    """Elements of a rank's experts."""
    others_numel: int
    """Elements of router and shared expert."""


def expert_work(config: Config) -> ExpertWork:
    """Return the work of a block with experts of a resolved configuration."""
    model = config.model
    granularity = config.parallel.recompute_granularity
    shape = Activations.from_config(config)
    assert isinstance(shape, ExpertActivations)
    tokens = shape.tokens // shape.tp if shape.sequence_parallel else shape.tokens
    experts = model.num_experts
    # Of a rank's experts, the tokens of all ranks that divide experts.
    rows = -(-shape.ep * tokens * model.num_experts_per_tok // experts)
    # Without the mapping ``rope_scaling`` a model is hashable.
    router, gate_up, down, *shared = _matrices(replace(model, rope_scaling=None))
    return ExpertWork(
        ranks=shape.ep,
        count=experts // shape.ep,
        grouped=(
            Matmul(rows, gate_up[0] // experts, gate_up[1]),
            Matmul(rows, down[0] // experts, down[1]),
        ),
        shared=tuple(Matmul(tokens, *matrix) for matrix in shared),
        router=Matmul(tokens, *router),
        moved=_moved_bytes(shape, tokens),
        messages=dispatch_messages(config),
        counted=count_bytes(config),
        kept=shape.sparse_block(granularity),
        working=shape.gradients(granularity),
        numel=sum(map(prod, (gate_up, down))) // shape.ep,
        others_numel=sum(map(prod, (router, *shared))),
    )


@lru_cache(maxsize=8)
def _matrices(model: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of router, experts and shared expert: a search asks for each layout, and
    the table of parameters names each expert."""
    layer = next(layer for layer in range(model.num_hidden_layers) if is_sparse(model, layer))
    return tuple(spec.shape for spec in Shapes(model).block(layer).params if ".mlp." in spec.name)


def used_numel(spec: ParamSpec, model: ModelConfig, tp: int) -> float:
    """Return the elements of a block's weight that a token meets on one of ``tp`` ranks, on
    average: of experts those that it is sent to; and since each rank has whole experts, and router,
    for its part of the tokens, a share of these."""
    if spec.name.endswith((GATE_UP, DOWN)):
        experts = model.num_experts // spec.ep
        return spec.numel * model.num_experts_per_tok / experts / tp
    is_whole = spec.name.endswith(ROUTER) or SHARED in spec.name
    return spec.numel / tp if is_whole else float(spec.numel)


def _moved_bytes(shape: ExpertActivations, tokens: int) -> int:
    """Return the bytes that the operators of ``model/nn/moe`` read and write in a forward pass of
    ``tokens`` of a rank, without products: each operator by itself, as none is fused."""
    model = shape.model
    itemsize = shape.itemsize
    wide = shape.fp32_itemsize
    # A narrow element is read, and written as a wide one.
    cast = itemsize + wide if itemsize < wide else 0
    hidden = model.hidden_size
    rows = shape.expert_rows
    routing = tokens * (hidden * cast + 3 * model.num_experts * wide)
    # Gathered rows are in memory, and so are both halves and the output of the activation.
    row = 2 * hidden * itemsize + 3 * model.moe_intermediate_size * itemsize
    # Each of a token's outputs is looked up, widened, weighted and added to the sum.
    output = 2 * itemsize + cast + 3 * wide
    if model.moe_apply_probs_on_input:
        row += hidden * 2 * (itemsize + wide)
    else:
        output += 2 * wide
    if shape.ep > 1:
        # Outputs of experts that are elsewhere are set to zero.
        output += 2 * wide
    gathered = shape.ep * tokens
    summed = gathered * hidden * (model.num_experts_per_tok * output + cast)
    shared = 0
    if inner := model.moe_shared_expert_intermediate_size:
        shared = tokens * 3 * (inner + hidden) * itemsize
    return routing + rows * row + summed + shared
