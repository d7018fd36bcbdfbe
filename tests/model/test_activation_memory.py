"""The formula against the storages that autograd holds in real runs, to the byte; and the peak of a schedule against a real peak."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from megatron_llama.config.schema import Config
from megatron_llama.engine.mesh import Mesh
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.model.llama import Stage, build_stages
from megatron_llama.model.load import load_stages, rank_specs
from megatron_llama.model.nn.context import local_sequence
from megatron_llama.model.nn.functional import Residual
from megatron_llama.model.plan.activation_memory import Activations
from megatron_llama.model.plan.chunks import GRANULARITIES, Granularity
from megatron_llama.model.positions import Positions
from megatron_llama.pipeline.build import compute_dtype
from megatron_llama.train.setup.memory import MemoryPlan, peak_of
from tools.overlap.loss import token_losses
from torch import Tensor, nn

from tests.harness import Cluster
from tests.parallel.cases import SEQ_LENGTH, Layout, batch, initial_weights, trainer

BATCH = 2


@dataclass(frozen=True)
class Run(Layout):
    """A layout of which some blocks recompute, in samples of SEQ_LENGTH tokens."""

    recompute_layers: str = "all"
    windows: bool = False
    """Half of each head rotates, and two of four layers have a window and a rotary table of their own."""
    fields: tuple[tuple[str, Any], ...] = ()
    """Of a model that is no LLaMA."""

    def config(self) -> Config:
        """See Layout."""
        config = super().config()
        parallel = replace(config.parallel, recompute_num_layers=self.recompute_layers)
        sizes = {"micro_batch_size": BATCH, "seq_length": SEQ_LENGTH, "global_batch_size": BATCH * self.dp * self.microbatches}
        model = replace(config.model, **dict(self.fields))
        if self.windows:
            types = ("full_attention", "sliding_attention") * 2
            model = replace(model, sliding_window=7, layer_types=types, partial_rotary_factor=0.5, rope_local_base_freq=100.0)
        return replace(config, model=model, parallel=parallel, training=replace(config.training, **sizes))


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def kept(function: Callable[[], Any], uncounted: set[int]) -> int:
    """Bytes of the storages that autograd keeps for a function's backward pass, whole even where only a part is saved."""
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[storage(tensor)] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive = function()
    del alive
    return sum(tensor.untyped_storage().nbytes() for key, tensor in found.items() if key not in uncounted)


@dataclass(frozen=True)
class Parts:
    """The numbers of Activations, found or predicted."""

    embedding: int
    block: int
    head: int
    rotary: int
    stage: int


def build(place: Place, config: Config) -> tuple[Mesh, Stage]:
    mesh = build_mesh(config, rank=place.rank, world_size=place.world_size, device=torch.device("cpu"))
    stages = build_stages(config, mesh)
    load_stages(stages.values(), rank_specs(config, mesh), initial_weights(), dtype=compute_dtype(config), device=mesh.device)
    for stage in stages.values():
        for name, parameter in stage.named_parameters():
            parameter.requires_grad_(not config.lora.lora_rank or ".adapters." in name)
    return mesh, stages[0]


def measured(place: Place, layout: Run, per_sample: bool) -> Parts:
    config = layout.config()
    mesh, stage = build(place, config)
    data, model = batch(range(BATCH)), config.model
    ids = torch.arange(SEQ_LENGTH).unsqueeze(-1).repeat(1, BATCH) if per_sample else None
    positions = stage.positions(SEQ_LENGTH, mesh.device, ids)
    tokens, labels = (local_sequence(whole, mesh.cp) for whole in (data.tokens, data.labels))
    weights = {storage(parameter) for parameter in stage.parameters()}
    factors = positions.chunks and positions.chunks.temperatures
    tables = [part for part in (positions.cos, positions.sin, positions.sliding_cos, positions.sliding_sin, factors) if part is not None]
    table = set(map(storage, tables))

    def loss() -> Tensor:
        if model.num_labels:
            scores: Tensor = stage(tokens, positions)
            return scores.square().sum()  # keeps the scores, as their objective does
        return token_losses(stage(tokens, positions), labels, mesh.tp, model.vocab_size)

    blocks: nn.Module = stage.model.layers
    x = stage.model.embed_tokens(tokens).detach().requires_grad_()
    length = SEQ_LENGTH // layout.cp // (layout.tp if layout.sp else 1)
    assert x.shape == (length, BATCH, model.hidden_size)
    rotary = sum(tensor.untyped_storage().nbytes() for tensor in tables)
    headless = kept(lambda: several(blocks, model.num_hidden_layers, stage.model.embed_tokens(tokens), positions), weights | table)
    return Parts(
        embedding=kept(lambda: stage.model.embed_tokens(tokens), weights),
        block=kept(lambda: several(blocks, 1, x, positions), weights | table),
        head=kept(loss, weights | table) - headless,
        rotary=rotary,
        stage=kept(loss, weights | table) + rotary,
    )


