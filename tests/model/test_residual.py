"""A norm that adds what the block before it has computed gives the bits of a block that adds it itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron_llama.launch.launcher import Place
from megatron_llama.model.llama import Block
from megatron_llama.model.nn.functional import Residual
from megatron_llama.model.positions import Positions

from tests.harness import Cluster
from tests.model.test_activation_memory import FIELDS, Run
from tests.parallel.cases import Layout, Record, train


class Adding(Block):
    """A block that returns the complete stream."""

    def forward(self, residual: Residual, positions: Positions) -> Residual:
        """See Block."""
        return Residual(super().forward(residual, positions).sum())


def train_adding(place: Place, layout: Layout) -> Record:
    return train(place, layout, Adding)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(bf16=True, microbatches=2),
        Layout(tp=2, sp=True, dp=2, strategy="optim_grads_params", microbatches=2, recompute="selective"),
        Layout(pp=2, microbatches=4, virtual=2, schedule="zb-v", tied=True),
        Run(fields=tuple(FIELDS["norms behind"].items())),
        Run(tp=2, fields=tuple(FIELDS["norms before and behind"].items()), recompute="full", recompute_layers="1"),
    ],
    ids=lambda layout: layout.name,
)
def test_training_is_the_same_to_the_bit(cluster: Cluster, layout: Layout) -> None:
    layout = replace(layout, steps=3)
    carried, added = (cluster.run(layout.world_size, function, layout) for function in (train, train_adding))
    for record, other in zip(carried, added, strict=True):
        assert (other.losses, other.norms, other.parameters) == (record.losses, record.norms, record.parameters)
        for piece, copy in zip(record.pieces, other.pieces, strict=True):
            assert torch.equal(piece.master, copy.master), piece.rectangle
