"""An engine's weights and state, for readers and writers between steps: checkpoints, conversions,
and the state dict of a user's module.

Call ``engine.settle`` first: until then messages and updates may be under way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.engine.plan.buckets import ALIGN
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.engine.rules.update_rule import ColumnState


@dataclass(frozen=True)
class ShardPiece:
    """A rectangle of a HuggingFace tensor that this rank owns, with its live storage."""

    rectangle: Rectangle
    tensors: dict[str, Tensor]
    """``master`` and the update rule's shard-shaped state, as views of the rectangle's size. State
    with a number for each block of ALIGN elements of a row is a separate piece, of a rectangle that
    counts blocks."""
    primary: bool
    """Whether this rank writes it, if several ranks hold the same values."""


def shard_pieces(engine: OverlappedDistributedOptimizer) -> Iterator[ShardPiece]:
    """Yield all pieces that a checkpoint holds of this rank, in HuggingFace coordinates. Call
    ``settle`` first."""
    for bucket in range(len(engine.masters)):
        tensors = shard_tensors(engine, bucket)
        of_blocks = block_tensors(engine, bucket)
        primary = engine.is_primary(bucket)
        for rectangle, place in engine.bucket_plan.rectangles(bucket, engine.shard_rank(bucket)):
            views = {name: tensor[place].view(rectangle.size) for name, tensor in tensors.items()}
            yield ShardPiece(rectangle, views, primary)
            # Their rectangles count blocks, so they cannot be views in the piece of the elements.
            if of_blocks:
                span = slice(place.start // ALIGN, place.stop // ALIGN)
                blocks = in_blocks(rectangle)
                views = {name: tensor[span].view(blocks.size) for name, tensor in of_blocks.items()}
                yield ShardPiece(blocks, views, primary)


def in_blocks(rectangle: Rectangle) -> Rectangle:
    """Return the rectangle of a rectangle's blocks of ALIGN elements of a row, in the matrix of all
    blocks. Where this is used, the columns of a rectangle begin and end at multiples of ALIGN on
    every rank (``checks/optimizer.py``)."""
    shape, offset, size = (
        (*sides[:-1], sides[-1] // ALIGN)
        for sides in (rectangle.shape, rectangle.offset, rectangle.size)
    )
    return Rectangle(rectangle.name, shape, offset, size, rectangle.start // ALIGN)


def shard_tensors(engine: OverlappedDistributedOptimizer, bucket: int) -> dict[str, Tensor]:
    """Return the master and all shard-shaped state of a bucket, live."""
    trainable = engine.bucket_plan.buckets[bucket].kind.trainable
    state = engine.rules.by_bucket[bucket].state(bucket) if trainable else {}
    return {
        "master": engine.masters[bucket],
        **{
            name: tensor
            for name, tensor in state.items()
            if tensor.dim() and len(tensor) == len(engine.masters[bucket])
        },
    }


def block_tensors(engine: OverlappedDistributedOptimizer, bucket: int) -> dict[str, Tensor]:
    """Return the state of a bucket that has a number for each ALIGN elements, live."""
    if not engine.bucket_plan.buckets[bucket].kind.trainable:
        return {}
    return {
        name: tensor
        for name, tensor in engine.rules.by_bucket[bucket].state(bucket).items()
        if tensor.dim() and len(tensor) < len(engine.masters[bucket])
    }


def step_counts(engine: OverlappedDistributedOptimizer) -> list[Tensor]:
    """Return the update rules' step counters (0-dim, live), which are equal on every rank."""
    return [
        engine.rules.by_bucket[bucket].state(bucket)["step"]
        for bucket in engine.gradients.trainable
    ]


def weight_sums(engine: OverlappedDistributedOptimizer) -> list[Tensor]:
    """Return the sum of the weights of all steps in the average of weights (0-dim, live), for every
    shard that has one. They are equal on every rank."""
    return [
        engine.rules.by_bucket[b].state(b)["weight_sum"] for b in engine.evaluation_weights.buckets
    ]


def column_state(engine: OverlappedDistributedOptimizer) -> list[ColumnState]:
    """Return the state of update rules for single columns. Call ``settle`` first."""
    return [column for rule in engine.rules.distinct for column in rule.column_state()]


def rule_progress(engine: OverlappedDistributedOptimizer) -> Tensor | None:
    """Return the live vector of the rule that has a schedule of its own, or None."""
    of_rules = (rule.progress() for rule in engine.rules.distinct)
    return next((progress for progress in of_rules if progress is not None), None)


def resume_rules(engine: OverlappedDistributedOptimizer, step: int) -> None:
    """Let the rules continue from the state that has been written, after ``step`` updates."""
    for rule in engine.rules.distinct:
        rule.resume(step)


def held_memory(engine: OverlappedDistributedOptimizer) -> dict[str, list[Tensor]]:
    """Return all tensors that live as long as the engine, by the components of
    ``plan.memory.state_bytes``, and ``staging``. Several may be views of one storage, even in two
    components: the first one counts."""
    states = [
        tensor
        for bucket in engine.gradients.trainable
        for tensor in engine.rules.by_bucket[bucket].state(bucket).values()
    ]
    return {
        "parameters": engine.parameters.unsharded,
        "parameter shards": engine.parameters.shards,
        "gradients": engine.gradients.memory,
        "staging": engine.gradients.staging,
        "master weights": engine.masters,
        "moments": [tensor for tensor in states if tensor.dim()],
        "update buffers": [tensor for rule in engine.rules.distinct for tensor in rule.buffers],
        "scalars": [
            *(tensor for tensor in states if not tensor.dim()),
            *engine.loss_scale.memory,
            *engine.numbers,
        ],
    }
