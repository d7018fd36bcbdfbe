"""Losses of routers: training with them is that of transformers, and what is told of them is true."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron_llama.cli import main
from megatron_llama.config.schema import Config
from megatron_llama.engine.mesh import Mesh
from megatron_llama.errors import ConfigError
from megatron_llama.launch.launcher import Place
from megatron_llama.model.llama import build_stages
from megatron_llama.model.nn.moe.balance import RouterLosses
from megatron_llama.model.nn.moe.routing import Routing
from megatron_llama.model.plan.activation_memory import Activations
from megatron_llama.model.plan.tensor_messages import block_messages, sparse_block_messages
from torch import Tensor, nn

from tests.harness import Cluster
from tests.model.families.test_experts import SPLIT, resolved
from tests.model.families.twins import TWINS, Z_LOSS, FamilyLayout, reference, routed_layouts
from tests.over_cases import over_cases
from tests.parallel.cases import deviation, global_samples, train, trainer


def some_layouts() -> list[Any]:
    """Of each loss one layout, each time another one; the first in every run of the tests, the others in long ones. All of them:
    ``tools/parity.py --families``."""
    mixtral, qwen = routed_layouts("mixtral"), routed_layouts("qwen3_moe")
    chosen = [qwen[0], mixtral[5], qwen[10], mixtral[15]]
    return [chosen[0], *(pytest.param(one, marks=pytest.mark.long) for one in chosen[1:])]


@pytest.mark.parametrize("layout", some_layouts(), ids=lambda one: one.name)
def test_training_is_that_of_transformers(cluster: Cluster, layout: FamilyLayout) -> None:
    layout = replace(layout, steps=6)
    row = reference(cluster, layout).row(layout.name, cluster.run(layout.world_size, train, layout)[0])
    assert row.loss_hf is not None and row.holds, row


Numbers = Mapping[str, float]


def numbers(place: Place, layout: FamilyLayout) -> tuple[float, float, Numbers, list[float]]:
    """The losses of an evaluation and of a step, the numbers of the step, and those of an evaluation behind it."""
    run = trainer(place, layout)
    batches = run.batches(0)
    evaluated, _ = run.runtime.evaluate(batches)
    loss, _ = run.step(0)
    told = {name: value.item() for name, value in run.runtime.numbers.items()}
    run.runtime.evaluate(batches)
    return evaluated.item(), loss.item(), told, [value.item() for value in run.runtime.numbers.values()]


def numbers_of_transformers(layout: FamilyLayout) -> Numbers:
    """Of the first step, by its router's logits."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    model = TWINS[layout.family].hf_model()
    sequences = global_samples(0)[:, :-1]
    with torch.no_grad():
        blocks = model(sequences, output_router_logits=True).router_logits
    experts, chosen = layout.model.num_experts, layout.model.num_experts_per_tok
    loads = torch.stack([torch.zeros(experts).index_add_(0, logits.topk(chosen).indices.flatten(), torch.ones(logits.shape[0] * chosen)) for logits in blocks])
    shares = loads / loads.sum(-1, keepdim=True)
    assert shares.min() > 0
    balance = {"global_aux_loss": [(logits,) for logits in blocks], "seq_aux_loss": [(part,) for logits in blocks for part in logits.chunk(len(sequences))]}
    losses = [load_balancing_loss_func(part, experts, chosen) / chosen for part in balance.get(layout.balance, [])]
    return {
        "load_balancing_loss": float(torch.tensor(losses).mean() if losses else load_balancing_loss_func(blocks, experts, chosen)),
        "z_loss": float(torch.stack([logits.logsumexp(-1).square().mean() for logits in blocks]).mean()),
        "experts/largest_load": float(shares.max() * experts),
        "experts/entropy": float(-(shares * shares.log()).sum(-1).mean() / math.log(experts)),
    }


