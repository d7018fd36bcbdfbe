"""The parameters of a block of experts: the router, and the matrices of all experts.

Two weights hold all experts of a block, with two dims as those of a dense block: of each expert
the rows of its gate, then those of up; and the rows of its output. In HuggingFace's files every
expert has three matrices of its own.

Every tensor-parallel rank holds all of them. It sends the tokens of its part of the sequence
through them, so that gradients of the ranks are parts of a sum. With expert parallelism it holds
those of its number among ``ep`` data-parallel ranks (``with_own_experts``), and the router whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from megatron_llama.config.schema import ModelConfig
from megatron_llama.engine.plan.specs import HFSlice, ParamSpec, UnitSpec
from megatron_llama.model.families import FAMILIES
from megatron_llama.model.plan.fp8 import ROUTER
from megatron_llama.model.plan.params import Shapes

GATE_UP = "mlp.experts.gate_up_proj"
DOWN = "mlp.experts.down_proj"
SHARED = "mlp.shared_expert"
"""Names of the parameters in a block beside the router's, and of the tensors in transformers 5,
which stacks those of experts to [experts, rows, columns]; and of the expert of all tokens."""


def is_sparse(model: ModelConfig, layer: int) -> bool:
    """Whether a block has experts in the place of an MLP."""
    # Checks of a step of 0 ask this, too.
    turn = (layer + 1) % max(1, model.decoder_sparse_step) == 0
    return model.num_experts > 0 and turn and layer not in model.mlp_only_layers


def sparse_layers(model: ModelConfig) -> int:
    """Return the number of blocks with experts."""
    return sum(is_sparse(model, layer) for layer in range(model.num_hidden_layers))


def elements_in_place_of_mlps(model: ModelConfig) -> int:
    """Return the elements of all matrices that a token meets in blocks with experts: its own
    experts', the shared one's and the router's. Those of the MLPs that these blocks do not have are
    subtracted."""
    widths = model.num_experts_per_tok * model.moe_intermediate_size - model.intermediate_size
    widths += model.moe_shared_expert_intermediate_size
    per_layer = model.hidden_size * (3 * widths + model.num_experts)
    return sparse_layers(model) * per_layer


def router_name(model: ModelConfig) -> str:
    """Return the router's name in a block of HuggingFace's files."""
    return f"{FAMILIES[model.model_type].tensors.get('mlp.gate', 'mlp.gate')}.weight"


def expert_names(model: ModelConfig, expert: int) -> tuple[str, str, str]:
    """Return the names of the gate, up and output matrices of an expert, in a block of
    HuggingFace's files."""
    owner, *names = _expert_tensors(model.model_type)
    gate, up, down = (f"{owner}.{expert}.{name}.weight" for name in names)
    return gate, up, down


@cache
def _expert_tensors(model_type: str) -> tuple[str, ...]:
    """Return the family's names of all experts and of the three matrices of each: a plan asks for
    those of each expert."""
    theirs = FAMILIES[model_type].tensors
    matrices = (
        theirs.get(f"experts.{name}", name) for name in ("gate_proj", "up_proj", "down_proj")
    )
    return theirs.get("mlp.experts", "mlp.experts"), *matrices


def expert_params(shapes: Shapes, prefix: str) -> tuple[ParamSpec, ...]:
    """Return the parameters of a block of experts, in the order of its forward pass. ``prefix`` is
    the block's name."""
    model = shapes.model
    hidden = model.hidden_size
    inner = model.moe_intermediate_size
    experts = model.num_experts
    build = partial(
        ParamSpec,
        decay=True,
        copies=shapes.tp,
        partial_grad=shapes.sequence_parallel and shapes.tp > 1,
        stage=shapes.stage,
    )
    gates_and_ups, downs = [], []
    for expert in range(experts):
        gate, up, down = (f"{prefix}.{name}" for name in expert_names(model, expert))
        first = 2 * inner * expert
        gates_and_ups += [
            HFSlice(gate, (inner, hidden), first, inner),
            HFSlice(up, (inner, hidden), first + inner, inner),
        ]
        downs.append(HFSlice(down, (hidden, inner), hidden * expert, hidden))
    shape = (experts, hidden)
    router = HFSlice(f"{prefix}.{router_name(model)}", shape, 0, experts)
    return (
        build(f"{prefix}.{ROUTER}", shape, (router,)),
        build(f"{prefix}.{GATE_UP}", (experts * 2 * inner, hidden), tuple(gates_and_ups)),
        build(f"{prefix}.{DOWN}", (experts * hidden, inner), tuple(downs)),
        *_shared_params(model, prefix, build),
    )


def _shared_params(
    model: ModelConfig, prefix: str, build: Callable[..., ParamSpec]
) -> tuple[ParamSpec, ...]:
    """Return the matrices of the expert of all tokens, which every tensor-parallel rank holds."""
    inner, hidden = model.moe_shared_expert_intermediate_size, model.hidden_size
    if not inner:
        return ()
    theirs = FAMILIES[model.model_type].tensors.get(SHARED, SHARED)
    gate, up, down = (
        f"{prefix}.{theirs}.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")
    )
    wide, narrow = (inner, hidden), (hidden, inner)
    gate_up = (HFSlice(gate, wide, 0, inner), HFSlice(up, wide, inner, inner))
    return (
        build(f"{prefix}.{SHARED}.gate_up_proj.weight", (2 * inner, hidden), gate_up),
        build(f"{prefix}.{SHARED}.down_proj.weight", narrow, (HFSlice(down, narrow, 0, hidden),)),
    )


def experts_in(model: ModelConfig, spec: ParamSpec) -> int:
    """Return the number of experts whose matrices a parameter holds below each other; 1 for any
    other parameter."""
    return model.num_experts // spec.ep if spec.name.endswith((GATE_UP, DOWN)) else 1


def with_own_experts(unit: UnitSpec, ep: int, rank: int) -> UnitSpec:
    """Return the unit with those experts of its block that number ``rank`` of ``ep`` ranks has:
    neighbours in their order. A unit without experts stays as it is."""
    return replace(unit, params=tuple(_own(spec, ep, rank) for spec in unit.params))


def _own(spec: ParamSpec, ep: int, rank: int) -> ParamSpec:
    if not spec.name.endswith((GATE_UP, DOWN)):
        return spec
    rows = spec.shape[0] // ep
    first = rank * rows
    slices = tuple(
        replace(hf_slice, row=hf_slice.row - first)
        for hf_slice in spec.slices
        if first <= hf_slice.row < first + rows
    )
    return replace(spec, shape=(rows, *spec.shape[1:]), slices=slices, ep=ep)
