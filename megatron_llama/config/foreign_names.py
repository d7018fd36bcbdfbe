"""Options of other trainers, and their equivalents here, for errors about unknown names.
``docs/migrating.md`` explains them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_PAGE = "docs/migrating.md"
_TORCHRUN = "it is torchrun's: write it before -m megatron_llama"
_ACCUMULATION = "--global-batch-size, which counts the samples of a whole step"
_MICRO = "--micro-batch-size"
_SHARDING = "--data-parallel-sharding-strategy"
_ZERO = f"{_SHARDING} optim (stage 1), optim_grads (2) or optim_grads_params (3)"
_RECOMPUTE = "--recompute-granularity"
_ROPE = "--rope-scaling with the numbers of config.json, or a preset: --model"
_SPLIT = "--data-path with --split"
_LAYERS = "--pipeline-layer-split with the layers of all stages, in order"
_INTERLEAVED = "--virtual-pipeline-model-parallel-size with --pipeline-schedule interleaved"
_FP8 = "--fp8 blockwise or tensorwise with --bf16: a scale for each tile, or for each tensor"
_ENDS = "--fp8-bf16-layers, as many at either end"
_STATELESS = "--fp8 keeps no state: delayed scaling is not written here"
_TEXT = "--tokenizer-model with the file or folder of the tokenizer"
_MAKE_DATA = "--data-path with what `preprocess` has written"
_CHECKPOINTS = "--save, --save-interval and --save-retain"
_EVALUATION = "--eval-interval and --eval-iters"
_BAD_STEP = "--on-bad-step and --loss-spike-factor"
_BOARD = "--tensorboard-dir"
_ROUTER_LOSS = "--moe-router-load-balancing-type hf_aux_loss with --moe-aux-loss-coeff"
_NO_CAPACITY = "no token is dropped here, so experts have no capacity"
_EXPERT_RANKS = "--expert-model-parallel-size"
_DENSE_BLOCKS = "--decoder-sparse-step or --mlp-only-layers, the dense layers"
_NO_NOISE = "routers have no noise here"
_WHOLE_EXPERTS = "every rank has its experts whole"
_PAIR_LENGTH = "--seq-length, which holds both halves of a pair"

INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        # Megatron-LM: what has another meaning here, or none
        "use_rope_scaling": _ROPE,
        "rope_scaling_factor": _ROPE,
        "window_size": "--sliding-window, which counts a query's own position too",
        "window_attn_skip_freq": "--layer-types with the kind of each layer",
        "add_bias_linear": "--attention-bias and --mlp-bias",
        "moe_layer_freq": _DENSE_BLOCKS,
        "moe_layer_recompute": f"{_RECOMPUTE} selective, which computes experts again",
        "num_layers_per_virtual_pipeline_stage": _INTERLEAVED,
        "decoder_first_pipeline_num_layers": _LAYERS,
        "decoder_last_pipeline_num_layers": _LAYERS,
        "pipeline_model_parallel_layout": _LAYERS,
        "num_distributed_optimizer_instances": "--data-parallel-shard-size, the ranks of a group",
        "fp8_format": _FP8,
        "fp8_recipe": _FP8,
        "first_last_layers_bf16": _ENDS,
        "num_layers_at_start_in_bf16": _ENDS,
        "num_layers_at_end_in_bf16": _ENDS,
        "train_data_path": _SPLIT,
        "valid_data_path": _SPLIT,
        "test_data_path": _SPLIT,
        "data_args_path": _SPLIT,
        "per_split_data_args_path": _SPLIT,
        "mock_data": _MAKE_DATA,
        "vocab_file": _TEXT,
        "merge_file": _TEXT,
        "pretrained_checkpoint": "--load FOLDER --finetune",
        "ckpt_step": "--load FOLDER/iter_0000500, the checkpoint itself",
        "no_save_optim": "--export-hf FOLDER, which writes the weights alone at the end",
        "non_persistent_save_interval": _BAD_STEP,
        "no_check_for_nan_in_loss_and_grad": _BAD_STEP,
        "loss_scale": "--initial-loss-scale",
        "override_lr": "--lr, which always decides",
        "wandb_entity": "the variable WANDB_ENTITY",
        "transformer_pipeline_model_parallel_size": "--pipeline-model-parallel-size",
        "model_parallel_size": "--tensor-model-parallel-size",
        "tp": "--tensor-model-parallel-size",
        "pp": "--pipeline-model-parallel-size",
        "cp": "--context-parallel-size",
        # DeepSpeed, and Megatron-DeepSpeed
        "zero_stage": _ZERO,
        "zero_optimization": _ZERO,
        "train_batch_size": "--global-batch-size",
        "train_micro_batch_size_per_gpu": _MICRO,
        "gradient_clipping": "--clip-grad",
        "offload_optimizer": "--optimizer-offload",
        "cpu_offload": "--optimizer-offload",
        "cpu_optimizer": "--optimizer-offload",
        "checkpoint_activations": f"{_RECOMPUTE} full",
        "ep_size": _EXPERT_RANKS,
        "ep_world_size": _EXPERT_RANKS,
        "moe_expert_parallel_size": _EXPERT_RANKS,
        "topk": "--num-experts-per-tok",
        "moe_loss_coeff": "--moe-aux-loss-coeff with --moe-router-load-balancing-type",
        # torchtitan
        "model.name": "--model with a preset (`inspect presets` lists them)",
        "model.flavor": "--model with a preset (`inspect presets` lists them)",
        "model.tokenizer_path": "--tokenizer-model",
        "model.hf_assets_path": "--tokenizer-model",
        "training.dataset": _MAKE_DATA,
        "training.dataset_path": _MAKE_DATA,
        "training.local_batch_size": _MICRO,
        "training.batch_size": _MICRO,
        "training.global_batch_size": "--global-batch-size",
        "training.seq_len": "--seq-length",
        "training.steps": "--train-iters",
        "training.max_norm": "--clip-grad",
        "training.seed": "--seed",
        "training.mixed_precision_param": "--bf16",
        "training.compile": "--compile",
        "optimizer.lr": "--lr",
        "optimizer.beta1": "--adam-beta1",
        "optimizer.beta2": "--adam-beta2",
        "optimizer.eps": "--adam-eps",
        "optimizer.weight_decay": "--weight-decay",
        "lr_scheduler.warmup_steps": "--lr-warmup-iters",
        "lr_scheduler.decay_ratio": "--lr-decay-style WSD with --lr-wsd-decay-iters",
        "lr_scheduler.decay_type": "--lr-wsd-decay-style, or --lr-decay-style",
        "lr_scheduler.min_lr_factor": "--min-lr, a learning rate",
        "parallelism.data_parallel_shard_degree": f"{_SHARDING} optim_grads_params",
        "parallelism.fsdp_reshard_after_forward": "--param-slots",
        "parallelism.tensor_parallel_degree": "--tensor-model-parallel-size",
        "parallelism.enable_async_tensor_parallel": "--tp-comm-overlap",
        "parallelism.context_parallel_degree": "--context-parallel-size",
        "parallelism.context_parallel_rotate_method": "--cp-comm-type",
        "parallelism.expert_parallel_degree": _EXPERT_RANKS,
        "ep": _EXPERT_RANKS,
        "parallelism.pipeline_parallel_degree": "--pipeline-model-parallel-size",
        "parallelism.pipeline_parallel_schedule": "--pipeline-schedule",
        "parallelism.pipeline_parallel_microbatch_size": _MICRO,
        "parallelism.pipeline_parallel_layers_per_stage": _LAYERS,
        "parallelism.module_fqns_per_model_part": _LAYERS,
        "activation_checkpoint.mode": _RECOMPUTE,
        "activation_checkpoint.selective_ac_option": f"{_RECOMPUTE} and --recompute-num-layers",
        "checkpoint.folder": "--save",
        "checkpoint.interval": "--save-interval",
        "checkpoint.keep_latest_k": "--save-retain",
        "checkpoint.initial_load_path": "--load with --finetune, or --init-from-hf",
        "checkpoint.async_mode": "--async-save",
        "checkpoint.last_save_in_hf": "--export-hf",
        "checkpoint.export_dtype": "--export-hf",
        "metrics.log_freq": "--log-interval",
        "metrics.enable_tensorboard": _BOARD,
        "metrics.save_tb_folder": _BOARD,
        "validation.freq": "--eval-interval",
        "validation.steps": "--eval-iters",
        "comm.train_timeout_seconds": "--distributed-timeout-minutes",
        # config.json of models with experts
        "num_local_experts": "--num-experts",
        "n_routed_experts": "--num-experts",
        "interleave_moe_layer_step": "--decoder-sparse-step",
        "moe_layers": _DENSE_BLOCKS,
        "first_k_dense_replace": _DENSE_BLOCKS,
        # HuggingFace's Trainer
        "model_name_or_path": "--init-from-hf FOLDER",
        "per_device_train_batch_size": _MICRO,
        "per_device_eval_batch_size": _MICRO,
        "gradient_accumulation_steps": _ACCUMULATION,
        "max_steps": "--train-iters",
        "num_train_epochs": "--epochs",
        "learning_rate": "--lr",
        "lr_scheduler_type": "--lr-decay-style",
        "lr_scheduler_kwargs": "--min-lr",
        "lr_scheduler_kwargs.min_lr": "--min-lr",
        "warmup_steps": "--lr-warmup-iters",
        "warmup_ratio": "--lr-warmup-fraction",
        "adam_epsilon": "--adam-eps",
        "max_grad_norm": "--clip-grad",
        "optim": "--optimizer, and for adamw_bnb_8bit --exp-avg-dtype 8bit --exp-avg-sq-dtype 8bit",
        "gradient_checkpointing": f"{_RECOMPUTE} full",
        "fsdp": _SHARDING,
        "output_dir": "--save",
        "save_steps": _CHECKPOINTS,
        "save_total_limit": _CHECKPOINTS,
        "resume_from_checkpoint": "--load auto",
        "eval_strategy": _EVALUATION,
        "eval_steps": _EVALUATION,
        "logging_steps": "--log-interval",
        "logging_dir": _BOARD,
        "report_to": f"{_BOARD}, or --wandb-project",
        "run_name": "--job-name",
        "data_seed": "--seed",
        "ddp_timeout": "--distributed-timeout-minutes",
        "block_size": "--seq-length",
        # TRL's SFTTrainer
        "train_dataset": "--train-data FILE (the command `sft`)",
        "eval_dataset": "--valid-data FILE (the command `sft`)",
        "max_length": "--seq-length",
        "max_seq_length": "--seq-length",
        "packing_strategy": "--packing",
        "padding_free": "--packing",
        "assistant_only_loss": "--loss-on assistant",
        "completion_only_loss": "--loss-on all, or the format `prompt`",
        "chat_template_path": "--chat-template",
        "clone_chat_template": "--chat-template",
        "peft_config": "--lora-rank, --lora-alpha and --lora-target-modules",
        "lora_r": "--lora-rank",
        "target_modules": "--lora-target-modules",
        # TRL's DPOTrainer and the other trainers for preferences
        "loss_type": "--method (the command `align`)",
        "loss_weights": "--sft-loss-weight, for the weight of `sft` (the command `align`)",
        "cpo_alpha": "--sft-loss-weight (the command `align`)",
        "rpo_alpha": "--sft-loss-weight (the command `align`)",
        "precompute_ref_batch_size": _MICRO,
        "truncation_mode": "--on-long-sample truncate, which keeps the beginning",
        "max_prompt_length": _PAIR_LENGTH,
        "max_completion_length": _PAIR_LENGTH,
        "output_router_logits": _ROUTER_LOSS,
        "router_aux_loss_coef": _ROUTER_LOSS,
        "generate_during_eval": "--sample-interval and --sample-prompt",
        "activation_offloading": f"{_RECOMPUTE} selective or full",
    }
)
"""Foreign name (with underscores) -> the equivalent here."""

NOT_NEEDED: Mapping[str, str] = MappingProxyType(
    {
        "tiktoken_pattern": "the file of --tokenizer-model says it",
        "use_checkpoint_opt_param_scheduler": "the options decide",
        "moe_expert_capacity_factor": _NO_CAPACITY,
        "moe_pad_expert_input_to_capacity": _NO_CAPACITY,
        "moe_token_drop_policy": _NO_CAPACITY,
        "moe_train_capacity_factor": _NO_CAPACITY,
        "moe_eval_capacity_factor": _NO_CAPACITY,
        "moe_min_capacity": _NO_CAPACITY,
        "disable_moe_token_dropping": _NO_CAPACITY,
        "moe_input_jitter_eps": _NO_NOISE,
        "router_jitter_noise": _NO_NOISE,
        "moe_extended_tp": _WHOLE_EXPERTS,
        "enable_expert_tensor_parallelism": _WHOLE_EXPERTS,
        "parallelism.expert_tensor_parallel_degree": _WHOLE_EXPERTS,
        "create_moe_param_group": "experts have groups of their own already",
        "overlap_moe_expert_parallel_comm": "messages to experts are waited for here",
        "decoupled_lr": "--param-group 'embed_tokens*: lr=...' 'lm_head*: lr=...'",
        "decoupled_min_lr": "--param-group 'embed_tokens*: min_lr=...' 'lm_head*: min_lr=...'",
        "parallelism.data_parallel_replicate_degree": "it follows from --data-parallel-shard-size",
        "load_best_model_at_end": "the best checkpoint is kept as `best` below --save",
        "dataloader_num_workers": "datasets are memory-mapped",
        "group_by_length": "every sample is full",
        "dataset_num_proc": "every process reads a share of the files",
        "eval_packing": "evaluation packs as training does",
        "precompute_ref_log_probs": "the reference is always scored before the first step",
        "ref_model": "the reference is the model that the run begins with",
        "disable_dropout": "there is no dropout",
    }
)
"""Foreign name -> why it has no equivalent here."""

_EXPERTS = (
    "of experts there are --num-experts, --moe-router-topk, --moe-ffn-hidden-size and what "
    "docs/experts.md names"
)
_REINFORCEMENT = (
    "reinforcement learning is not written here: `align` tunes on preferences, `sft` on "
    "conversations"
)
_MOVING = "a reference that moves is not written here: it is scored once (docs/align.md)"
_OTHER_LOSS = "this loss is not written here: docs/align.md has those of `align`"

FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "fp8_amax": _STATELESS,
        "fp8_margin": _STATELESS,
        "fp8_interval": _STATELESS,
        "fp8_param": "parameters stay in bf16, and so do their messages: leave it out",
        "fp8_wgrad": "weight gradients are products in bf16 here: leave it out",
        "quantize": "of FP8 there are --fp8 blockwise and tensorwise; leave the other options out",
        "fp4": "FP4 is not written here: leave its options out and train with --bf16",
        "moe": _EXPERTS,
        "expert": _EXPERTS,
        "dpo": "the command `align` tunes on preferences",
        "sync_ref_model": _MOVING,
        "ref_model_mixup_alpha": _MOVING,
        "ref_model_sync_steps": _MOVING,
        "f_divergence_type": _OTHER_LOSS,
        "f_alpha_divergence_coef": _OTHER_LOSS,
        "ld_alpha": _OTHER_LOSS,
        "use_weighting": _OTHER_LOSS,
        "discopop_tau": _OTHER_LOSS,
        "grpo": _REINFORCEMENT,
        "ppo": _REINFORCEMENT,
        "rl": _REINFORCEMENT,
        "retro": "Retro is not written here: leave its options out",
        "deepspeed": f"there is no DeepSpeed here: give {_SHARDING} and --optimizer-offload",
        "rdzv": _TORCHRUN,
        "nproc_per_node": _TORCHRUN,
        "nnodes": _TORCHRUN,
        "node_rank": _TORCHRUN,
        "master_addr": _TORCHRUN,
        "master_port": _TORCHRUN,
        "standalone": _TORCHRUN,
        "max_restarts": _TORCHRUN,
    }
)
"""The first words of foreign names -> the remedy for all names that begin so."""


def remedy_for(name: str) -> str | None:
    """Return the remedy for another trainer's option, or None if the name is unknown."""
    key = name.replace("-", "_")
    if key in INSTEAD:
        return f"give {INSTEAD[key]} ({_PAGE})"
    if key in NOT_NEEDED:
        return f"leave it out: {NOT_NEEDED[key]} ({_PAGE})"
    for first, said in FAMILIES.items():
        if key == first or key.startswith((f"{first}_", f"{first}.")):
            return f"{said} ({_PAGE})"
    return None
