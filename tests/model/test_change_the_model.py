"""The change that docs/change-the-model.md shows, read from the page, trains under parallelism as in one process, and is what it says."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_llama.launch.launcher import Place
from megatron_llama.model import llama
from megatron_llama.model.plan import params
from torch import Tensor

from tests.harness import Cluster
from tests.parallel.cases import LOSS_BOUND, MODEL, Layout, Record, deviation, merged, samples, train, trainer
from tests.torch_twin import hf_model, next_token_loss

PAGE = (Path(__file__).parents[2] / "docs" / "change-the-model.md").read_text()
STEPS = 5


def block_of(language: str) -> str:
    [text] = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return str(text)


@contextmanager
def changed() -> Iterator[type[llama.Block]]:
    """The plan of parameters with the line of the page, and the block of the page."""
    before, *lines = block_of("diff").splitlines()
    assert all(line.startswith("+") for line in lines)
    source = textwrap.dedent(inspect.getsource(params.Shapes.block))
    assert source.count(before.strip()) == 1
    plan: dict[str, Any] = {}
    exec(source.replace(before.strip(), before.strip() + "".join(line[1:].strip() for line in lines)), vars(params), plan)
    model = dict(vars(llama))
    exec(block_of("python"), model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(params.Shapes, "block", plan["block"])
        yield model["OutNormBlock"]


def train_changed(place: Place, layout: Layout) -> Record:
    with changed() as block:
        return train(place, layout, block)


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, pp=2, dp=2, sp=True, strategy="optim_grads_params", microbatches=2),
        Layout(tp=2, pp=2, sp=True, microbatches=4, schedule="zb-h1", recompute="full"),
        Layout(tp=4, dp=2, strategy="optim_grads_params", recompute="selective", documents=True),
        Layout(cp=2),
    ],
    ids=lambda layout: layout.name,
)
def test_training_is_that_of_one_process(cluster: Cluster, layout: Layout) -> None:
    layout = replace(layout, steps=STEPS)
    alone = cluster.run(1, train_changed, layout.reference)
    ranks = cluster.run(layout.world_size, train_changed, layout)
    assert all(deviation(record.losses, alone[0].losses) <= LOSS_BOUND for record in ranks)
    unchanged = cluster.run(1, train, layout.reference)
    assert deviation(alone[0].losses, unchanged[0].losses) > 1e-3
    found, expected = merged(ranks), merged(alone)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-3, atol=1e-4)
        if name.endswith("out_norm.weight"):
            assert weight.shape == (MODEL.head_dim,) and float((weight - 1).abs().max()) > 1e-3


def test_it_is_llama_with_a_norm_in_front_of_the_output_projection() -> None:
    """The loss of one batch, with the same weights."""
    twin = hf_model(MODEL)

    def normalized(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        heads = inputs[0].unflatten(-1, (-1, MODEL.head_dim))
        return torch.nn.functional.rms_norm(heads, (MODEL.head_dim,), eps=MODEL.rms_norm_eps).flatten(-2)

    for layer in twin.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(normalized)
    with changed() as block:
        run = trainer(Place(0, 1, 0), Layout(), block=block)
        loss, _ = run.runtime.evaluate(run.batches(0))
    with torch.no_grad():
        expected = next_token_loss(twin, samples(range(8)))
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
