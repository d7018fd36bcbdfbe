"""Numbers that have to be positive, or must not be negative."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache

from megatron_llama.config.parse import flag, options_of
from megatron_llama.config.schema import Config
from megatron_llama.errors import describe

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


@cache  # the planner checks thousands of configurations
def _numbers() -> tuple[tuple[str, str], ...]:
    """(section, name) of every option that is a number and is checked here."""
    return tuple(
        (section.name, name)
        for section in fields(Config)
        for name, option in options_of([type(getattr(Config(), section.name))]).items()
        if option.kind in (int, float, int | None) and name not in CHECKED_ELSEWHERE
    )
