"""The runtime: evaluation is the loss of training, memory goes back, the loss is the mean over all target tokens."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from megatron_llama.config.schema import Config
from megatron_llama.data.loader import Batch
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.plan.weight_access import WeightAccess
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.model.llama import Stage, build_stages
from megatron_llama.model.load import load_stages, rank_specs
from megatron_llama.model.plan.freeze import is_frozen
from megatron_llama.pipeline.fixed_weights import FixedWeights
from megatron_llama.pipeline.runtime import Engine, PipelineRuntime
from megatron_llama.pipeline.scoring import score_tokens
from torch import Tensor

from tests.harness import Cluster
from tests.parallel.cases import GLOBAL_BATCH_SIZE, MODEL, SEQ_LENGTH, Layout, Trainer, batch, initial_weights, trainer
from tests.torch_twin import hf_model

SINGLE = Place(0, 1, 0)
SPREAD = [
    Layout(microbatches=2),
    Layout(tp=2, pp=2, dp=2, sp=True, microbatches=2, tied=True),
    Layout(cp=2, dp=2, microbatches=2),
    Layout(pp=2, virtual=2, microbatches=4, schedule="interleaved", tied=True),
    Layout(pp=2, virtual=2, microbatches=4, schedule="zb-v", tied=True),
    Layout(pp=4, microbatches=4, schedule="zb-h1"),
    Layout(tp=4, kv_heads=1, microbatches=2),
]
def evaluate_and_train(place: Place, layout: Layout) -> list[tuple[float, float]]:
    """For three steps: the loss of the batch evaluated, then trained on."""
    run, pairs = trainer(place, layout), []
    for index in range(3):
        evaluated, tokens = run.runtime.evaluate(run.batches(index))
        assert not evaluated.requires_grad and tokens == GLOBAL_BATCH_SIZE * SEQ_LENGTH
        pairs.append((evaluated.item(), run.step(index)[0].item()))
    return pairs


@pytest.mark.long
@pytest.mark.parametrize("layout", SPREAD, ids=lambda layout: layout.name)
def test_evaluation_sees_the_newest_weights_and_changes_nothing(cluster: Cluster, layout: Layout) -> None:
    """The loss of a batch is the same evaluated right after an update and in the training step that follows."""
    found = cluster.run(layout.world_size, evaluate_and_train, layout)
    assert all(pairs == found[0] for pairs in found)
    assert all(evaluated == trained for evaluated, trained in found[0])
    assert len({trained for _, trained in found[0]}) == 3
    alone = evaluate_and_train(SINGLE, layout.reference)
    assert [trained for _, trained in found[0]] == pytest.approx([trained for _, trained in alone], rel=1e-6)


def fixed(config: Config, mesh: Mesh, engine: Engine | None = None) -> tuple[dict[int, Stage], PipelineRuntime]:
    """A model without an optimizer."""
    stages = build_stages(config, mesh)
    load_stages(stages.values(), rank_specs(config, mesh), initial_weights(), dtype=torch.float32, device=mesh.device)
    return stages, PipelineRuntime(stages, engine or FixedWeights(), mesh, config, dtype=torch.float32)


def evaluate_fixed(place: Place, layout: Layout) -> float:
    config = layout.config()
    mesh = build_mesh(config, rank=place.rank, world_size=place.world_size, device=torch.device("cpu"))
    _, runtime = fixed(config, mesh)
    return runtime.evaluate(trainer(place, layout).batches(0))[0].item()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, sp=True),
        Layout(pp=2, virtual=2, microbatches=4, schedule="zb-v"),
        Layout(cp=2, dp=2, strategy="optim_grads_params"),
    ],
    ids=lambda layout: layout.name,
)
def test_a_model_without_optimizer_evaluates_alike(cluster: Cluster, layout: Layout) -> None:
    assert cluster.run(layout.world_size, evaluate_fixed, layout) == pytest.approx(
        [evaluate_and_train(SINGLE, layout.reference)[0][0]] * layout.world_size, rel=1e-6
    )


def scored(place: Place, layout: Layout) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Tokens, labels, losses and likeliest tokens of this rank's microbatches, of which every second one is half as long."""
    run = trainer(place, layout)
    batches = run.batches(0)
    for index in range(1, len(batches), 2):
        batches[index] = Batch(*(half[: SEQ_LENGTH // 2] for half in (batches[index].tokens, batches[index].labels)))
    found = score_tokens(run.runtime, batches)
    assert not any(losses.requires_grad for losses, _ in found)
    return [(batch.tokens, batch.labels, losses, likeliest) for batch, (losses, likeliest) in zip(batches, found, strict=True)]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(microbatches=2),
        Layout(tp=4, kv_heads=1, microbatches=2, tied=True),
        Layout(pp=2, virtual=2, microbatches=4, schedule="zb-v"),
        Layout(cp=2, dp=2, cp_comm="ring", strategy="optim_grads", microbatches=2),
        Layout(dp=2, strategy="optim_grads_params", microbatches=2),
        Layout(tp=2, pp=2, dp=2, sp=True, microbatches=2, strategy="optim_grads_params"),
    ],
    ids=lambda layout: layout.name,
)
def test_every_token_is_scored_as_transformers_does(cluster: Cluster, layout: Layout) -> None:
    """On every rank of a replica, with the weights where the engine has them."""
    model = replace(MODEL, tie_word_embeddings=layout.tied, num_key_value_heads=layout.kv_heads)
    reference = hf_model(model)
    for rank in cluster.run(layout.world_size, scored, layout):
        assert len({len(tokens) for tokens, *_ in rank}) == 2
        for tokens, labels, losses, likeliest in rank:
            with torch.no_grad():
                logits = reference(tokens.t()).logits.transpose(0, 1)
            torch.testing.assert_close(likeliest, logits.argmax(-1), rtol=0, atol=0)
            expected = -logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
            torch.testing.assert_close(losses, expected, rtol=1e-6, atol=5e-6)


@dataclass(frozen=True)
class Uneven:
    """Loss over unequal numbers of tokens in each microbatch of each rank."""

    layout: Layout
    weights: tuple[int, ...]
    """Counted tokens of each of the 8 samples, from the front."""


COUNTED = (1, 32, 0, 7, 30, 2, 0, 0)


def uneven_loss(place: Place, case: Uneven) -> tuple[float, float]:
    run = trainer(place, case.layout)
    size = 8 // (case.layout.dp * case.layout.microbatches)
    batches = []
    for microbatch in range(case.layout.microbatches):
        first = (microbatch * case.layout.dp + run.mesh.data_rank) * size
        plain = batch(range(first, first + size))
        counted = torch.tensor(case.weights[first : first + size])
        batches.append(replace(plain, loss_mask=(torch.arange(SEQ_LENGTH).unsqueeze(-1) < counted).float()))
    loss = run.runtime.step(batches)
    return loss.item(), run.optimizer.step(1e-3, clip=1.0).grad_norm.item()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(microbatches=8),
        Layout(dp=4),
        Layout(tp=2, pp=2, dp=2, sp=True, microbatches=2),
        Layout(cp=2, dp=2, cp_comm="ring", microbatches=2),
        Layout(pp=2, virtual=2, schedule="interleaved", microbatches=4),
    ],
    ids=lambda layout: layout.name,
)
def test_loss_is_the_mean_over_tokens_not_a_mean_of_means(cluster: Cluster, layout: Layout) -> None:
    expected = uneven_loss(SINGLE, Uneven(Layout(), COUNTED))
    for loss, norm in cluster.run(layout.world_size, uneven_loss, Uneven(layout, COUNTED)):
        assert loss == pytest.approx(expected[0], rel=1e-6)
        assert norm == pytest.approx(expected[1], rel=2e-5)


