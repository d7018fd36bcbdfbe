"""Numbers that have to be positive, or must not be negative."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.config.parse import flag
from megatron_llama.config.schema import MODEL_SIZES, Config
from megatron_llama.errors import describe

POSITIVE = (
    (
        "parallel",
        (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "context_parallel_size",
            "reduce_bucket_size",
            "grad_slots",
            "exchange_chunk_bytes",
            "distributed_timeout_minutes",
        ),
    ),
    ("training", ("seq_length", "micro_batch_size")),
    (
        "training",
        (
            "initial_loss_scale",
            "min_loss_scale",
            "loss_scale_window",
            "hysteresis",
            "loss_spike_window",
        ),
    ),
    ("model", ("rms_norm_eps", "rope_theta", "make_vocab_size_divisible_by")),
    ("optimizer", ("adam_eps",)),
    ("lora", ("lora_alpha",)),
    ("log", ("log_interval", "tensorboard_queue_size", "sample_tokens")),
)
"""(section of the configuration, its fields)."""
NOT_NEGATIVE = (
    (
        "model",
        (
            "vocab_size",
            *MODEL_SIZES,
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "initializer_range",
        ),
    ),
    ("model", ("bos_token_id", "eos_token_id")),
    (
        "training",
        (
            "global_batch_size",
            "eval_interval",
            "eval_iters",
            "seed",
            "loss_spike_factor",
            "max_bad_steps",
        ),
    ),
    (
        "training",
        ("train_samples", "epochs", "exit_interval", "exit_duration_in_mins", "z_loss_weight"),
    ),
    ("training", ("early_stop_patience",)),
    ("log", ("sample_interval",)),
    ("training", ("check_weight_hash_across_dp_replicas_interval",)),
    (
        "optimizer",
        (
            "lr",
            "min_lr",
            "lr_decay_iters",
            "lr_warmup_iters",
            "lr_wsd_decay_iters",
            "weight_decay",
            "clip_grad",
        ),
    ),
    (
        "optimizer",
        ("lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples", "lr_warmup_fraction"),
    ),
    ("lora", ("lora_rank",)),
    ("checkpoint", ("save_interval", "save_retain", "save_retain_interval")),
    ("offload", ("speculation_bytes",)),
    ("launch", ("nodes", "gpus_per_node")),
    ("log", ("profile_step_start",)),
    ("parallel", ("data_parallel_shard_size", "prefetch_bytes")),
)


def range_problems(config: Config) -> Iterator[str]:
    """Yield every number of the two tables that is too small."""
    for table, words, lowest in (
        (POSITIVE, "a positive number", 1),
        (NOT_NEGATIVE, "0 or more", 0),
    ):
        for section, names in table:
            for name in names:
                value = getattr(getattr(config, section), name)
                # Not value < lowest: a fraction between 0 and 1 is positive.
                if value is not None and (value < 0 or (lowest == 1 and value == 0)):
                    yield describe(flag(name), got=value, expected=words, do=f"give {flag(name)} N")
