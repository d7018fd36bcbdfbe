"""The loss made with the head, chunk by chunk, against the loss of all scores at once: losses, norms, what is trained, and evaluations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron_llama.engine.mesh import Mesh
from megatron_llama.launch.launcher import Place
from megatron_llama.model.llama import Stage
from megatron_llama.model.nn.head import head_loss
from megatron_llama.model.nn.ops import PLAIN
from megatron_llama.model.plan.chunks import HEAD_CHUNK, head_rows

from tests.harness import Cluster
from tests.parallel.cases import Layout, Trainer, trainer

CHUNKS = (1, 5 * 384, 10**9)
"""Scores at once: those of one token; of a few, of which the last chunk has fewer; and all, so that nothing is cut."""


def trained(place: Place, layout: Layout, chunk: int) -> tuple[list[float], bool, bool]:
    """Losses and norms of three steps and the loss of an evaluation, and whether the head was read in chunks, in either."""
    run, cut = trainer(place, layout), False
    with_chunks(run, chunk)
    original = Stage.loss_in_chunks

    def noted(stage: Stage, *given: object, **names: object) -> object:
        nonlocal cut
        cut = True
        return original(stage, *given, **names)  # type: ignore[arg-type]

    for stage in run.stages.values():
        stage.loss_in_chunks = noted.__get__(stage)  # type: ignore[method-assign]
    numbers = [number for index in range(3) for number in map(float, run.step(index))]
    trained_in_chunks, cut = cut, False
    numbers.append(float(run.runtime.evaluate(run.batches(3))[0]))
    return numbers, trained_in_chunks, cut


def with_chunks(run: Trainer, chunk: int) -> None:
    for stage in run.stages.values():
        stage.options = replace(stage.options, head_chunk=chunk)


ALONE = [
    Layout(microbatches=2),
    Layout(tied=True, documents=True, microbatches=2, strategy="optim_grads"),
    Layout(strategy="optim_grads_params", microbatches=2, slots="2"),
    Layout(clip=0.0, early=True),
    Layout(lora=4),
    Layout(freeze=("norms",)),
    Layout(freeze=("model.*",)),
]


@pytest.mark.few(4, all=10)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("layout", ALONE, ids=lambda layout: layout.name)
def test_one_process(layout: Layout, chunk: int) -> None:
    """In fp64, where another order of sums does not show."""
    layout = replace(layout, fp64=True, layers=1)
    (found, *cut), (expected, *whole) = (trained(Place(0, 1, 0), layout, chunk), trained(Place(0, 1, 0), layout, 10**9))
    assert (cut, whole) == ([chunk < 10**9] * 2, [False] * 2)
    assert found == pytest.approx(expected, rel=1e-12)


def test_bf16() -> None:
    layout = Layout(bf16=True, layers=1)
    (found, cut, _), (expected, *_) = (trained(Place(0, 1, 0), layout, 5 * 384), trained(Place(0, 1, 0), layout, 10**9))
    assert cut and found == pytest.approx(expected, rel=5e-3)


RANKS = [
    (Layout(tp=2, sp=True, microbatches=2), True),
    (Layout(pp=2, microbatches=4, tied=True, dp=2, strategy="optim_grads"), True),
    (Layout(cp=2, documents=True), True),
    (Layout(pp=2, microbatches=4, schedule="zb-h1"), False),
]


@pytest.mark.long
@pytest.mark.parametrize(("layout", "may"), RANKS, ids=lambda case: case.name if isinstance(case, Layout) else "")
def test_several_processes(cluster: Cluster, layout: Layout, may: bool) -> None:
    """``may``: whether the schedule lets gradients be made in the forward pass. An evaluation makes none."""
    layout = replace(layout, fp64=True, layers=2)
    found = cluster.run(layout.world_size, trained, layout, 5 * 192)
    expected = cluster.run(layout.world_size, trained, layout, 10**9)
    assert any(cut for _, cut, _ in found) is may and any(cut for *_, cut in found)
    assert not any(training or evaluating for _, training, evaluating in expected)
    for (numbers, *_), (others, *_) in zip(found, expected, strict=True):
        assert numbers == pytest.approx(others, rel=1e-12)


def test_never_more_scores_than_a_chunk() -> None:
    """By the shapes of what the head's product gives."""
    run, shapes = trainer(Place(0, 1, 0), Layout(layers=1)), list[torch.Size]()
    with_chunks(run, 4 * 384)

    class Products(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, function: object, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
        ) -> object:
            found = function(*args, **(kwargs or {}))  # type: ignore[operator]
            if isinstance(found, torch.Tensor) and found.dim() > 1 and 384 in found.shape:
                shapes.append(found.shape)
            return found

    with Products():
        run.step(0)
    assert max(shape.numel() // 384 for shape in shapes if shape[-1] == 384 and shape != (64, 384)) == 4


@pytest.mark.parametrize(("vocabulary", "tp", "rows"), [(128_256, 1, 2048), (128_256, 8, 16_640), (32_000, 1, 8192), (2**20, 1, 256)])
def test_the_tokens_of_a_chunk_are_tiles(vocabulary: int, tp: int, rows: int) -> None:
    """A multiple of 256, and not 256 more: 2093 would fit with 128,256 words."""
    assert head_rows(HEAD_CHUNK, vocabulary // tp) == rows and rows + 256 > HEAD_CHUNK // (vocabulary // tp) >= rows


@pytest.mark.parametrize(("fit", "rows"), [(0, 1), (1, 1), (255, 255), (256, 256), (511, 256), (512, 512)])
def test_small_chunks_have_the_tokens_that_fit(fit: int, rows: int) -> None:
    assert head_rows(fit * 384 + 383, 384) == rows


def test_products_have_the_rows_of_the_plan() -> None:
    """700 tokens, of which 300 fit: two products of 256 and the rest. Losses and gradients are those of all at once."""
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(700, 1, 16, dtype=torch.float64, generator=numbers)
    weight = torch.randn(384, 16, dtype=torch.float64, generator=numbers)
    labels, weights = torch.randint(0, 300, (700, 1), generator=numbers), torch.ones(700, 1, dtype=torch.float64)
    shapes = list[int]()

    class Products(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.mm and (kwargs or {}).get("out") is None:
                shapes.append(args[0].shape[0])
            return function(*args, **(kwargs or {}))

    found = []
    for chunk in (300 * 384, 10**9):
        gradient = x.clone()
        with Products():
            options = {"sequence_parallel": False, "z_weight": 0.1, "ops": PLAIN, "chunk": chunk}
            losses, _ = head_loss(gradient, weight, labels, Mesh.single().tp, 300, weights=weights, **options)  # type: ignore[arg-type]
        found.append((losses, gradient))
    assert shapes == [256, 256, 188, 700]
    (losses, gradient), (whole_losses, whole_gradient) = found
    assert torch.allclose(losses, whole_losses, rtol=1e-13) and torch.allclose(gradient, whole_gradient, rtol=1e-10, atol=1e-14)
