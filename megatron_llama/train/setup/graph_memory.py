"""Memory of graphs of blocks (--cuda-graph-scope block) beside what blocks hold without them."""

from __future__ import annotations

from megatron_llama.model.plan.chunks import Granularity
from megatron_llama.train.setup.memory import MemoryPlan, peak_of


def graph_bytes(plan: MemoryPlan, rank: int, granularity: Granularity, recomputing: int) -> int:
    """Return these bytes of a pipeline rank.

    Graphs keep the memory of a microbatch in flight when none is. The forward passes of each, and
    all backward passes together, have a pool with temporaries of its own, and evaluations compute
    outside of all pools."""
    shape = plan.shape
    whole = shape.tokens * shape.model.hidden_size * shape.itemsize
    actions = plan.schedule.ranks[rank]
    stages = [stage for stage in plan.partition.stages_of(rank) if plan.partition.layers[stage]]
    # Products of all tokens before they are summed over tp, and what is computed again in backward.
    working = 2 * whole + shape.block("none")
    held = temporary = 0
    kept = [0] * plan.partition.stages
    for stage in stages:
        blocks = len(plan.partition.layers[stage])
        again = min(recomputing, blocks)
        kept[stage] = plan.kept_by_blocks(stage, granularity, recomputing)
        if granularity == "full":
            # A block's input is the output of the block before it, which is kept whole.
            kept[stage] += again * shape.hidden
        ones = [int(other == stage) for other in range(plan.partition.stages)]
        flights = peak_of(actions, ones, ones)
        held += flights * kept[stage]
        # The copy of what goes to another stage.
        held += flights * shape.hidden * (stage + 1 < plan.partition.stages)
        temporary += flights * (working - shape.block(granularity if again else "none"))
    counted = [plan.kept_by_blocks(stage, granularity, recomputing) for stage in range(len(kept))]
    backward = shape.gradients(granularity) if recomputing else shape.gradients("none")
    return held - peak_of(actions, counted, counted) + temporary + backward + shape.hidden + working
