"""Peaks over a schedule by hand, and what ``auto`` decides."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
from megatron_llama.config.schema import Config, ParallelConfig, TrainingConfig
from megatron_llama.engine.plan.memory import sized
from megatron_llama.errors import ConfigError
from megatron_llama.model.presets import PRESETS
from megatron_llama.schedule import schedule_named
from megatron_llama.train.commands.common.dry_run import _rank_report
from megatron_llama.train.setup.auto import decide_recompute
from megatron_llama.train.setup.memory import USABLE, MemoryPlan, peak_of
from megatron_llama.train.setup.resolve import check, resolve


def config(world: int, **parallel: object) -> Config:
    training = TrainingConfig(seq_length=2048, micro_batch_size=1, global_batch_size=16, train_iters=1, bf16=True)
    return resolve(Config(PRESETS["llama2-7b"], ParallelConfig(**parallel), training), world)


def test_peaks_by_hand() -> None:
    one = schedule_named("1f1b", ranks=4, microbatches=8).ranks
    assert [peak_of(actions, [100] * 4, [10] * 4) for actions in one] == [400, 300, 200, 100]
    assert peak_of(schedule_named("gpipe", ranks=2, microbatches=5).ranks[0], [7, 9], [0, 0]) == 35
    # Rank 3 runs F B in turn and puts off three weight passes: the fourth B adds one before the first W takes one away.
    split = schedule_named("zb-h1", ranks=4, microbatches=8).ranks[3]
    assert peak_of(split, [100] * 4, [0] * 4) == 100 and peak_of(split, [100] * 4, [100] * 4) == 400
    assert peak_of(split, [100] * 4, [10] * 4) == 130


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_more_microbatches_never_need_less(name: str) -> None:
    """So the plan for the largest batch of a ramp-up holds for all of it. Stages of unequal weight, as first and last ones are."""
    draw = random.Random(name)
    for ranks, virtual in product((1, 2, 3, 4), (2, 3) if name == "interleaved" else (1,)):
        stages = ranks * (2 if name == "zb-v" else virtual)
        kept, deferred = ([draw.randint(least, 100) for _ in range(stages)] for least in (50, 1))
        counts = range(ranks, 4 * ranks + 3, ranks) if name == "interleaved" else range(1, 4 * ranks + 3)
        schedules = [schedule_named(name, ranks=ranks, microbatches=count, virtual=virtual) for count in counts]
        for rank in range(ranks):
            peaks = [peak_of(schedule.ranks[rank], kept, deferred) for schedule in schedules]
            assert peaks == sorted(peaks), (ranks, virtual, rank)


def test_in_flight_of_1f1b() -> None:
    plan = MemoryPlan(config(4, pipeline_model_parallel_size=4), 4)
    assert [plan.in_flight(rank) for rank in range(4)] == [4, 3, 2, 1]
    first, last = (plan.activations(rank, "none", 0) for rank in (0, 3))
    assert first > 4 * plan.kept(0, "none", 0) and last < 2 * plan.kept(3, "none", 0)


def test_the_squares_of_a_gradient_shard_count() -> None:
    """Those of the embedding, the largest bucket: whole, or a quarter."""
    whole, quarter = (MemoryPlan(config(4, data_parallel_sharding_strategy=name), 4).activations(0, "none", 0) for name in ("no_shard", "optim"))
    assert whole - quarter == 32000 * 4096 // 64 * 4 * 3 // 4


def test_casts_of_gradients_count_wherever_memory_is_decided() -> None:
    """Two of the largest bucket, 2 bytes each: what ``auto`` compares with the device, and what a dry run prints."""
    without, cast = (MemoryPlan(config(4, grad_reduce_in_bf16=narrow), 4) for narrow in (False, True))
    largest = max(bucket.numel for bucket in cast.bucket_plans[0].buckets)
    assert cast.needed("none", 0) - without.needed("none", 0) == 2 * largest * 2 == cast.staging(0)
    [line] = [line for line in _rank_report(cast, 0) if line.startswith("  state ")]
    assert f"gradients on their way {sized(2 * largest * 2)}" in line and "instead of those on their way" in line
    assert not any("on their way" in line for line in _rank_report(without, 0))


def test_scores_in_chunks_are_not_kept() -> None:
    """Those of 8192 tokens and 128,256 words are more than a chunk. They stay where the schedule puts backward passes off."""
    whole = TrainingConfig(seq_length=8192, micro_batch_size=1, global_batch_size=16, train_iters=1, bf16=True)
    asked = Config(PRESETS["llama3-8b"], ParallelConfig(pipeline_model_parallel_size=2), whole)
    chunked, kept = (
        MemoryPlan(resolve(replace(asked, parallel=replace(asked.parallel, pipeline_schedule=name)), 2), 2) for name in ("1f1b", "zb-h1")
    )
    scores = 8192 * 128256 * 2
    assert (chunked.in_chunks, chunked.logits(1)) == (True, 0) and (kept.in_chunks, kept.logits(1), kept.logits(0)) == (False, scores, 0)
    assert kept.kept(1, "none", 0) - chunked.kept(1, "none", 0) == scores
    assert not MemoryPlan(config(1), 1).in_chunks


@pytest.mark.parametrize(("granularity", "ranks"), list(product(["selective", "full"], [1, 4])))
def test_auto_takes_the_fewest_blocks_that_fit(granularity: str, ranks: int) -> None:
    asked = config(ranks, pipeline_model_parallel_size=ranks, recompute_granularity=granularity, recompute_num_layers="auto")
    plan = MemoryPlan(asked, ranks)
    assert plan.largest_stage == 32 // ranks
    # The last block saves nothing where one microbatch is in flight: it is there when it is computed again, and all others are not.
    most = plan.largest_stage - (ranks == 1)
    assert (plan.needed(granularity, plan.largest_stage - 1) > plan.needed(granularity, plan.largest_stage)) is (ranks > 1)
    for layers in (0, 1, 5, most):
        needed = plan.needed(granularity, layers)
        decided, (note,) = decide_recompute(asked, ranks, int(needed / USABLE) + 1)
        assert decided.parallel.recompute_num_layers == str(layers) and f"auto: {layers} of up to {32 // ranks} " in note
        assert "not enough" not in note
        assert MemoryPlan(decided, ranks).recompute_layers() == layers
    decided, (note,) = decide_recompute(asked, ranks, plan.needed(granularity, plan.largest_stage) - 1)
    assert decided.parallel.recompute_num_layers == str(plan.largest_stage) and "not enough" in note


def test_auto_without_recomputation_and_numbers_are_left_alone() -> None:
    asked = config(1, recompute_num_layers="auto")
    decided, _ = decide_recompute(asked, 1, 1)
    assert decided.parallel.recompute_num_layers == "0"
    for words in ("all", "3"):
        given = replace(asked, parallel=replace(asked.parallel, recompute_num_layers=words, recompute_granularity="full"))
        assert decide_recompute(given, 1, 1) == (given, ())
        assert MemoryPlan(given, 1).recompute_layers() == (3 if words == "3" else 32)


def parallel_config(**parallel: object) -> Config:
    return replace(config(1), parallel=ParallelConfig(**parallel))


def test_numbers_of_blocks_that_are_accepted() -> None:
    for wanted in ("0", "32", "all", "auto"):
        assert check(parallel_config(recompute_granularity="full", recompute_num_layers=wanted), 1).warnings == ()
    uneven = {"pipeline_model_parallel_size": 2, "pipeline_layer_split": (20, 12), "recompute_granularity": "selective"}
    assert check(parallel_config(recompute_num_layers="20", **uneven), 2).warnings == ()
    with pytest.raises(ConfigError, match="from 0 to 20"):
        check(parallel_config(recompute_num_layers="21", **uneven), 2)


def test_a_number_of_blocks_alone_is_a_warning() -> None:
    [warning] = check(parallel_config(recompute_num_layers="2"), 1).warnings
    assert warning == "--recompute-num-layers 2 without --recompute-granularity selective or full: nothing is recomputed"