def several(blocks: Any, count: int, x: Tensor, positions: Positions) -> Tensor:
    residual = Residual(x)
    for block in list(blocks.values())[:count]:
        residual = block(residual, positions)
    return residual.sum()


def predicted(layout: Run, per_sample: bool) -> Parts:
    config = layout.config()
    config = replace(config, data=replace(config.data, reset_position_ids=per_sample))
    shape, layers = Activations.from_config(config), config.model.num_hidden_layers
    recomputing = layers if layout.recompute_layers == "all" else int(layout.recompute_layers)
    stage = shape.stage(range(layers), layout.recompute, recomputing, first=True, last=True)
    return Parts(shape.embedding, shape.blocks(range(1), layout.recompute), shape.head(in_chunks=False), shape.rotary, stage)


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
FIELDS: dict[str, dict[str, Any]] = {
    "biases": {"attention_bias": True, "mlp_bias": True},
    "norms of heads": {"qk_norm": "head", "apply_layernorm_1p": True, "add_qkv_bias": True},
    "norms of projections": {"qk_norm": "projection"},
    "norms behind": {"norm_position": "after", "hidden_act": "gelu_pytorch_tanh"},
    "norms before and behind": {"norm_position": "both", "embedding_multiplier": 8.0},
    "capped logits": {"final_logit_softcapping": 30.0},
    "experts": EXPERTS,
    "llama4": EXPERTS
    | {"model_type": "llama4_text", "moe_shared_expert_intermediate_size": 40, "moe_router_score_function": "sigmoid"}
    | {"moe_apply_probs_on_input": True, "qk_norm": "l2", "attention_chunk_size": 64, "attn_temperature_tuning": True, "floor_scale": 4}
    | {"layer_types": ("chunked_attention", "full_attention") * 2},
    "experts in every second block": EXPERTS | {"decoder_sparse_step": 2, "norm_topk_prob": True, "qk_norm": "head"},
}
PLAIN = [Run(), Run(tp=2, sp=True), Run(tp=2, kv_heads=1), Run(cp=2)]
DIVIDED = [Run(dp=2, ep=2), Run(tp=2, sp=True, dp=2, ep=2), Run(dp=3, ep=3)]
"""The last ranks have two experts each, for all that a token may have. Where tokens are exchanged, the plan has the largest load: that
of tokens that have all experts."""
SPREAD = [
    *PLAIN,
    Run(kv_heads=4),
    Run(tp=2),
    Run(tp=2, kv_heads=1, sp=True),
    Run(cp=2, tp=2, sp=True, cp_comm="ring"),
    Run(windows=True),
    Run(cp=2, windows=True),
    Run(cp=2, cp_comm="a2a"),
    Run(cp=4, cp_comm="a2a", windows=True),
    Run(cp=4, cp_comm="a2a+p2p", kv_heads=1),
    Run(recompute_layers="1"),
    Run(tp=2, recompute_layers="3"),
    *(replace(run, lora=4) for run in (Run(), Run(tp=2), Run(tp=2, sp=True), Run(tp=2, kv_heads=1, sp=True))),
    *(replace(run, fields=tuple(fields.items())) for fields in FIELDS.values() for run in PLAIN),
    *(replace(run, fields=tuple((EXPERTS | {"num_experts_per_tok": 3}).items())) for run in DIVIDED),
    *(replace(run, exchange=True, fields=tuple((EXPERTS | {"num_experts_per_tok": 6}).items())) for run in DIVIDED),
    *(replace(run, fields=(("num_labels", 1),)) for run in PLAIN if run.kv_heads == 2),
]


