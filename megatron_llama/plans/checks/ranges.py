"""Numbers that have to be positive, or must not be negative."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from types import MappingProxyType

from megatron_llama.config.fields import shown
from megatron_llama.config.limits import (
    LARGEST_INTEGER,
    LARGEST_LAYERS,
    LARGEST_RAMP,
    LARGEST_RANKS,
    LARGEST_SIZE,
)
from megatron_llama.config.parse import flag, options_of
from megatron_llama.config.schema import Config
from megatron_llama.errors import describe
from megatron_llama.plans.schedule.builders import schedule_bound_problem

_POSITIVE = (
    "rms_norm_eps rope_theta embedding_multiplier partial_rotary_factor "
    "make_vocab_size_divisible_by "
    "tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size "
    "context_parallel_size grad_slots exchange_chunk_bytes reduce_bucket_size "
    "distributed_timeout_minutes seq_length micro_batch_size initial_loss_scale min_loss_scale "
    "loss_scale_window hysteresis loss_spike_window adam_eps lora_alpha log_interval "
    "sample_tokens tensorboard_queue_size"
)
POSITIVE = frozenset(_POSITIVE.split())
"""Numbers that must not be 0. All others may be."""
_CHECKED_ELSEWHERE = (
    "train_iters adam_beta1 adam_beta2 optimizer_offload_fraction zenflow_topk_ratio "
    "zenflow_update_interval_cap zenflow_full_warm_up_rounds lora_dropout profile_step_end "
    "nccl_pp_max_ctas pad_token_id"
)
CHECKED_ELSEWHERE = frozenset(_CHECKED_ELSEWHERE.split())
"""Numbers of which another check says more exactly what they have to be."""


_SIZES = (
    "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim "
    "max_position_embeddings make_vocab_size_divisible_by seq_length micro_batch_size "
    "global_batch_size lora_rank"
)
_RANKS = (
    "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
    "virtual_pipeline_model_parallel_size data_parallel_shard_size"
)
LARGEST: Mapping[str, int] = MappingProxyType(
    {
        "num_hidden_layers": LARGEST_LAYERS,
        **dict.fromkeys(_SIZES.split(), LARGEST_SIZE),
        **dict.fromkeys(_RANKS.split(), LARGEST_RANKS),
    }
)
"""Numbers of which something is made that takes memory or time. All others end with int64."""


def bound_problems(config: Config, world_size: int) -> Iterator[str]:
    """Yield every number so large that checks and plans, which list layers, ranks and passes, would
    take minutes or the machine's memory. Nothing else can be looked at until they are mended."""
    wrong = list(_too_large(config))
    if world_size > LARGEST_RANKS:
        yield describe(
            "processes",
            got=f"{world_size:,}",
            expected=f"at most {LARGEST_RANKS:,}",
            do="start fewer",
        )
    yield from wrong
    if wrong or world_size > LARGEST_RANKS:
        return
    yield from _schedule_bounds(config, world_size)
    yield from _ramp_bounds(config)


def _too_large(config: Config) -> Iterator[str]:
    for section, name in _all_numbers():
        value = getattr(getattr(config, section), name)
        most = LARGEST.get(name, LARGEST_INTEGER)
        if isinstance(value, float) and not math.isfinite(value):
            do = f"give {flag(name)} a number"
            yield describe(flag(name), got=value, expected="a finite number", do=do)
        elif isinstance(value, int) and abs(value) > most:
            do = f"give {flag(name)} a smaller number"
            yield describe(flag(name), got=shown(value), expected=f"at most {most:,}", do=do)


def _schedule_bounds(config: Config, world_size: int) -> Iterator[str]:
    parallel = config.parallel
    training = config.training
    pp = parallel.pipeline_model_parallel_size
    virtual = parallel.virtual_pipeline_model_parallel_size
    others = parallel.tensor_model_parallel_size * parallel.context_parallel_size * pp
    problem = schedule_bound_problem(pp * virtual, 1)
    if problem is None and min(others, virtual, training.micro_batch_size) > 0:
        replicas = max(1, world_size // others)
        microbatches = training.global_batch_size // (training.micro_batch_size * replicas)
        problem = schedule_bound_problem(pp * virtual, microbatches)
    if problem is not None:
        yield problem


def _ramp_bounds(config: Config) -> Iterator[str]:
    ramp = config.training.rampup_batch_size
    if len(ramp) != 3 or min(ramp) <= 0:
        return  # batch_ramp says what is wrong
    start, increment, samples = ramp
    rises = (config.training.global_batch_size - start) // increment
    if max(rises, samples // start) > LARGEST_RAMP:
        yield describe(
            "--rampup-batch-size",
            got=f"{rises:,} sizes in up to {samples // start:,} steps",
            expected=f"at most {LARGEST_RAMP:,} of each",
            do="let the batch grow by more, or over fewer samples",
        )


def range_problems(config: Config) -> Iterator[str]:
    """Yield every number that is negative, or is 0 and must not be, and a port that is none."""
    for section, name in _numbers():
        value = getattr(getattr(config, section), name)
        if value is None or value > 0 or (value == 0 and name not in POSITIVE):
            continue
        words = "a positive number" if name in POSITIVE else "0 or more"
        yield describe(flag(name), got=value, expected=words, do=f"give {flag(name)} N")
    address = config.log.open_metrics
    if address is not None:
        found = re.fullmatch(r"(?:.+:)?(\d{1,5})", address)
        if found is None or not 0 < int(found[1]) < 65536:
            yield describe(
                "--open-metrics",
                got=address,
                expected="PORT or ADDRESS:PORT, a port from 1 to 65535",
                do="correct it",
            )


@cache
def _all_numbers() -> tuple[tuple[str, str], ...]:
    """(section, name) of every option that is a number."""
    return tuple(
        (section.name, name)
        for section in fields(Config)
        for name, option in options_of([type(getattr(Config(), section.name))]).items()
        if option.kind in (int, float, int | None, float | None)
    )


@cache  # the planner checks thousands of configurations
def _numbers() -> tuple[tuple[str, str], ...]:
    """(section, name) of every option that is a number and is checked here."""
    return tuple(
        (section.name, name)
        for section in fields(Config)
        for name, option in options_of([type(getattr(Config(), section.name))]).items()
        if option.kind in (int, float, int | None) and name not in CHECKED_ELSEWHERE
    )
