"""Megatron's names of options that have another name here, and Megatron's switches that every LLaMA
needs.

Most Megatron flags need no alias: ``--micro-batch-size``, ``--lr``, ``--seq-length`` and so on are
field names in ``schema.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Alias:
    """Another name for an option.

    An alias with a ``value`` is a switch (it takes no word, or true/false); any other takes the
    value of its field.
    """

    field: str | None = None
    """The option it sets. None: it sets nothing, and is refused unless it asks for what holds here
    anyway."""
    value: str | None = None
    """The text for which the switch stands, read as the field's value; without a field: the only
    boolean that is accepted."""
    convert: Callable[[str], str] | None = None
    """Text as Megatron has it -> text for the field. Raises ValueError with what is expected."""
    help: str = ""
    """Its effect here, and the remedy when it is refused."""
    implies: tuple[str, str] | None = None
    """Another option and its text, used if the switch is on and that option is not given."""

    @property
    def remedy(self) -> str:
        """The remedy for a refused value: the help, which may call others accepted."""
        return self.help.replace(_UNCHANGED, ": leave it out")


def only(*accepted: str, meaning: str | None = None) -> Callable[[str], str]:
    """Return a check that accepts some words, each as it is or as ``meaning``."""

    def check(text: str) -> str:
        if text not in accepted:
            raise ValueError(" or ".join(accepted))
        return text if meaning is None else meaning

    return check


def zero(text: str) -> str:
    """Accept 0 in any spelling of a number."""
    try:
        is_zero = float(text) == 0.0
    except ValueError:
        is_zero = False
    if not is_zero:
        raise ValueError("0")
    return text


def anything(text: str) -> str:
    """Accept any word: it changes nothing."""
    return text


def _all_alike(names: str, alias: Alias) -> dict[str, Alias]:
    """Return the same alias under several names."""
    return dict.fromkeys(names.split(), alias)


_UNCHANGED = ": accepted, changes nothing"
_MAPPED = "datasets are memory-mapped, and no index is written"
_LOGGED = "log.jsonl always has it, and --log-format megatron shows it"
_NOT_LOGGED = "the log has no such lines; training is the same" + _UNCHANGED
_ONE_FORMAT = "--save has one format, --load finds the format by itself"
_LLAMA = "every LLaMA has it" + _UNCHANGED
_NO_DROPOUT = "LLaMA is trained without dropout: only 0 is accepted"
_ORDER = "Megatron shuffles the samples with either; here --data-order decides"

MEGATRON: Mapping[str, Alias] = MappingProxyType(
    {
        "model": Alias("preset"),
        "num_layers": Alias("num_hidden_layers"),
        "ffn_hidden_size": Alias("intermediate_size"),
        "num_query_groups": Alias("num_key_value_heads"),
        "moe_router_topk": Alias("num_experts_per_tok"),
        "moe_ffn_hidden_size": Alias("moe_intermediate_size"),
        # Then Megatron does not divide the probabilities of the chosen experts by their sum.
        "moe_router_pre_softmax": Alias("norm_topk_prob", value="false"),
        "expert_tensor_parallel_size": Alias(
            convert=only("1"),
            help="every rank has its experts whole: only 1 is accepted, and "
            "--expert-model-parallel-size divides them among ranks",
        ),
        "moe_router_dtype": Alias(
            convert=only("fp32"), help="routers are in fp32, in fp64 if all is" + _UNCHANGED
        ),
        "group_query_attention": Alias(
            value="true",
            help="--num-query-groups alone decides; leave that out for multi-head attention",
        ),
        "norm_epsilon": Alias("rms_norm_eps"),
        "layernorm_epsilon": Alias("rms_norm_eps"),
        "rotary_base": Alias("rope_theta"),
        "init_method_std": Alias("initializer_range"),
        "untie_embeddings_and_output_weights": Alias("tie_word_embeddings", value="false"),
        "tokenizer_name_or_path": Alias("tokenizer_model"),
        "use_distributed_optimizer": Alias("data_parallel_sharding_strategy", value="optim"),
        "overlapped_distributed_optimizer": Alias(
            "data_parallel_sharding_strategy",
            value="optim_grads",
            implies=("reduce_bucket_size", "5e8"),
        ),
        "recompute_activations": Alias("recompute_granularity", value="selective"),
        "dataloader_type": Alias(
            "data_order", convert=only("cyclic", "single", meaning="shuffled"), help=_ORDER
        ),
        "swiglu": Alias(value="true", help=_LLAMA),
        "use_rotary_position_embeddings": Alias(value="true", help=_LLAMA),
        "no_position_embedding": Alias(value="true", help=_LLAMA),
        "disable_bias_linear": Alias(value="true", help=_LLAMA),
        "normalization": Alias(convert=only("RMSNorm"), help=_LLAMA),
        "RMSNorm": Alias(value="true", help=_LLAMA),
        "causal_lm": Alias(value="true", help=_LLAMA),
        "use_flash_attn": Alias(
            value="true",
            help="--attention-backend decides, and auto takes cuDNN's or the flash kernels: "
            "accepted, changes nothing",
        ),
        "no_gradient_accumulation_fusion": Alias(
            value="true",
            help="gradients are always written into the buffers that are reduced, without "
            "apex: accepted, changes nothing",
        ),
        "data_impl": Alias(
            convert=only("mmap"),
            help="datasets are always memory-mapped: accepted, changes nothing",
        ),
        "override_opt_param_scheduler": Alias(
            value="true",
            help="the learning rate always follows the options, never a checkpoint: accepted, "
            "changes nothing",
        ),
        "position_embedding_type": Alias(convert=only("rope"), help=_LLAMA),
        "attention_dropout": Alias(convert=zero, help=_NO_DROPOUT),
        "hidden_dropout": Alias(convert=zero, help=_NO_DROPOUT),
        "num_virtual_stages_per_pipeline_rank": Alias("virtual_pipeline_model_parallel_size"),
        "kv_channels": Alias("head_dim"),
        "ddp_bucket_size": Alias("reduce_bucket_size"),
        "use_torch_fsdp2": Alias("data_parallel_sharding_strategy", value="optim_grads_params"),
        "use_megatron_fsdp": Alias("data_parallel_sharding_strategy", value="optim_grads_params"),
        "accumulate_allreduce_grads_in_fp32": Alias("grad_reduce_in_bf16", value="false"),
        "rotary_percent": Alias("partial_rotary_factor"),
        "qk_layernorm": Alias("qk_norm", value="head"),
        "qk_l2_norm": Alias("qk_norm", value="l2"),
        "muon_use_nesterov": Alias("muon_nesterov", value="true"),
        "recompute_method": Alias(
            convert=only("block"),
            help="--recompute-granularity full recomputes each block by itself, of every stage the "
            "first --recompute-num-layers",
        ),
        "rerun_mode": Alias(
            convert=only("disabled"), help="--on-bad-step decides what follows a bad step"
        ),
        **_all_alike(
            "use_mcore_models no_persist_layer_norm no_masked_softmax_fusion no_rope_fusion "
            "no_bias_swiglu_fusion no_bias_gelu_fusion no_bias_dropout_fusion "
            "cross_entropy_loss_fusion attention_softmax_in_fp32 apply_query_key_layer_scaling "
            "no_async_tensor_model_parallel_allreduce no_barrier_with_level_1_timing "
            "use_cpu_initialization use_pytorch_profiler manual_gc moe_grouped_gemm "
            "moe_permute_fusion moe_router_fusion moe_use_legacy_grouped_gemm "
            "moe_router_padding_for_fp8 moe_router_padding_for_quantization "
            "moe_shared_expert_overlap",
            Alias(value="true", help="the trainer chooses its kernels by itself" + _UNCHANGED),
        ),
        **_all_alike(
            "transformer_impl cross_entropy_fusion_impl manual_gc_interval "
            "empty_unused_memory_level",
            Alias(convert=anything, help="the trainer chooses its kernels by itself" + _UNCHANGED),
        ),
        **_all_alike(
            "overlap_grad_reduce overlap_param_gather delay_grad_reduce delay_param_gather "
            "align_grad_reduce align_param_gather overlap_p2p_communication "
            "overlap_param_gather_with_optimizer_step use_contiguous_parameters_in_local_ddp "
            "no_contiguous_buffers_in_local_ddp no_scatter_gather_tensors_in_pipeline "
            "ddp_average_in_collective",
            Alias(value="true", help="communication always overlaps computation" + _UNCHANGED),
        ),
        **_all_alike(
            "DDP_impl distributed_backend local_rank",
            Alias(convert=anything, help="the device and the environment decide" + _UNCHANGED),
        ),
        "use_precision_aware_optimizer": Alias(
            value="true", help="--exp-avg-dtype and --exp-avg-sq-dtype decide" + _UNCHANGED
        ),
        **_all_alike(
            "main_grads_dtype main_params_dtype",
            Alias(convert=only("fp32"), help="master weights and gradients are fp32"),
        ),
        "calculate_per_token_loss": Alias(
            value="true", help="the loss is always the mean over tokens" + _UNCHANGED
        ),
        "no_create_attention_mask_in_dataloader": Alias(
            value="true", help="no mask is ever made" + _UNCHANGED
        ),
        **_all_alike(
            "no_mmap_bin_files mmap_warmup", Alias(value="true", help=_MAPPED + _UNCHANGED)
        ),
        **_all_alike(
            "num_workers num_dataset_builder_threads",
            Alias(convert=anything, help=_MAPPED + _UNCHANGED),
        ),
        **_all_alike(
            "log_throughput log_memory_to_tensorboard log_learning_rate_to_tensorboard "
            "log_loss_scale_to_tensorboard",
            Alias(value="true", help=_LOGGED + _UNCHANGED),
        ),
        **_all_alike(
            "log_params_norm log_num_zeros_in_grad log_progress log_world_size_to_tensorboard "
            "moe_per_layer_logging",
            Alias(value="true", help=_NOT_LOGGED),
        ),
        **_all_alike(
            "timing_log_level timing_log_option log_memory_interval",
            Alias(convert=anything, help=_NOT_LOGGED),
        ),
        "tensorboard_log_interval": Alias(
            convert=anything, help="--log-interval is TensorBoard's too" + _UNCHANGED
        ),
        **_all_alike(
            "use_checkpoint_args use_mp_args_from_checkpoint_args "
            "use_tokenizer_model_from_checkpoint_args",
            Alias(
                value="true", help="what is not given comes from the folder of --load" + _UNCHANGED
            ),
        ),
        **_all_alike(
            "no_load_rng no_save_rng",
            Alias(
                value="true",
                help="--seed and the position in the run decide all that is random" + _UNCHANGED,
            ),
        ),
        **_all_alike(
            "use_dist_ckpt auto_detect_ckpt_format ckpt_fully_parallel_save "
            "ckpt_fully_parallel_load no_ckpt_fully_parallel_save ckpt_assume_constant_structure",
            Alias(value="true", help=_ONE_FORMAT + _UNCHANGED),
        ),
        **_all_alike(
            "ckpt_format dist_ckpt_format dist_ckpt_strictness",
            Alias(convert=anything, help=_ONE_FORMAT + _UNCHANGED),
        ),
        "exit_on_missing_checkpoint": Alias(
            value="true", help="only --load auto begins without a checkpoint" + _UNCHANGED
        ),
        **_all_alike(
            "enable_cuda_graph external_cuda_graph",
            Alias(value="false", help="give --cuda-graph-scope block: graphs of whole blocks"),
        ),
        "cuda_graph_impl": Alias(
            convert=only("none", "local"), help="--cuda-graph-scope alone decides" + _UNCHANGED
        ),
        "exit_signal_handler": Alias(
            value="true", help="SIGTERM always ends a run with a save" + _UNCHANGED
        ),
        "check_for_nan_in_loss_and_grad": Alias(
            value="true", help="they are always checked: --on-bad-step" + _UNCHANGED
        ),
    }
)


def _replaced_by(option: str) -> Callable[[str], str]:
    """Return a converter that accepts nothing, for an option that another one has replaced."""

    def refuse(text: str) -> str:
        raise ValueError(option)

    return refuse


ALIASES: Mapping[str, Alias] = MappingProxyType(
    {
        # `from` is a keyword of Python, so no field can have that name.
        "from": Alias("source_format"),
        "deterministic": Alias("deterministic_mode"),
        "png": Alias(
            "svg",
            convert=_replaced_by("--svg FILE"),
            help="drawings are written as SVG, which every browser shows: give --svg FILE",
        ),
    }
)
"""Other names of options of single commands; a command without that option does not know them."""
