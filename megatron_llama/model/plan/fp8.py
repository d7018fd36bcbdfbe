"""What ``--fp8`` means for the layers of a model and for a rank's memory.

A recipe says how numbers become codes and scales. ``blockwise`` has a scale for 128 numbers of a
row, and for 128 x 128 of a weight; ``tensorwise`` has one for a tensor, on whose largest magnitude
the ranks that hold its parts agree.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from megatron_llama.config.schema import Config
from megatron_llama.engine.plan.buckets import BucketPlan
from megatron_llama.engine.plan.specs import ParamSpec

if TYPE_CHECKING:  # what knows nothing of layers in FP8
    from megatron_llama.model.plan.activation_memory import Activations
    from megatron_llama.model.plan.chunks import Granularity

BLOCKWISE = "blockwise"
TENSORWISE = "tensorwise"
SIDE = 128
"""Numbers of a tile, and rows and columns of a block."""
LINEAR_LAYERS = 4
"""Of a block: queries with keys and values, their output, gate with up, and down."""
MULTIPLE = 16
"""Of the numbers of a row, and of rows of a weight, that GPUs multiply with one scale a tensor."""
SCALE_BYTES = 4
ROUTER = "mlp.gate.weight"
"""The end of the names of routers, which never multiply in FP8."""
LAYER = "layers."
"""The first word of the names of units that are blocks."""
EITHER_WAY = 2
"""Weight codes are kept for the forward product and, transposed, for the input gradient."""


def fp8_layers(config: Config) -> range:
    """Return the layers whose products are in FP8: without ``--fp8`` none, otherwise all but the
    first and last ones."""
    ends = config.training.fp8_bf16_layers
    last = config.model.num_hidden_layers - ends
    return range(ends, last) if config.training.fp8 != "none" else range(0)


def is_fp8_weight(spec: ParamSpec) -> bool:
    """Whether a parameter of a layer in FP8 is multiplied so: a matrix that is no low-rank
    addition, and no router."""
    return len(spec.shape) > 1 and not spec.adapter and not spec.name.endswith(ROUTER)


def code_bytes(rows: int, columns: int, recipe: str = BLOCKWISE, experts: int = 1) -> int:
    """Return the bytes of a weight's codes and scales, both ways; ``experts``: matrices of which it
    consists."""
    if recipe == TENSORWISE:
        return EITHER_WAY * rows * columns + SCALE_BYTES * experts
    return EITHER_WAY * (rows * columns + SCALE_BYTES * (rows // SIDE) * (columns // SIDE))


def tile_bytes(tokens: int, columns: int) -> int:
    """Return the bytes of an activation's codes and scales."""
    return tokens * (columns + SCALE_BYTES * (columns // SIDE))


def gradients_in_fp8(
    config: Config, shape: Activations, recomputed: Granularity, layers: Iterable[int]
) -> int:
    """Return the most bytes of gradients in the backward pass of one of these blocks of a rank, as
    ``Activations.gradients``, with the codes and scales of those that multiply in FP8: of the
    widest product, the gradient through gate and up or through queries, keys and values. Codes last
    as long as the product; layers keep what they keep without FP8, since weight gradients are made
    of it."""
    gradients = shape.gradients(recomputed)
    in_fp8 = [layer for layer in layers if layer in fp8_layers(config)]
    if not in_fp8:
        return gradients
    if config.model.num_experts:
        from megatron_llama.model.plan.expert_fp8 import gradients_with_experts  # of few models

        return max(gradients, gradients_with_experts(config, shape, recomputed, in_fp8))
    return gradients + dense_tile_bytes(config, shape.tokens, config.model.intermediate_size)


def dense_tile_bytes(config: Config, tokens: int, intermediate: int) -> int:
    """Return the bytes of the codes and scales for the widest product of a dense block with this
    intermediate size; 0: of attention alone."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    heads = model.num_attention_heads + 2 * model.num_key_value_heads
    split = max(2 * intermediate, heads * model.head_dim) // tp
    return input_bytes(config, tokens, max(split, model.hidden_size))


def input_bytes(config: Config, tokens: int, width: int) -> int:
    """Return the bytes of the codes and scales of an activation, or of a gradient."""
    if config.training.fp8 == TENSORWISE:
        return tokens * width + SCALE_BYTES
    return tile_bytes(tokens, width)


def fp8_weights(config: Config, bucket_plan: BucketPlan) -> Iterator[tuple[int, int, ParamSpec]]:
    """Yield the weights of a rank that are multiplied in FP8, each with its bucket and the place
    where it begins there."""
    layers = fp8_layers(config)
    for name, buckets in zip(bucket_plan.unit_names, bucket_plan.unit_buckets, strict=True):
        if not name.startswith(LAYER) or int(name.removeprefix(LAYER)) not in layers:
            continue
        for bucket in buckets:
            for placed in bucket_plan.buckets[bucket].placements:
                in_unit = f".{name}." in f".{placed.spec.name}"
                if in_unit and is_fp8_weight(placed.spec):
                    yield bucket, placed.start, placed.spec


def weight_code_bytes(config: Config, bucket_plan: BucketPlan) -> int:
    """Return the most bytes of weight codes that a rank keeps: those of weights that lie apart, so
    blocks that take turns in slots also take turns in codes, whether dense or with experts."""
    by_slot: dict[object, set[tuple[int, int, int]]] = {}
    for bucket, start, spec in fp8_weights(config, bucket_plan):
        rows, columns = spec.shape
        experts = 1
        if config.model.num_experts:
            from megatron_llama.model.plan.experts import experts_in  # of few models

            experts = experts_in(config.model, spec)
        size = code_bytes(rows, columns, config.training.fp8, experts)
        place = start, start + rows * columns, size
        by_slot.setdefault(bucket_plan.parameter_slots[bucket], set()).add(place)
    return sum(map(_most_apart, by_slot.values()))


def _most_apart(places: Iterable[tuple[int, int, int]]) -> int:
    """Return the largest sum of sizes of places, each (start, end, size), that do not overlap."""
    ends = [0]
    most = [0]
    for start, end, size in sorted(places, key=lambda place: place[1]):
        before = most[bisect_right(ends, start) - 1]
        ends.append(end)
        most.append(max(most[-1], before + size))
    return most[-1]


class ScaleMessages(NamedTuple):
    """The messages that the ranks along an axis agree by on largest magnitudes, one for each tensor
    that the axis cuts, in a block in FP8."""

    forward: int
    """Of a microbatch, whenever its products are computed."""
    backward: int
    """Of a microbatch."""
    weights: int
    """Of the block's weights, whenever their codes are made."""


NO_SCALES = ScaleMessages(0, 0, 0)


def scale_messages(config: Config) -> dict[str, ScaleMessages]:
    """Count the messages over tp and over cp of a dense block, by the name of the axis, each of
    ``SCALE_BYTES``. All inputs have gradients."""
    parallel = config.parallel
    found: dict[str, ScaleMessages] = {}
    if config.training.fp8 != TENSORWISE:
        return found
    if parallel.tensor_model_parallel_size > 1:
        # Cut are the inputs of the two row-parallel layers, the gradients of the outputs of the two
        # others, and all weights; of inputs that are gathered as codes the parts as well.
        gathered = 2 * gathers_codes(config)
        found["tp"] = ScaleMessages(2 + gathered, 2, LINEAR_LAYERS)
    if parallel.context_parallel_size > 1:
        found["cp"] = ScaleMessages(LINEAR_LAYERS, LINEAR_LAYERS, 0)
    return found


def gathers_codes(config: Config) -> bool:
    """Whether layers in FP8 gather codes."""
    parallel = config.parallel
    sequence = parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1
    return sequence and config.training.fp8_gather
