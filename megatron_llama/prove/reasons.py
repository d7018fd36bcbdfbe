"""Reasons for values of a small case that depend on its ranks: what the case shows of the user's
configuration and what it does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from megatron_llama.config.schema import Config
from megatron_llama.errors import counted
from megatron_llama.model.windows import layer_windows
from megatron_llama.prove.small_model import chunks_reached, kinds_of_blocks
from megatron_llama.prove.small_run import has_equal_experts, has_hybrid_shards
from megatron_llama.prove.world import ENOUGH, World

AXES: Mapping[str, str] = MappingProxyType(
    {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "cp": "context_parallel_size",
    }
)
"""Options with the number of ranks of an axis."""


def needs_of(yours: Config, world: World) -> dict[str, int]:
    """Return the ranks that an axis needs to show everything it does, if two are too few: for a
    pipeline rank between two others; a ring that passes on received chunks; groups that exchange
    heads, and a ring of groups; as many chunks of a sequence as a window reaches; shards of several
    ranks that are replicated; experts that several ranks hold, and others do not."""
    needs = {"pp": 3, "cp": 3 if _passes_on(yours, world) else 2}
    reach = _reach(yours, world)
    if yours.parallel.head_ranks:
        needs["cp"] = 4 if _ring_ranks(yours, world) > 1 else 2
    elif reach < 2 * world.cp - 1:
        # There has to be at least one chunk that the window does not reach.
        needs["cp"] = max(needs["cp"], min(ENOUGH, -(-reach // 2) + 1))
    if has_hybrid_shards(yours, world) and not world.dp > 1 < world.cp:
        needs["dp" if world.dp > 1 else "cp"] = 4
    if has_equal_experts(yours, world):
        needs["dp"] = 4
    return {axis: min(need, world.sizes[axis]) for axis, need in needs.items()}


def _passes_on(yours: Config, world: World) -> bool:
    """Whether a context-parallel rank passes on received keys and values. Layers with a window have
    no ring."""
    length = yours.training.seq_length
    whole = any(not 0 < window < length for window in layer_windows(yours.model))
    return world.cp > 2 and yours.parallel.cp_comm_type == "ring" and whole


def _ring_ranks(config: Config, world: World) -> int:
    """Return the context-parallel ranks, or groups that exchange heads, between which keys and
    values travel."""
    return world.cp // max(1, config.parallel.head_ranks)


def _reach(config: Config, world: World) -> int:
    """Return the number of chunks before its own that a window reaches; 0 without a window, and
    where no keys and values travel."""
    window = config.model.sliding_window
    length = config.training.seq_length
    ranks = _ring_ranks(config, world)
    return chunks_reached(window, length, ranks) if ranks > 1 and 0 < window < length else 0


def reasons_of(
    yours: Config, world: World, small: Config, here: World, cases: Sequence[World]
) -> dict[str, str]:
    """Return the reasons for values of the case ``here`` by option: what they show and what not,
    and whether another one of ``cases`` shows it, or a larger number of --ranks. The reasons of
    other options are in their fields."""

    def owner(has: Callable[[World], bool], ranks: int) -> str:
        return "another case has" if any(has(case) for case in cases) else f"--ranks {ranks} has"

    reasons = {
        option: "another case has it" for axis, option in AXES.items() if here.sizes[axis] == 1
    }
    if here.tp == 1:
        reasons["num_attention_heads"] = "one or several to a key/value head, as yours"
        reasons["num_key_value_heads"] = "shared by query heads or not, as yours"
    if here.pp == 1:
        alone = "there is one pipeline rank"
        reasons["virtual_pipeline_model_parallel_size"] = alone
        reasons["pipeline_layer_split"] = alone
    elif here.pp == 2 < world.pp:
        holder = owner(lambda case: case.pp > 2, 3)
        reasons["pipeline_model_parallel_size"] = (
            f"a first rank and a last one; {holder} one between them"
        )
    if here.cp > 1 and _passes_on(yours, world):
        holder = owner(lambda case: case.cp > 2, 3)
        reasons["context_parallel_size"] = (
            "every rank of the ring passes on what it has received, as with more"
            if here.cp > 2
            else f"a ring of two; {holder} one that passes on what it has received"
        )
    if here.cp > 1 and yours.parallel.head_ranks:
        reasons["context_parallel_size"] = _reason_of_exchange(yours, world, small, here, owner)
    if _reach(yours, world) and _ring_ranks(small, here) > 1:
        reasons["sliding_window"] = _reason_of_window(yours, world, small, here, owner)
    if yours.model.sliding_window >= yours.training.seq_length:
        reasons["sliding_window"] = "longer than the sequence, as yours"
    reasons["global_batch_size"] = _reason_of_batch(yours, world, small, here, owner)
    if not has_hybrid_shards(yours, world):
        reasons["data_parallel_shard_size"] = "one shard for each rank, as yours"
    elif not has_hybrid_shards(small, here):
        some = owner(lambda case: case.replicas >= 4, 4)
        reasons["data_parallel_shard_size"] = f"one shard for each rank; {some} replicas of shards"
    if here.dp == 1:
        reasons["expert_model_parallel_size"] = "another case has it"
    elif has_equal_experts(yours, world) and not has_equal_experts(small, here):
        some = owner(lambda case: case.dp >= 4, 4)
        reasons["expert_model_parallel_size"] = (
            f"each rank has other experts; {some} several that have the same"
        )
    kinds, kinds_here = (len(set(kinds_of_blocks(config))) for config in (yours, small))
    if kinds_here < kinds:
        some = f"{kinds_here} of {counted(kinds, 'kind')} of blocks"
        reasons["num_hidden_layers"] = reasons["layer_types"] = f"{some}: there is no room for more"
    return reasons


Owner = Callable[[Callable[[World], bool], int], str]


def _reason_of_window(yours: Config, world: World, small: Config, here: World, owner: Owner) -> str:
    reach = _reach(yours, world)
    reach_here = _reach(small, here)
    chunks = counted(reach_here, "chunk")
    if reach >= 2 * _ring_ranks(yours, world) - 1:
        return "from the last chunk of the sequence into the first one, as yours"
    if reach == reach_here:
        return f"into {chunks} before a token's own, as yours"
    needed = -(-reach // 2) + 1
    if needed > ENOUGH:
        return f"into {chunks} before a token's own, where yours reaches into {reach}"
    as_many = owner(lambda case: case.cp >= needed, needed)
    return f"into {chunks} before a token's own; {as_many} {reach}, as yours"


def _reason_of_exchange(
    yours: Config, world: World, small: Config, here: World, owner: Owner
) -> str:
    """Return how the ranks exchange the sequence for heads, and what is not shown."""
    said = "each rank exchanges heads with each, as with more"
    if _ring_ranks(yours, world) > 1:
        said = "groups exchange heads, and keys and values go around a ring of groups, as yours"
        if _ring_ranks(small, here) == 1:
            holder = owner(lambda case: case.cp >= 4, 4)
            said = f"the ranks of a group exchange heads; {holder} a ring of groups"
    copies = "key/value heads are copied for several ranks"
    if _copies_heads(yours, world) is _copies_heads(small, here):
        return said
    return f"{said}; {copies} {'in yours only' if _copies_heads(yours, world) else 'here only'}"


def _copies_heads(config: Config, world: World) -> bool:
    """Whether several ranks that exchange heads get a copy of one key/value head."""
    heads = max(1, config.model.num_key_value_heads // world.tp)
    return heads % config.parallel.head_ranks != 0


def _reason_of_batch(yours: Config, world: World, small: Config, here: World, owner: Owner) -> str:
    """Return the relation of a step's microbatches to the pipeline ranks in words."""
    count = microbatches_of(yours, world)
    if count == 1:
        return "one microbatch in a step, as yours"
    if here.pp == 1 or world.pp == 1:
        return "several microbatches in a step, as yours"
    relation = _relation(count, world.pp)
    if relation == _relation(microbatches_of(small, here), here.pp):
        return f"{relation}, as yours"
    fewer = owner(lambda case: case.pp > 2, 3)
    return f"several microbatches in a step; {fewer} {relation}, as yours"


def microbatches_of(config: Config, world: World) -> int:
    """Return the number of microbatches of a step."""
    training = config.training
    return training.global_batch_size // (training.micro_batch_size * world.dp)


def _relation(microbatches: int, ranks: int) -> str:
    if microbatches < ranks:
        return "fewer microbatches in a step than pipeline ranks"
    if microbatches == ranks:
        return "as many microbatches in a step as pipeline ranks"
    whole = microbatches % ranks == 0
    return f"microbatches in a step that are {'a' if whole else 'no'} multiple of pipeline ranks"
