"""The engine on its own, with made-up gradients: against torch.optim.AdamW, with and without clipping, and when a gradient is
not finite."""

from __future__ import annotations

import pytest
import torch
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.engine.param_handle import param_handle_of
from megatron_llama.engine.pieces import shard_pieces, step_counts
from megatron_llama.launch.launcher import Place
from megatron_llama.model.plan.run_params import rank_units
from torch import Tensor, nn

from tests.harness import Cluster
from tests.parallel.cases import MODEL, OPTIMIZER, STRATEGIES, Layout, Trainer, trainer, whole_parameters
from tests.torch_twin import adamw

SINGLE = Place(0, 1, 0)
Gradients = dict[str, Tensor]


def gradients(run: Trainer, seed: int, scale: float) -> Gradients:
    """Normal numbers for every parameter."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator) * scale for name, p in parameters_of(run).items()}


def parameters_of(run: Trainer) -> Gradients:
    """By name."""
    return {name: parameter for stage in run.stages.values() for name, parameter in stage.named_parameters()}


def deliver(run: Trainer, values: Gradients) -> None:
    """One backward pass that finds exactly these gradients."""
    units = [unit for stage in rank_units(run.layout.config()) for unit in stage]
    specs = [spec for unit in reversed(units) for spec in reversed(unit.params)]
    parameters = parameters_of(run)
    run.optimizer.begin_step(1, ())
    for spec in specs:
        handle = param_handle_of(parameters[spec.name])
        assert handle is not None
        view, beta = handle.grad_view()
        assert beta == 0.0
        view.copy_(values[spec.name])
        handle.grad_written()


def state_of(engine: OverlappedDistributedOptimizer) -> list[Tensor]:
    """Copies of masters, moments and step counters."""
    engine.settle()
    pieces = [tensor.clone() for piece in shard_pieces(engine) for tensor in piece.tensors.values()]
    return pieces + [count.clone() for count in step_counts(engine)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("clip", [0.0, 1.0, 1e9])
def test_steps_equal_torch_adamw_with_clipping(clip: float, strategy: str) -> None:
    run = trainer(SINGLE, Layout(strategy=strategy))
    twins = {name: nn.Parameter(parameter.clone()) for name, parameter in whole_parameters(run)}
    optimizer = adamw(twins.values(), OPTIMIZER)
    for step, lr in enumerate((1e-3, 2e-3, 5e-4)):
        values = gradients(run, step, scale=0.1 * (step + 1))
        deliver(run, values)
        result = run.optimizer.step(lr, clip=clip)
        for name, twin in twins.items():
            twin.grad = values[name].clone()
        norm = torch.nn.utils.clip_grad_norm_(twins.values(), clip or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        assert float(result.skipped) == 0.0
        torch.testing.assert_close(result.grad_norm, norm, rtol=1e-6, atol=0.0)
        for name, parameter in whole_parameters(run):
            torch.testing.assert_close(parameter, twins[name].detach(), rtol=2e-6, atol=1e-7)


@pytest.mark.few(4)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(poison: float, clip: float, strategy: str) -> None:
    run = trainer(SINGLE, Layout(strategy=strategy))
    deliver(run, gradients(run, 0, scale=0.1))
    run.optimizer.step(1e-3, clip=clip)
    before = state_of(run.optimizer)
    bad = gradients(run, 1, scale=0.1)
    bad["model.layers.2.mlp.down_proj.weight"][3, 4] = poison
    deliver(run, bad)
    result = run.optimizer.step(1e-3, clip=clip)
    assert float(result.skipped) == 1.0 and not bool(result.grad_norm.isfinite())
    assert same(before, state_of(run.optimizer))
    # The next step goes on as if the bad one had not been.
    deliver(run, gradients(run, 2, scale=0.1))
    assert float(run.optimizer.step(1e-3, clip=clip).skipped) == 0.0
    twin = trainer(SINGLE, Layout(strategy=strategy))
    for seed in (0, 2):
        deliver(twin, gradients(twin, seed, scale=0.1))
        twin.optimizer.step(1e-3, clip=clip)
    assert same(state_of(run.optimizer), state_of(twin.optimizer))


def poisoned_rank(place: Place, layout: Layout) -> tuple[float, bool, bool]:
    """The last rank alone finds a NaN. Returns skipped, state untouched, next step taken."""
    run = trainer(place, layout)
    run.step(0)
    before = state_of(run.optimizer)
    run.runtime.step(run.batches(1))
    run.optimizer.gradients.finish_all()
    if place.rank == place.world_size - 1:
        run.optimizer.gradients.shards[0][0] = float("nan")
        run.optimizer._take_squared_norm(0)
    skipped = run.optimizer.step(1e-3, clip=1.0).skipped
    untouched = same(before, state_of(run.optimizer))
    run.step(2)
    return float(skipped), untouched, not same(before, state_of(run.optimizer))


@pytest.mark.parametrize(
    "layout", [Layout(dp=2), Layout(pp=2), Layout(tp=2, sp=True, pp=2, microbatches=2)], ids=lambda layout: layout.name
)
def test_one_ranks_nan_stops_every_rank(cluster: Cluster, layout: Layout) -> None:
    assert cluster.run(layout.world_size, poisoned_rank, layout) == [(1.0, True, True)] * layout.world_size


@pytest.mark.parametrize("step", [(2e-3, 0.0), (1e-3, 1.0)])
def test_a_step_is_the_one_that_was_announced(step: tuple[float, float]) -> None:
    """Some buckets have been updated by then."""
    run = trainer(SINGLE, Layout())
    run.optimizer.announce_step(1e-3, clip=0.0)
    deliver(run, gradients(run, 0, scale=0.1))
    with pytest.raises(RuntimeError) as error:
        run.optimizer.step(step[0], clip=step[1])
    assert str(error.value) == f"step got (lr, clip) {step}, announce_step announced (0.001, 0.0)"
    run.optimizer.step(1e-3, clip=0.0)
    deliver(run, gradients(run, 1, scale=0.1))
    run.optimizer.step(step[0], clip=step[1])  # an announcement holds for one step


def sums_before_waits(place: Place, layout: Layout) -> tuple[int, list[int]]:
    """How many sums over copies there are, and how many had been started at each wait for one."""
    run = trainer(place, layout)
    run.runtime.step(run.batches(0))
    run.optimizer.gradients.finish_all()
    recorder = run.mesh.recorder
    recorder.traffic.clear()
    recorder.mark = lambda: sum(traffic.calls for traffic in recorder.traffic.values())
    run.optimizer._sum_copies()
    return recorder.mark(), [before for before, _ in recorder.marks]


@pytest.mark.long
def test_sums_over_copies_travel_together(cluster: Cluster) -> None:
    layout = Layout(tp=4, kv_heads=2, sp=True, bucket=1)
    for count, started in cluster.run(4, sums_before_waits, layout):
        assert count > 4 and started == [count] * count


def test_padding_stays_zero() -> None:
    run = trainer(SINGLE, Layout())
    for step in range(3):
        run.step(step)
    run.optimizer.settle()
    embedding = parameters_of(run)["model.embed_tokens.weight"].detach()
    assert embedding.shape[0] == 384 and float(embedding[MODEL.vocab_size :].abs().max()) == 0.0
    assert float(embedding[: MODEL.vocab_size].abs().max()) > 0.0


def test_parameters_never_move() -> None:
    """They are views of buffers that are allocated once, and in fp32 the master is the view itself."""
    run = trainer(SINGLE, Layout())
    addresses = {name: p.data_ptr() for name, p in parameters_of(run).items()}
    run.step(0)
    assert addresses == {name: p.data_ptr() for name, p in parameters_of(run).items()}
    assert all(p.grad is None for p in parameters_of(run).values())
    spans = [(master.data_ptr(), master.data_ptr() + master.numel() * 4) for master in run.optimizer.masters]
    assert all(any(low <= address < high for low, high in spans) for address in addresses.values())


def test_bf16_parameters_are_the_rounded_fp32_masters() -> None:
    run = trainer(SINGLE, Layout(bf16=True))
    for step in range(3):
        run.step(step)
    engine = run.optimizer
    engine.settle()
    assert all(p.dtype is torch.bfloat16 for p in parameters_of(run).values())
    assert all(t.dtype is torch.float32 for piece in shard_pieces(engine) for t in piece.tensors.values())
    assert all(shard.dtype is torch.float32 for shard in engine.gradients.shards.values())
    masters = {piece.rectangle.name: piece.tensors["master"] for piece in shard_pieces(engine)}
    down = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(parameters_of(run)[down], masters[down].to(torch.bfloat16))
    assert not torch.equal(masters[down], masters[down].to(torch.bfloat16).float()), "the master holds more than bf16"
