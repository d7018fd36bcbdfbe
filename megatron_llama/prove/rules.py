"""What becomes of each option when a configuration is made small: it is kept, scaled, or left out.

A new option needs a line here; a test says so."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megatron_llama.config.schema import LaunchConfig, LogConfig

_KEPT = (
    # the model
    "model_type rms_norm_eps rope_theta tie_word_embeddings initializer_range attention_bias "
    "add_qkv_bias mlp_bias qk_norm norm_position apply_layernorm_1p hidden_act "
    "attn_logit_softcapping final_logit_softcapping partial_rotary_factor rope_local_base_freq "
    # how it is spread
    "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split cp_comm_type "
    "exchange_chunk_bytes recompute_granularity grad_reduce_in_bf16 "
    "high_priority_stream_groups nccl_pp_max_ctas "
    # the run
    "z_loss_weight seed bf16 fp16 initial_loss_scale min_loss_scale loss_scale_window hysteresis "
    "fp64 attention_backend deterministic_mode on_bad_step loss_spike_factor loss_spike_window "
    "max_bad_steps lr_decay_style lr_wsd_decay_style weight_decay adam_beta1 adam_beta2 adam_eps "
    "clip_grad train_pad_embedding optimizer_offload optimizer_offload_fraction "
    "offload_speculative zenflow_topk_ratio zenflow_overlap_step lora_dropout lora_target_modules "
    # what is read
    "data_order megatron_data_order reset_position_ids reset_attention_mask eod_mask_loss "
    "data_format loss_on repair_conversations on_bad_sample on_long_sample packing "
    "neftune_noise_alpha"
)
KEPT = frozenset(_KEPT.split())
"""Options whose values stay."""

_NO_GPU = "on CPUs it changes nothing"
_NO_BAD_STEP = "seen only if a step here is bad"
_NO_OVERFLOW = "seen only if a gradient here overflows"
WITHOUT_EFFECT: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("attention_backend", "deterministic_mode"), _NO_GPU),
        **dict.fromkeys(("high_priority_stream_groups", "nccl_pp_max_ctas"), _NO_GPU),
        **dict.fromkeys(("on_bad_step", "max_bad_steps"), _NO_BAD_STEP),
        **dict.fromkeys(("loss_spike_factor", "loss_spike_window"), _NO_BAD_STEP),
        **dict.fromkeys(("min_loss_scale", "hysteresis"), _NO_OVERFLOW),
        "loss_scale_window": "seen only if it is shorter than the steps that are run",
    }
)
"""Options that are kept and of which a small run may show nothing, and why."""

SCALED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("vocab_size", "make_vocab_size_divisible_by"),
            "padded if yours is, and split over the tensor-parallel ranks that there are",
        ),
        "pad_token_id": "the token that ends every document and answer here",
        "hidden_size": "no rule depends on the width; it is heads x head_dim if yours is",
        "intermediate_size": "no rule depends on the width",
        "num_hidden_layers": "every kind of block, and one or several to a stage, as yours",
        "num_attention_heads": "1 or more to a rank, and to a key/value head, as yours",
        "num_key_value_heads": "fewer than tp (copies), as many or more, as yours",
        "head_dim": "no rule depends on it; as many dims in proportion are rotated",
        "max_position_embeddings": "shorter or longer than the sequence, or in proportion to "
        "rope_scaling, as yours",
        "rope_scaling": "it changes frequencies and positions of the shorter sequence",
        "embedding_multiplier": "it follows from hidden_size",
        "query_pre_attn_scalar": "in the same proportion to head_dim",
        "sliding_window": "in the same proportion to the sequence",
        "layer_types": "every kind of layer",
        "tensor_model_parallel_size": "each rank has its share, as with more",
        "pipeline_model_parallel_size": "a first rank, a last one, and one between them",
        "pipeline_schedule": "there is one pipeline rank",
        "context_parallel_size": "each rank has one early and one late chunk, as with more",
        "virtual_pipeline_model_parallel_size": "several chunks to a rank, as yours",
        "pipeline_layer_split": "uneven where yours is",
        "sequence_parallel": "there is one tensor-parallel rank",
        "data_parallel_sharding_strategy": "of all strategies it does most",
        "data_parallel_shard_size": "shards, and replicas of them, as yours",
        "param_slots": "blocks take turns in them or have their own, as yours",
        "grad_slots": "blocks take turns in them or have their own, as yours",
        "prefetch_bytes": "as many blocks are gathered ahead, as far as there are",
        "reduce_bucket_size": "several messages, as yours",
        "recompute_num_layers": "some blocks of a stage, or all, as yours",
        "seq_length": "no rule depends on it",
        "micro_batch_size": "one sample or several, as yours",
        "global_batch_size": "one microbatch in a step or several, as yours",
        "rampup_batch_size": "it grows, if yours does, within the steps that are run",
        "train_samples": "the steps that are run",
        "epochs": "a part of a pass, one, or more, as yours; the last step has fewer samples",
        "check_weight_hash_across_dp_replicas_interval": "within the steps that are run",
        "eval_interval": "within the steps that are run",
        "eval_iters": "some batches tell as much",
        "lr": "so that a few steps change the weights by more than rounding",
        "min_lr": "in the same proportion to lr",
        **dict.fromkeys(
            ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters"),
            "in the same relation to the steps that are run",
        ),
        **dict.fromkeys(
            ("lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples"),
            "in the same relation to the steps that are run",
        ),
        "lr_warmup_fraction": "within the steps that are run",
        "freeze": "the same weights in the blocks that are left",
        "speculation_bytes": "in the same proportion to a rank's weights",
        **dict.fromkeys(
            (
                "zenflow_select_strategy",
                "zenflow_select_interval",
                "zenflow_update_interval",
                "zenflow_update_interval_cap",
                "zenflow_full_warm_up_rounds",
            ),
            "within the steps that are run",
        ),
        "lora_rank": "no rule depends on it",
        "lora_alpha": "in the same proportion to lora_rank",
        "data_path": "as many datasets, up to eight, of the text that is read here",
        "valid_data": "a file of its own, as yours",
        "chat_template": "the tokenizer here has a template of its own",
    }
)
"""Options whose values shrink, and why what is seen here is what would be seen with yours, where
``reasons.py`` has nothing to add."""

_START = "prove writes the weights to begin with"
_PATHS = "prove writes checkpoints and exports of its own"
_LENGTH = "prove runs a few steps"
OWN_TEXT = "prove reads text of its own, with a tokenizer of its own"
_LOG = "it changes nothing that is computed"
LEFT_OUT: Mapping[str, str] = MappingProxyType(
    {
        "preset": "it stands for the fields of the model",
        "num_labels": "a reward model is trained by align, on pairs",
        **dict.fromkeys(("bos_token_id", "eos_token_id"), OWN_TEXT),
        **dict.fromkeys(("tokenizer_model", "tokenizer_type"), OWN_TEXT),
        **dict.fromkeys(("train_data", "ignore_keys", "split", "on_changed_data"), OWN_TEXT),
        **dict.fromkeys(("data_cache_path", "data_cache_gib"), OWN_TEXT),
        **dict.fromkeys(
            ("stream_key", "stream_window", "stream_lanes", "stream_workers"), OWN_TEXT
        ),
        **dict.fromkeys(("load", "finetune", "load_optim", "init_from_hf"), _START),
        **dict.fromkeys(("ignore_hf_config_fields", "resize_embeddings"), _START),
        **dict.fromkeys(("save", "steal_save", "save_interval", "save_first_step"), _PATHS),
        **dict.fromkeys(
            ("save_retain", "save_retain_interval", "on_bad_checkpoint", "export_hf"), _PATHS
        ),
        **dict.fromkeys(
            ("optimizer", "muon_momentum", "muon_nesterov", "muon_num_ns_steps", "muon_adjust_lr"),
            "prove holds updates against AdamW's",
        ),
        **dict.fromkeys(
            ("exp_avg_dtype", "exp_avg_sq_dtype"), "prove holds updates against AdamW's in fp32"
        ),
        "param_group": "prove holds updates against AdamW's with one learning rate",
        "async_save": "prove saves every step in the foreground",
        **dict.fromkeys(("train_iters", "exit_interval", "exit_duration_in_mins"), _LENGTH),
        **dict.fromkeys(("exit_zero_on_signal", "early_stop_patience"), _LENGTH),
        "distributed_timeout_minutes": _LOG,
        "compile": "it takes a minute, and prove compares no kernels",
        "offload_cores": "all processors of this machine update",
        "zenflow_config": "it stands for the other options of zenflow",
        **dict.fromkeys(LogConfig.__dataclass_fields__, _LOG),
        **dict.fromkeys(LaunchConfig.__dataclass_fields__, "it says how many processes yours are"),
        **dict.fromkeys(("auto_parallel", "gpu", "nic_gbit", "coefficients"), "a layout is given"),
    }
)
"""Options that no case has, and why."""