@pytest.mark.parametrize(
    "layout",
    [
        FamilyLayout(family="qwen3_moe", tp=2, pp=2, sp=True, microbatches=2, recompute="full", balance="global_aux_loss", z_loss=Z_LOSS),
        FamilyLayout(family="qwen3_moe", tp=2, cp=2, sp=True, balance="seq_aux_loss", z_loss=Z_LOSS),
        FamilyLayout(family="qwen3_moe", dp=2, microbatches=2, balance="hf_aux_loss", z_loss=Z_LOSS),
        FamilyLayout(family="qwen3_moe", dp=2, ep=2, pp=2, microbatches=2, recompute="selective"),
    ],
)
def test_the_log_has_the_losses_of_the_global_batch(cluster: Cluster, layout: FamilyLayout) -> None:
    """And loads of experts without any losses. Counted once, also where blocks are computed again and where all is counted before the step;
    and neither the loss of the tokens nor evaluations have them."""
    ranks = cluster.run(layout.world_size, numbers, layout)
    evaluated, loss, told, behind = ranks[0]
    has = {"load_balancing_loss": layout.balance != "none", "z_loss": layout.z_loss > 0}
    expected = {name: value for name, value in numbers_of_transformers(layout).items() if has.get(name, True)}
    assert told.keys() == expected.keys() and all(math.isclose(told[name], expected[name], rel_tol=1e-6) for name in expected), (told, expected)
    assert evaluated == pytest.approx(loss, rel=1e-7) and all(map(math.isnan, behind)) and all(one[:3] == ranks[0][:3] for one in ranks)


def step_of_seven(place: Place, layout: FamilyLayout, filled: bool) -> tuple[float, float, Numbers]:
    """Loss, gradient norm and numbers of a step over seven samples: of no eighth, or of an eighth that is not in the loss."""
    run = trainer(place, layout)
    batches = run.batches(0)
    if filled:
        batches = [replace(one, loss_mask=torch.ones(one.labels.shape)) for one in batches]
        if run.mesh.data_rank == run.mesh.data_size - 1:
            assert batches[-1].loss_mask is not None
            batches[-1].loss_mask[:, -1] = 0.0
    else:
        batches = [replace(one, tokens=one.tokens[:, :7], labels=one.labels[:, :7]) for one in batches]
    loss = run.runtime.step(batches)
    told = {name: value.item() for name, value in run.runtime.numbers.items()}
    return loss.item(), run.optimizer.step([1e-3], clip=1.0).grad_norm.item(), told


def test_samples_that_fill_a_step_do_not_count(cluster: Cluster) -> None:
    """Also where a block with them is computed again in a backward pass."""
    for balance in ("seq_aux_loss", "global_aux_loss"):
        layout = FamilyLayout(family="mixtral", balance=balance, z_loss=Z_LOSS)
        loss, norm, told = cluster.run(1, step_of_seven, layout, False)[0]
        spread = replace(layout, dp=2, pp=2, microbatches=2, recompute="full")
        for found_loss, found_norm, found in cluster.run(4, step_of_seven, spread, True):
            assert (found_loss, found_norm) == (pytest.approx(loss, rel=1e-6), pytest.approx(norm, rel=2e-5))
            assert found == pytest.approx(told, rel=1e-6)


def test_the_loss_scale_of_fp16_scales_them(cluster: Cluster) -> None:
    """Gradients differ from those of fp32 by rounding, and not by a part of the scale."""
    layout = FamilyLayout(family="mixtral", balance="seq_aux_loss", z_loss=Z_LOSS, steps=2, loss_scale=1024.0)
    half, full, without = (cluster.run(1, train, one)[0].norms for one in (replace(layout, fp16=True), layout, replace(layout, balance="none", z_loss=0.0)))
    assert deviation(half, full) < 5e-3 < 0.02 < deviation(without, full)