def test_loss_is_the_mean_of_single_samples_by_their_tokens() -> None:
    whole = [uneven_loss(SINGLE, Uneven(Layout(), tuple(n if i == s else 0 for i, n in enumerate(COUNTED))))[0] for s in range(8)]
    mean = sum(loss * count for loss, count in zip(whole, COUNTED, strict=True)) / sum(COUNTED)
    assert uneven_loss(SINGLE, Uneven(Layout(), COUNTED))[0] == pytest.approx(mean, rel=1e-6)


def test_a_batch_without_targets_has_no_loss_and_no_gradient() -> None:
    loss, norm = uneven_loss(SINGLE, Uneven(Layout(), (0,) * 8))
    assert loss == norm == 0.0


def live_activations(place: Place, layout: Layout) -> tuple[int, int]:
    """Outputs of this rank's stage that something still holds: the most at the start of a forward pass, and after the step."""
    run = trainer(place, layout)
    outputs: list[weakref.ref[torch.Tensor]] = []
    counts: list[int] = []

    def alive() -> int:
        return sum(output() is not None for output in outputs)

    [stage] = run.stages.values()
    stage.register_forward_pre_hook(lambda stage, inputs: counts.append(alive()))
    stage.register_forward_hook(lambda stage, inputs, output: outputs.append(weakref.ref(output)))
    run.step(0)
    assert len(outputs) == layout.microbatches
    return max(counts), alive()


def test_1f1b_holds_as_many_microbatches_as_stages_follow_and_gpipe_all(cluster: Cluster) -> None:
    """At the start of a forward pass: the outputs of the microbatches in flight. Afterwards nothing is left."""
    for schedule, expected in (("1f1b", [3, 2, 1, 0]), ("gpipe", [7, 7, 7, 7])):
        found = cluster.run(4, live_activations, Layout(pp=4, microbatches=8, schedule=schedule))
        assert found == [(count, 0) for count in expected], schedule


