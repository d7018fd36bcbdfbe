"""Low-rank additions train as PEFT trains them, under every layout, and nothing else is trained, reduced or kept for training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron_llama.launch.launcher import Place
from megatron_llama.model.nn.lora import additions_off
from megatron_llama.model.plan.lora import adapter_shapes, is_adapter
from megatron_llama.model.plan.params import hf_shapes
from megatron_llama.pipeline.plan.run_engine import rank_bucket_plan

from tests.harness import Cluster
from tests.parallel.cases import LOSS_BOUND, NORM_BOUND, AdaptedWeights, Layout, Record, deviation, merged, train, train_twin, trainer
from tests.parallel.test_traffic import count
from tests.torch_twin import drawn, hf_model

ONE = Layout(lora=4, steps=6)
FEWER = replace(ONE, freeze=("model.layers.[02].*",))
SOME = replace(ONE, targets=("q_proj", "v_proj", "down_proj"))


def train_peft(layout: Layout, twin: torch.nn.Module | None = None) -> Record:
    """The same steps with PEFT and transformers' ``twin``; by default its LLaMA."""
    from peft import LoraConfig, get_peft_model

    config = layout.config()
    adapted = LoraConfig(r=layout.lora, lora_alpha=int(config.lora.lora_alpha), target_modules=list(layout.targets))
    model = get_peft_model(twin or hf_model(config.model), adapted)
    own = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    shapes = adapter_shapes(config.model, config.lora)
    ours = {f"base_model.model.{name.replace('.weight', '.default.weight')}": name for name in shapes}
    assert own.keys() == ours.keys()
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(drawn(layout.weights(), ours[name], shapes[ours[name]]))
    return train_twin(model, layout)


@pytest.fixture(scope="module")
def single(cluster: Cluster) -> dict[Layout, Record]:
    """One process, by what is trained."""
    return {layout: cluster.run(1, train, layout)[0] for layout in (ONE, SOME, replace(ONE, kv_heads=1), replace(ONE, tied=True), FEWER)}


@pytest.mark.parametrize("layout", [ONE, SOME], ids=["all", "some"])
def test_one_process_trains_as_peft_does(single: dict[Layout, Record], layout: Layout) -> None:
    theirs, ours = train_peft(layout), single[layout]
    assert deviation(ours.losses, theirs.losses) < LOSS_BOUND and deviation(ours.norms, theirs.norms) < NORM_BOUND
    assert ours.losses[0] != ours.losses[-1]


def test_nothing_but_the_additions_changes(single: dict[Layout, Record]) -> None:
    after = merged([single[SOME]])
    config = SOME.config()
    assert after.keys() == hf_shapes(config.model).keys() | adapter_shapes(config.model, config.lora).keys()
    for name, weight in after.items():
        assert torch.equal(weight, drawn(AdaptedWeights(), name, tuple(weight.shape))) is not is_adapter(name), name


def test_frozen_additions_stay(single: dict[Layout, Record]) -> None:
    after, start = merged([single[FEWER]]), AdaptedWeights()
    changed = {name.split(".")[2] for name, weight in after.items() if not torch.equal(weight, drawn(start, name, tuple(weight.shape)))}
    assert changed == {"1", "3"}


LAYOUTS = [
    Layout(tp=2, sp=True, recompute="selective"),
    Layout(tp=2, kv_heads=1),
    Layout(cp=2),
    Layout(tp=2, dp=2, strategy="optim_grads_params", freeze=FEWER.freeze),
    Layout(pp=2, microbatches=4, schedule="zb-h1", tp=2, sp=True),
    Layout(pp=2, virtual=2, microbatches=4, schedule="zb-v"),
    Layout(dp=2, pp=2, microbatches=2, tied=True),
    Layout(dp=2, strategy="optim_grads_params", microbatches=2, recompute="full", slots="1", grad_slots=1),
    Layout(dp=4, strategy="optim_grads_params", shard_size=2),
    Layout(tp=2, sp=True, targets=SOME.targets),
]