def test_the_formula_of_memory_has_what_they_keep() -> None:
    for kind, samples in (("seq_aux_loss", 3), ("hf_aux_loss", 3), ("none", 1)):
        options: dict[str, object] = {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": 0.1 * (kind != "none"), "moe_z_loss_coeff": 0.1}
        config, plain = (resolved(micro_batch_size=samples, **more) for more in (options, {}))
        planned = [Activations.from_config(one).blocks(range(1), "none") for one in (config, plain)]
        assert kept(config, samples) - kept(plain, samples) == planned[0] - planned[1] > 0, kind


def kept(config: Config, samples: int) -> int:
    """Bytes that autograd keeps of a block in a step."""
    mesh = Mesh.single()
    [stage] = build_stages(config, mesh).values()
    stage = stage.to_empty(device="cpu")
    nn.init.normal_(stage.model.layers["0"].mlp.gate.weight)
    losses = RouterLosses(config, mesh)
    losses.attach([stage])
    losses.begin(torch.tensor(samples), torch.tensor(16 * samples), torch.ones(losses.shape, dtype=torch.float64))
    moe = stage.model.layers["0"].mlp
    x = torch.randn(16, samples, 32, requires_grad=True)
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        alive.append(tensor)
        return tensor

    alive: list[Tensor] = []
    has_losses = config.training.has_router_losses
    with losses.forward(None, torch.ones(()) if has_losses else None), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        moe(x)
    return sum(sizes.values())


@pytest.mark.long
def test_the_loss_of_sequences_is_that_of_megatron() -> None:
    """Value and gradient, of two sequences in one microbatch."""
    from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func

    config = resolved(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.1, micro_batch_size=2)
    losses = RouterLosses(config, Mesh.single())
    losses.begin(torch.tensor(2), torch.tensor(32), None)
    logits = torch.randn(16, 2, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    probabilities = logits.softmax(-1)
    theirs = []
    for sample in probabilities.unbind(1):
        counts = torch.zeros(6).index_add_(0, sample.topk(2).indices.flatten(), torch.ones(32))
        theirs.append(switch_load_balancing_loss_func(sample, counts, 16, 2, 6, 0.1))
    expected = torch.stack(theirs).mean()
    [gradient] = torch.autograd.grad(expected, logits)
    sums = torch.zeros(losses.shape, dtype=torch.float64)
    with losses.forward(sums, torch.ones(())):
        routing = losses.add(0, chosen_from(logits.flatten(0, 1)), 2)
    [found] = torch.autograd.grad((routing.weights * 0).sum(), logits)
    assert 0.1 * sums[0, 0].item() == pytest.approx(expected.item(), rel=1e-6) and gradient.norm() > 0
    assert float((found - gradient).norm() / gradient.norm()) < 1e-6


def chosen_from(logits: Tensor) -> Routing:
    probabilities = logits.softmax(-1)
    weights, experts = probabilities.topk(2)
    return Routing(experts, weights, logits, probabilities)


def test_messages_of_counts_are_planned() -> None:
    """One over tp for each block and microbatch, beside those of attention."""
    options = {**SPLIT, "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1, "micro_batch_size": 2}
    config = resolved(2, **options)
    sparse, dense = sparse_block_messages(config), block_messages(config)
    assert (sparse.forward, sparse.forward_bytes) == (dense.forward // 2 + 1, dense.forward_bytes // 2 + 2 * 6 * 4)


WRONG: list[tuple[dict[str, object], str]] = [
    ({"moe_aux_loss_coeff": 0.01}, "--moe-aux-loss-coeff: got 0.01 with --moe-router-load-balancing-type none, expected a loss and its coefficient"),
    ({"moe_router_load_balancing_type": "seq_aux_loss"}, "--moe-aux-loss-coeff: got 0 with --moe-router-load-balancing-type seq_aux_loss"),
    ({"moe_router_load_balancing_type": "aux_loss"}, "got aux_loss, expected none, seq_aux_loss, global_aux_loss or hf_aux_loss; give seq_aux_loss"),
    ({"moe_router_load_balancing_type": "sinkhorn"}, "--moe-router-load-balancing-type: got sinkhorn, expected none"),
    ({"moe_z_loss_coeff": -1.0}, "--moe-z-loss-coeff: got -1.0, expected 0 or more"),
    (
        {"model_type": "llama", "num_experts": None, "moe_router_topk": None, "moe_ffn_hidden_size": None, "moe_z_loss_coeff": 0.1},
        "--moe-z-loss-coeff: got 0.1, expected a model with blocks of experts",
    ),
    ({"decoder_sparse_step": 9, "moe_z_loss_coeff": 0.1}, "--moe-z-loss-coeff: got 0.1, expected a model with blocks of experts"),
]


@over_cases
@pytest.mark.parametrize(("options", "says"), WRONG)
def test_what_has_no_meaning_is_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolved(**options)
    assert says in str(error.value)


def test_other_commands_refuse_what_they_do_not_train(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01 --train-data x"
    assert main(["align", "--method", "kto", *words.split()]) == 2
    assert "--moe-router-load-balancing-type: got global_aux_loss, with --method kto, expected seq_aux_loss" in capsys.readouterr().err
    assert main(["sft", *words.split(), "--neftune-noise-alpha", "5"]) == 2
    assert "--neftune-noise-alpha: got a value, with --moe-router-load-balancing-type global_aux_loss, expected seq_aux_loss" in capsys.readouterr().err