class Recording(FixedWeights):
    """Writes down which uses it was told of in advance, and which came."""

    def __init__(self) -> None:
        self.planned, self.used = list[Sequence[WeightAccess]](), list[list[WeightAccess]]()

    def begin_step(self, microbatches: int, accesses: Sequence[WeightAccess]) -> Tensor:
        self.begin_evaluation(accesses)
        return torch.ones(())

    def begin_evaluation(self, accesses: Sequence[WeightAccess]) -> None:
        self.planned.append(accesses)
        self.used.append([])

    def begin_preliminary(self, accesses: Sequence[WeightAccess]) -> None:
        self.begin_evaluation(accesses)

    def access(self, unit: int, backward: bool) -> None:
        self.used[-1].append(WeightAccess(unit, backward))


Gradients = dict[tuple[int, str], Tensor | None]
FROZEN = (("model.embed_tokens.*", "model.layers.0.*"), ("model.embed_tokens.*", "model.layers.[01].*"), ("model.layers.1.*attn*",))
"""The first block, two blocks, an attention."""


def announced(place: Place, layout: Layout) -> Gradients:
    """Checks the uses of two steps and evaluations of this rank. Returns the gradients of the last step, by pipeline rank and name."""
    config, engine = layout.config(), Recording()
    mesh = build_mesh(config, rank=place.rank, world_size=place.world_size, device=torch.device("cpu"))
    stages, runtime = fixed(config, mesh, engine)
    parameters = {name: parameter for stage in stages.values() for name, parameter in stage.named_parameters()}
    for spec in rank_specs(config, mesh):
        parameters[spec.name].requires_grad_(spec.trainable)
    batches = Trainer(layout, mesh, stages, None, runtime).batches(0)
    for run in (runtime.step, runtime.evaluate) * 2:
        for parameter in parameters.values():
            parameter.grad = None if run == runtime.step else parameter.grad
        run(batches)
    assert engine.used == [list(accesses) for accesses in engine.planned]
    training, evaluation, *again = engine.planned
    assert again[0] is training and again[1] is evaluation, "made once"
    units = sum(stage.units for stage in stages.values())
    forward = [WeightAccess(unit, False) for unit in range(units)]
    assert {access for access in training if not access.backward} == set(forward)
    assert sorted(evaluation, key=lambda access: access.unit) == [access for access in forward for _ in batches]
    return {(mesh.pp.rank, name): parameter.grad for name, parameter in parameters.items()}


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        Layout(microbatches=2, recompute="full"),
        Layout(pp=2, microbatches=4, schedule="gpipe", tied=True),
        Layout(pp=2, microbatches=4, schedule="zb-h1", recompute="selective"),
        Layout(pp=2, virtual=2, microbatches=4, schedule="interleaved", tied=True),
        Layout(pp=2, virtual=2, microbatches=4, schedule="zb-v", recompute="full", tied=True),
    ],
    ids=lambda layout: layout.name,
)
def test_the_engine_knows_every_use_in_advance(cluster: Cluster, layout: Layout) -> None:
    """What is frozen changes no other gradient, also when the first stage has nothing to train."""
    whole = cluster.run(layout.world_size, announced, layout)
    for freeze in FROZEN:
        found = cluster.run(layout.world_size, announced, replace(layout, freeze=freeze))
        for expected, gradients in zip(whole, found, strict=True):
            for (rank, name), gradient in gradients.items():
                source = (
                    "model.embed_tokens.weight"
                    if layout.tied and name == "lm_head.weight"
                    else name.replace("qkv_proj", "q_proj").replace("gate_up", "gate")
                )
                assert (gradient is None) is is_frozen(source, freeze), (freeze, name)
                assert gradient is None or torch.equal(gradient, expected[rank, name])


def leftovers(place: Place, layout: Layout) -> list[int]:
    """Bytes of tensors that are alive before the first step and after each of three."""
    run, sizes = trainer(place, layout), []
    run.optimizer.settle()
    for index in range(4):
        gc.collect()
        sizes.append(sum(thing.nbytes for thing in gc.get_objects() if isinstance(thing, torch.Tensor)))
        run.step(index)
        run.optimizer.settle()
    return sizes


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, microbatches=4),
        Layout(pp=2, virtual=2, microbatches=4, schedule="interleaved"),
        Layout(pp=2, microbatches=4, schedule="zb-h1"),
        Layout(pp=2, virtual=2, microbatches=4, schedule="zb-v", tied=True),
    ],
    ids=lambda layout: layout.name,
)
def test_a_step_leaves_nothing_behind(cluster: Cluster, layout: Layout) -> None:
    """Activations, messages and kept weight gradients are all gone: a step ends with as many bytes as there were before any."""
    for sizes in cluster.run(layout.world_size, leftovers, layout):
        assert len(set(sizes)) == 1, sizes