@pytest.mark.few(9, all=60)
@pytest.mark.parametrize("recompute", GRANULARITIES)
@pytest.mark.parametrize("precision", ["fp32", "bf16", pytest.param("fp64", marks=pytest.mark.long)])
@pytest.mark.parametrize("layout", SPREAD, ids=lambda layout: " ".join((layout.name, layout.recompute_layers, *dict(layout.fields))))
def test_formula_is_what_autograd_keeps(
    cluster: Cluster, layout: Run, recompute: Granularity, precision: Literal["fp32", "bf16", "fp64"]
) -> None:
    run = replace(layout, recompute=recompute, bf16=precision == "bf16", fp64=precision == "fp64")
    if run.lora:  # of the other parts the formula knows no additions
        assert {found.block for found in cluster.run(run.world_size, measured, run, False)} == {predicted(run, False).block}
        assert (predicted(run, False).block > predicted(replace(run, lora=0), False).block) is (recompute != "full")
        return
    assert cluster.run(run.world_size, measured, run, False) == [predicted(run, False)] * run.world_size


def test_a_reward_model_keeps_no_logits() -> None:
    heads = [predicted(Run(fields=fields), False).head for fields in ((("num_labels", 1),), ())]
    assert heads[0] < heads[1] / 2


def test_positions_of_each_sample(cluster: Cluster) -> None:
    run = Run(cp=2)
    assert cluster.run(2, measured, run, True) == [predicted(run, True)] * 2
    assert predicted(run, True).rotary == BATCH * predicted(run, False).rotary


class Live:
    """Bytes that autograd holds now, and the most it has held: every saved tensor is kept by a wrapper of its own."""

    def __init__(self, uncounted: set[int]) -> None:
        self.uncounted, self.users, self.now, self.peak = uncounted, Counter[int](), 0, 0

    def pack(self, tensor: Tensor) -> Saved:
        key, size = storage(tensor), tensor.untyped_storage().nbytes()
        saved = Saved(tensor)
        if key not in self.uncounted and size > 8:  # the counts and scales of the whole step are numbers
            self.now += size * (self.users[key] == 0)
            self.users[key] += 1
            weakref.finalize(saved, self.release, key, size)
        self.peak = max(self.peak, self.now)
        return saved

    def release(self, key: int, size: int) -> None:
        self.users[key] -= 1
        self.now -= size * (self.users[key] == 0)


class Saved:
    """One saved tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def ids_at_backward(place: Place, layout: Run) -> list[bool]:
    """Whether somebody holds the token ids that the first stage was given, when the backward pass of a unit begins."""
    run = trainer(place, layout)
    [stage] = run.stages.values()
    given, held = list[weakref.ref[Tensor]](), list[bool]()
    announce = stage.on_weight_access

    def on_weight_access(unit: int, backward: bool) -> None:
        if backward:
            held.append(given[-1]() is not None)
        announce(unit, backward)

    stage.on_weight_access = on_weight_access
    stage.register_forward_pre_hook(lambda module, args: given.append(weakref.ref(args[0])))
    run.step(0)
    return held


@pytest.mark.long
def test_no_token_ids_are_kept_beside_those_that_autograd_keeps(cluster: Cluster) -> None:
    """With cp they are a copy of this rank's part, and with tp autograd keeps rows instead."""
    run = Run(cp=2, tp=2)
    assert cluster.run(4, ids_at_backward, run) == [[False] * (run.layers + 1)] * 4


def peak_of_a_step(place: Place, layout: Run) -> tuple[int, int]:
    run = trainer(place, layout)
    run.step(0)
    live = Live({storage(parameter) for stage in run.stages.values() for parameter in stage.parameters()})
    with torch.autograd.graph.saved_tensors_hooks(live.pack, lambda saved: saved.tensor):
        run.step(1)
    return live.peak, live.now


@pytest.mark.few(4)
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize(
    "layout",
    [
        Run(microbatches=4),
        Run(pp=2, microbatches=4),
        Run(pp=2, microbatches=4, schedule="gpipe", split=(3, 1)),
        Run(pp=2, microbatches=4, virtual=2, schedule="interleaved"),
    ],
    ids=lambda layout: layout.name,
)
def test_peak_of_a_schedule(cluster: Cluster, layout: Run, recompute: Granularity) -> None:
    run = replace(layout, recompute=recompute)
    plan = MemoryPlan(run.config(), run.world_size)
    found = cluster.run(run.world_size, peak_of_a_step, run)
    last = plan.partition.stages - 1
    # The runtime, not autograd, holds the gradient of the logits.
    each = [plan.kept(stage, recompute, plan.recompute_layers()) - plan.shape.logits * (stage == last) for stage in range(last + 1)]
    expected = [peak_of(actions, each, each) for actions in plan.schedule.ranks]
    assert found == [(peak, 0) for peak in expected]
