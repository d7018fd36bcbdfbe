"""The change that docs/change-the-model.md shows, read from the page, trains under parallelism as in one process, and is Qwen3's."""

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
from megatron_llama.distributed.launcher import Place
from megatron_llama.model import llama
from megatron_llama.model.init import InitialWeights
from megatron_llama.plans import params
from megatron_llama.plans.params import Rectangle, hf_shapes

from tests.harness import Cluster
from tests.parallel.cases import LOSS_BOUND, MODEL, Layout, Record, deviation, merged, samples, train, trainer

PAGE = (Path(__file__).parents[2] / "docs" / "change-the-model.md").read_text()
STEPS = 5


def block_of(language: str) -> str:
    [text] = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return str(text)


@contextmanager
def changed() -> Iterator[type[llama.Block]]:
    """The plan of parameters with the line of the page, and the block of the page."""
    before, line = block_of("diff").splitlines()
    assert line.startswith("+")
    source = textwrap.dedent(inspect.getsource(params.Shapes.block))
    assert source.count(before.strip()) == 1
    plan: dict[str, Any] = {}
    exec(source.replace(before.strip(), before.strip() + line[1:].strip()), vars(params), plan)
    model = dict(vars(llama))
    exec(block_of("python"), model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(params.Shapes, "block", plan["block"])
        yield model["QKNormBlock"]


def test_the_change_is_small() -> None:
    assert len([line for line in block_of("python").splitlines() if line.strip()]) <= 15


def train_changed(place: Place, layout: Layout) -> Record:
    with changed() as block:
        return train(place, layout, block)


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
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            assert weight.shape == (MODEL.head_dim,) and float((weight - 1).abs().max()) > 1e-3


def test_it_is_the_norm_of_qwen3() -> None:
    """The loss of one batch, with the same weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    names = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"]
    names += ["head_dim", "rms_norm_eps", "max_position_embeddings"]
    options: dict[str, Any] = {name: getattr(MODEL, name) for name in names}
    options["rope_parameters"] = {"rope_type": "default", "rope_theta": MODEL.rope_theta}
    twin = Qwen3ForCausalLM(Qwen3Config(**options, tie_word_embeddings=False))
    with changed() as block:
        run = trainer(Place(0, 1, 0), Layout(), block=block)
        loss, _ = run.runtime.evaluate(run.batches(0))
        weights = {name: torch.empty(shape) for name, shape in hf_shapes(MODEL).items()}
    for name, weight in weights.items():
        shape = tuple(weight.shape)
        InitialWeights(1234, MODEL.initializer_range)(Rectangle(name, shape, (0,) * len(shape), shape, 0), weight)
    twin.load_state_dict(weights, strict=True)
    text = samples(range(8))
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(twin(text[:, :-1]).logits.flatten(0, 1), text[:, 1:].flatten())
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