@pytest.mark.few(1, all=5)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_every_layout_trains_the_same(cluster: Cluster, single: dict[Layout, Record], layout: Layout) -> None:
    layout = replace(layout, lora=ONE.lora, steps=ONE.steps)
    records, expected = cluster.run(layout.world_size, train, layout), single[layout.reference]
    for record in records:
        assert deviation(record.losses, expected.losses) < LOSS_BOUND and deviation(record.norms, expected.norms) < NORM_BOUND
    ours, theirs = merged(records), merged([expected])
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        # Adam's first steps have the size of the learning rate whatever that of the gradient: rounding may turn one of six.
        torch.testing.assert_close(
            ours[name], weight, rtol=0, atol=2e-5 if is_adapter(name) else 0.0, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads"])
def test_a_step_sends_gradients_of_the_additions_alone(cluster: Cluster, strategy: str) -> None:
    layout = replace(ONE, dp=2, strategy=strategy, microbatches=2)  # type: ignore[arg-type]
    buckets = rank_bucket_plan(layout.config(), dp=2).buckets
    trained = [bucket for bucket in buckets if bucket.kind.trainable]
    shapes = adapter_shapes(layout.config().model, layout.config().lora)
    real = sum(rows * columns for rows, columns in shapes.values())
    assert real <= sum(bucket.numel for bucket in trained) < 1.1 * real < 0.2 * sum(bucket.numel for bucket in buckets)
    rounds = 2 if strategy == "optim_grads" else 1
    for rank in cluster.run(2, count, layout):
        sent = rank.traffic["dp", "all_reduce" if strategy == "no_shard" else "reduce_scatter"]
        assert sent == (len(trained) * rounds, 4 * rounds * sum(bucket.numel for bucket in trained))
        if strategy == "optim_grads":
            assert rank.traffic["dp_gather", "all_gather"] == (len(trained), 4 * sum(bucket.numel for bucket in trained))


def test_shared_heads_send_no_more_than_others(cluster: Cluster) -> None:
    """Queries have a weight of their own then, but its input, and what its additions make of it, travels with that of the others."""
    own, shared = (cluster.run(2, count, replace(ONE, tp=2, sp=True, kv_heads=heads))[0].traffic for heads in (2, 1))
    for operation in ("all_gather", "reduce_scatter"):
        assert shared["tp", operation] == own["tp", operation]


def kept_for_training(place: Place, layout: Layout) -> tuple[int, int, int]:
    """Elements of gradient slots, of gradient shards, and of the update rule's state."""
    run = trainer(place, layout)
    run.step(0)
    run.optimizer.settle()
    gradients = run.optimizer.gradients
    slots = sum(run.optimizer.bucket_plan.gradient_slot_numel().values())
    state = sum(
        tensor.numel()
        for bucket in gradients.trainable
        for tensor in run.optimizer.rules.by_bucket[bucket].state(bucket).values()
        if tensor.dim()
    )
    return slots, sum(shard.numel() for shard in gradients.shards.values()), state


def test_frozen_weights_have_no_gradients_and_no_moments(cluster: Cluster) -> None:
    layout = replace(ONE, dp=2)
    trained = sum(bucket.numel for bucket in rank_bucket_plan(layout.config(), dp=2).buckets if bucket.kind.adapter)
    assert cluster.run(2, kept_for_training, layout)[0] == (trained, trained // 2, trained)


def evaluate_without_additions(place: Place, layout: Layout) -> tuple[float, float, float]:
    """The loss of the base alone, of the model with additions that are off, and of the same when they are on again."""
    base = replace(layout, lora=0)
    plain = trainer(place, base)
    alone = plain.runtime.evaluate(plain.batches(0))[0].item()
    run = trainer(place, layout)
    with additions_off(run.stages.values()):
        off = run.runtime.evaluate(run.batches(0))[0].item()
    return alone, off, run.runtime.evaluate(run.batches(0))[0].item()


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, sp=True),
        Layout(dp=2, strategy="optim_grads_params", slots="1", microbatches=2),
    ],
    ids=lambda layout: layout.name,
)
def test_with_the_additions_off_the_model_is_its_base_bit_for_bit(cluster: Cluster, layout: Layout) -> None:
    for alone, off, on in cluster.run(layout.world_size, evaluate_without_additions, replace(layout, lora=4)):
        assert alone == off != on
