"""Layouts drawn from a seed, of those that ``prove`` draws, as the parity tests train them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

from megatron_llama.errors import ConfigError
from megatron_llama.launch.launcher import Place
from megatron_llama.prove.draw import THREE, floors, with_floors
from megatron_llama.prove.draw import layout as drawn_layout
from megatron_llama.schedule import ScheduleError, schedule_named
from megatron_llama.train.setup.resolve import check

from tests.harness import Cluster
from tests.parallel.cases import GLOBAL_BATCH_SIZE, SEQ_LENGTH, Layout, Record, Reference, train

SEED, COUNT, STEPS = 6, 64, 5


@cache
def draw(seed: int = SEED, count: int = COUNT) -> tuple[Layout, ...]:
    """``count`` layouts of different names, always the same for a seed. With fewer than 64 the floors shrink in proportion."""
    return tuple(with_floors(partial(candidate, random.Random(seed)), _traits, runs, floors(count), count))


def axes(layout: Layout) -> int:
    """Number of axes above 1."""
    return sum(size > 1 for size in (layout.tp, layout.cp, layout.pp, layout.dp))


def _traits(layout: Layout) -> Sequence[str]:
    """What the layout counts for in each floor."""
    return THREE if axes(layout) >= 3 else "", layout.schedule if layout.pp > 1 else ""


NAMES: Mapping[str, str] = {
    "tp": "tensor_model_parallel_size", "cp": "context_parallel_size", "pp": "pipeline_model_parallel_size",
    "virtual": "virtual_pipeline_model_parallel_size", "sp": "sequence_parallel", "tp_comm": "tp_comm_overlap", "cp_comm": "cp_comm_type",
    "strategy": "data_parallel_sharding_strategy", "slots": "param_slots", "grad_slots": "grad_slots",
    "shard_size": "data_parallel_shard_size", "prefetch": "prefetch_bytes", "schedule": "pipeline_schedule",
    "split": "pipeline_layer_split", "layers": "num_hidden_layers", "kv_heads": "num_key_value_heads", "recompute": "recompute_granularity",
    "tied": "tie_word_embeddings", "documents": "reset_attention_mask", "bucket": "reduce_bucket_size",
}
"""Fields of a layout, and the options that they stand for."""


def candidate(chance: random.Random) -> Layout | None:
    """A layout; None where its pipeline has no stages, or a microbatch no samples."""
    try:
        options, world_size = drawn_layout(chance)
    except ScheduleError:
        return None
    samples = options["micro_batch_size"]
    if samples == 0:
        return None
    layout = Layout(**{field: options[name] for field, name in NAMES.items() if name in options}, steps=STEPS)
    dp = world_size // (layout.tp * layout.cp * layout.pp)
    return replace(layout, dp=dp, microbatches=GLOBAL_BATCH_SIZE // (dp * samples))


def runs(layout: Layout) -> bool:
    """Whether a user could start the layout, too."""
    config = layout.config()
    samples = GLOBAL_BATCH_SIZE // (layout.dp * layout.microbatches)
    training = replace(config.training, seq_length=SEQ_LENGTH, train_iters=layout.steps)
    training = replace(training, micro_batch_size=samples, global_batch_size=GLOBAL_BATCH_SIZE)
    try:
        check(replace(config, training=training), layout.world_size)
        schedule_named(layout.schedule, ranks=layout.pp, microbatches=layout.microbatches, virtual=layout.virtual)
    except (ConfigError, ScheduleError):
        return False
    return True


def alone(cluster: Cluster, layout: Layout) -> Reference:
    """The reference of a drawn layout, without HuggingFace: one process in fp32, and beside it one in fp64."""
    single, exact = cluster.run(2, _train_alone, layout.reference)
    return Reference(single, exact, None)


def _train_alone(place: Place, layout: Layout) -> Record:
    return train(Place(0, 1, 0), replace(layout, fp64=place.rank == 1))
