"""The parameter of a reward model's score."""

from __future__ import annotations

from megatron_llama.engine.plan.specs import HFSlice, ParamSpec
from megatron_llama.model.plan.params import SCORE, Shapes


def score_param(shapes: Shapes) -> ParamSpec:
    """Return the weight of a reward model's score, which every tp rank holds. With sequence
    parallelism each scores its part of the sequence."""
    shape = (shapes.model.num_labels, shapes.model.hidden_size)
    # One row: gathering it before each access would cost a message and save next to nothing.
    return ParamSpec(
        SCORE,
        shape,
        (HFSlice(SCORE, shape, 0, shape[0]),),
        decay=True,
        copies=shapes.tp,
        partial_grad=shapes.sequence_parallel and shapes.tp > 1,
        stage=shapes.stage,
        resident=True,
    )
