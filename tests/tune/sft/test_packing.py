"""Packing: what shares a sample, and that sharing changes no gradient."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from megatron_llama.config.schema import Config, ModelConfig
from megatron_llama.engine.mesh import Mesh
from megatron_llama.model.init import InitialWeights
from megatron_llama.model.llama import Stage, build_stages
from megatron_llama.model.load import load_stages, rank_specs
from megatron_llama.tune.sft.dataset import Examples, ExampleSamples
from megatron_llama.tune.sft.packing import best_fit
from tools.overlap.loss import token_losses
from torch import Tensor

SEQ_LENGTH, VOCABULARY = 96, 160
MODEL = ModelConfig(
    hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    vocab_size=VOCABULARY, max_position_embeddings=SEQ_LENGTH,
)  # fmt: skip


def examples(lengths: list[int], seed: int = 0) -> Examples:
    """Random tokens, about half of them learned."""
    draw, made = np.random.default_rng(seed), Examples()
    for length in lengths:
        loss_mask = draw.random(length) < 0.5
        loss_mask[-1] = True
        made.ids.append(draw.integers(0, VOCABULARY, length, np.int32))
        made.loss_mask.append(loss_mask)
    return made


def test_best_fit_by_definition() -> None:
    """The longest first, each into the group where it leaves least room; against a search of all groups."""
    draw = random.Random(1)
    for capacity in (1, 7, 64, 1000):
        lengths = [draw.randint(1, capacity) for _ in range(200)]
        rooms: list[int] = []
        for length in sorted(lengths, reverse=True):
            fitting = [index for index, room in enumerate(rooms) if room >= length]
            if not fitting:
                rooms.append(capacity)
                fitting = [len(rooms) - 1]
            rooms[min(fitting, key=rooms.__getitem__)] -= length
        groups = best_fit(lengths, capacity)
        assert sorted(index for group in groups for index in group) == list(range(200))
        assert sorted(capacity - sum(lengths[index] for index in group) for group in groups) == sorted(rooms)
        assert len(groups) <= 11 / 9 * -(-sum(lengths) // capacity) + 4 or capacity < 8
    assert best_fit([], 5) == []


@pytest.mark.parametrize("packing", [False, True])
def test_an_example_that_fills_its_sample_is_learned(packing: bool) -> None:
    """What is longer is cut to that length."""
    made = examples([SEQ_LENGTH + 1, 12])
    mask = ExampleSamples(made, range(2), SEQ_LENGTH, packing=packing).batch([0]).loss_mask
    assert mask is not None and mask.any() and mask[:, 0].tolist() == made.loss_mask[0][1:].tolist()


def test_a_packed_sample_by_its_parts() -> None:
    made = examples([39, 21, 41, 6])
    samples = ExampleSamples(made, range(4), SEQ_LENGTH, packing=True)
    assert len(samples) == 2 and samples.filled == (38 + 20 + 40 + 5) / (2 * SEQ_LENGTH)
    batch = samples.batch([0, 1])
    assert batch.loss_mask is not None and batch.position_ids is not None and batch.document_ids is not None
    assert batch.tokens.shape == batch.labels.shape == batch.loss_mask.shape == (SEQ_LENGTH, 2)
    seen = []
    for row in range(2):
        documents = batch.document_ids[:, row]
        assert (documents.diff() >= 0).all()
        for document in documents.unique():
            places = documents == document
            assert torch.equal(batch.position_ids[places, row], torch.arange(int(places.sum())))
            ids = [*batch.tokens[places, row].tolist(), int(batch.labels[places, row][-1])]
            found = [index for index in range(4) if made.ids[index].tolist() == ids]
            if not found:  # what pads the end
                assert not batch.loss_mask[places, row].any() and document == documents.max()
                continue
            seen += found
            assert batch.labels[places, row].tolist() == ids[1:]
            assert batch.loss_mask[places, row].bool().tolist() == made.loss_mask[found[0]][1:].tolist()
    assert sorted(seen) == [0, 1, 2, 3]


@pytest.fixture(scope="module")
def stage() -> Stage:
    config, mesh = Config(model=MODEL), Mesh.single(torch.device("cpu"))
    [built] = build_stages(config, mesh).values()
    load_stages([built], rank_specs(config, mesh), InitialWeights(1, 0.1), dtype=torch.float32, device=mesh.device)
    for weight in built.parameters():
        weight.requires_grad_(True)
    return built


def gradients(stage: Stage, samples: ExampleSamples, targets: float) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients, summed over all samples, each a microbatch of its own."""
    stage.zero_grad()
    total = 0.0
    for index in range(len(samples)):
        batch = samples.batch([index])
        assert batch.loss_mask is not None
        positions = stage.positions(SEQ_LENGTH, torch.device("cpu"), batch.position_ids, batch.document_ids)
        losses = token_losses(stage(batch.tokens, positions), batch.labels, stage.mesh.tp, VOCABULARY)
        loss = (losses * batch.loss_mask).sum() / targets
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    return total, {name: weight.grad.clone() for name, weight in stage.named_parameters() if weight.grad is not None}


def test_packing_changes_no_gradient(stage: Stage) -> None:
    """fp32, per parameter, relative to the norm of the gradient."""
    made = examples([97, 3, 12, 40, 33, 29, 8, 61, 22, 5, 5, 5], seed=3)
    targets = float(sum(mask[1:].sum() for mask in made.loss_mask))
    packed, alone = (ExampleSamples(made, range(12), SEQ_LENGTH, packing=packing) for packing in (True, False))
    assert (len(packed), len(alone)) == (4, 12)
    loss, together = gradients(stage, packed, targets)
    expected, apart = gradients(stage, alone, targets)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert together.keys() == apart.keys() and len(apart) == 3 + 3 * 6
    errors = {name: float((together[name] - apart[name]).norm() / apart[name].norm()) for name in apart}
    assert max(errors.values()) <= 2e-6, errors
