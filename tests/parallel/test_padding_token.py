"""Lookups of the padding token do not train its row, as in transformers, in every layout; with --train-pad-embedding they do, as in
Megatron."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.model.plan.params import EMBEDDING
from torch import Tensor

from tests.harness import Cluster
from tests.model.families.twins import TWINS, FamilyLayout
from tests.model.families.twins import reference as family_reference
from tests.parallel.cases import (
    LOSS_BOUND,
    MODEL,
    NORM_BOUND,
    OPTIMIZER,
    Layout,
    Reference,
    deviation,
    initial_weights,
    merged,
    train,
    train_hf,
)
from tests.parallel.test_zenflow import zen

References = Callable[[Layout], Reference]
SPACE, ASTERISK = (ord(character) * 7 % MODEL.vocab_size for character in " *")
"""Of two tensor-parallel ranks the first has the row of the space, the second that of the asterisk."""
BESIDE_COMMA = 256 + ord(",") * 7 % MODEL.vocab_size
"""In no text, and on the second rank in the place that the comma has on the first: each has 256 rows."""
ALL_AXES = Layout(tp=2, pp=2, dp=2, sp=True, microbatches=2, pad=SPACE)


def initial_row(row: int) -> Tensor:
    """With which all runs here begin."""
    values = torch.empty(1, MODEL.hidden_size)
    initial_weights()(Rectangle(EMBEDDING, (MODEL.vocab_size, MODEL.hidden_size), (row, 0), (1, MODEL.hidden_size), 0), values)
    return values[0]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(pad=SPACE, tied=True),
        replace(ALL_AXES, schedule="zb-h1", strategy="optim_grads"),
        replace(ALL_AXES, tied=True, strategy="optim_grads_params", recompute="full"),
        Layout(tp=2, sp=True, pad=ASTERISK),
        Layout(cp=2, dp=2, strategy="no_shard", microbatches=2, pad=SPACE),
        Layout(tp=2, pad=BESIDE_COMMA),
    ],
    ids=lambda layout: layout.name,
)
def test_training_is_that_of_transformers(references: References, cluster: Cluster, layout: Layout) -> None:
    """Without a tied head nothing but weight decay changes the row."""
    layout = replace(layout, steps=6)
    records = cluster.run(layout.world_size, train, layout)
    expected = references(layout)
    assert expected.hf is not None
    row = expected.row(layout.name, records[0])
    assert row.holds, row
    trained, alone = merged(records), merged([expected.single])
    for name, weight in trained.items():
        assert float((weight - alone[name]).norm() / alone[name].norm()) < 1e-4, name
    decayed = initial_row(layout.pad or 0) * (1 - OPTIMIZER.lr * OPTIMIZER.weight_decay) ** layout.steps
    change = float((trained[EMBEDDING][layout.pad] - decayed).norm() / decayed.norm())
    assert change > 0.01 if layout.tied else change < 1e-5


@pytest.mark.long
def test_the_option_trains_the_row_to_the_bit_as_without_a_padding_token(cluster: Cluster) -> None:
    """And so its runs are far from transformers'."""
    layout = Layout(tp=2, sp=True, pad=SPACE, steps=6)
    trained, without, dropped = (cluster.run(2, train, run)[0] for run in (replace(layout, trains_pad=True), replace(layout, pad=None), layout))
    assert (trained.losses, trained.norms, trained.parameters) == (without.losses, without.norms, without.parameters)
    theirs = train_hf(layout.reference)
    assert deviation(dropped.losses, theirs.losses) < LOSS_BOUND and deviation(dropped.norms, theirs.norms) < NORM_BOUND
    assert deviation(trained.losses, theirs.losses) > 10 * LOSS_BOUND and deviation(trained.norms, theirs.norms) > 100 * NORM_BOUND


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [FamilyLayout(family="phi3", tp=2, sp=True, pad=SPACE, steps=6), FamilyLayout(family="gemma3", tp=2, cp=2, pad=SPACE, steps=6)],
    ids=lambda layout: layout.name,
)
def test_families(cluster: Cluster, layout: FamilyLayout) -> None:
    """Heads of their own, tied ones, and an embedding with a factor."""
    expected = family_reference(cluster, layout)
    assert expected.hf is not None and layout.model.tie_word_embeddings == TWINS[layout.family].ours.tie_word_embeddings
    row = expected.row(layout.name, cluster.run(layout.world_size, train, layout)[0])
    assert row.holds, row


@pytest.mark.long
def test_zenflow(cluster: Cluster) -> None:
    """What it adds up for later is zero, too."""
    layout = zen(Layout(tp=2, pp=2, sp=True, tied=True, microbatches=2, strategy="optim_grads", steps=6, layers=2, pad=SPACE))
    records = cluster.run(layout.world_size, train, layout)
    alone = cluster.run(1, train, zen(layout.reference))
    assert deviation(records[0].losses, alone[0].losses) < LOSS_BOUND and deviation(records[0].norms, alone[0].norms) < NORM_BOUND
    untied = cluster.run(1, train, zen(Layout(steps=6, layers=2, pad=SPACE)))
    row = merged(untied)[EMBEDDING][SPACE]
    decayed = initial_row(SPACE)
    assert float((row - decayed).norm() / decayed.norm()) < 1e-3
    others = zen(Layout(steps=6, layers=2, pad=SPACE, trains_pad=True))
    assert float((merged(cluster.run(1, train, others))[EMBEDDING][SPACE] - decayed).norm() / decayed.norm()) > 1e-2
