"""Megatron-LM's arguments of models with experts, and the models that they describe.

Megatron's router takes a softmax of the chosen logits. That is the softmax of all logits, with the
chosen ones divided by their sum: ``norm_topk_prob``. With ``--moe-router-pre-softmax`` they are not
divided."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from megatron_llama.checkpoint.model_folders.model_fields import GIVE_CONFIG
from megatron_llama.config.fields import Fields, read_fields, shown
from megatron_llama.config.limits import LARGEST_EXPERTS, LARGEST_RANKS
from megatron_llama.config.schema import ModelConfig
from megatron_llama.errors import describe
from megatron_llama.model.families.reader import LARGEST
from megatron_llama.model.hf_fields import IGNORE
from megatron_llama.model.plan.experts import is_sparse, sparse_layers

FAMILIES = ("mixtral", "qwen3_moe")
"""The families with experts that Megatron-LM has arguments for, and whose tensors are known."""
EVERYWHERE = 1
"""``moe_layer_freq`` of a model whose layers all have experts."""
FIXED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "moe_router_score_function": ("softmax",),
        "moe_router_topk_scaling_factor": (None, 0, 1),
        "moe_router_group_topk": (None, 0),
        "moe_router_topk_limited_devices": (None, 0),
        "moe_router_enable_expert_bias": (False,),
        "moe_router_force_load_balancing": (False,),
        "moe_enable_routing_replay": (False,),
        "moe_input_jitter_eps": (None, 0),
        "moe_token_dropping": (False,),
        "moe_pad_expert_input_to_capacity": (False,),
        "moe_apply_probs_on_input": (False,),
        "moe_shared_expert_intermediate_size": (None, 0),
        "moe_shared_expert_gate": (False,),
        "moe_latent_size": (None, 0),
        "moe_mlp_glu_interleave_size": (None, 0),
    }
)
"""Arguments that change the computation, or the order of weights, with the values that every model
here has. The first is Megatron's default."""
LOAD_BALANCING = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss")
"""Types of load balancing that choose experts as here: ``sinkhorn`` does not."""
READ = ("moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax")
"""Arguments that the model's fields follow from."""
_KERNELS = (
    "moe_grouped_gemm moe_use_legacy_grouped_gemm moe_permute_fusion moe_router_fusion "
    "moe_router_dtype moe_router_padding_for_fp8 moe_router_padding_for_quantization "
    "moe_token_dispatcher_type moe_flex_dispatcher_backend moe_enable_deepep moe_deepep_num_sms "
    "moe_hybridep_num_sms moe_per_layer_logging moe_layer_recompute moe_shared_expert_overlap "
    "moe_extended_tp"
)
"""Arguments of kernels, messages and logs. Rows that are added for quantised products have weights
of 0."""
_LOSSES = (
    "moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff moe_use_upcycling "
    "moe_upcycling_granularity"
)
"""Those of losses, which a run that goes on is told of, and of the making of first weights."""
_WITHOUT_EFFECT = (
    "moe_router_num_groups moe_router_bias_update_rate moe_expert_capacity_factor "
    "moe_token_drop_policy"
)
"""Those without effect while others have the values in FIXED."""
OF_A_RUN = frozenset(" ".join((_KERNELS, _LOSSES, _WITHOUT_EFFECT)).split())
"""Arguments that change nothing in the model of a checkpoint."""


def require_kinds(args: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError for arguments of experts that are of another kind than Megatron's."""
    with read_fields(args, where, do=GIVE_CONFIG) as fields:
        fields.integer("num_experts", high=LARGEST_EXPERTS, default=None, null=True)
        fields.integer("moe_router_topk", low=1, high=LARGEST_EXPERTS, default=None, null=True)
        fields.integer("moe_ffn_hidden_size", low=1, high=LARGEST, default=None, null=True)
        for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
            fields.integer(name, low=1, high=LARGEST_RANKS, default=None, null=True)
        if args.get("moe_router_pre_softmax") is not None:
            fields.switch("moe_router_pre_softmax")
        _require_layers(fields)


def _require_layers(fields: Fields) -> None:
    listed = fields.value("moe_layer_freq", None)
    if isinstance(listed, list | tuple):
        entries = fields.sequence(
            "moe_layer_freq", int, length=fields.content.get("num_layers") or len(listed)
        )
        if not set(entries) <= {0, 1}:
            fields.problem("moe_layer_freq", shown(listed), "a 0 or a 1 for each layer")
    else:
        fields.integer("moe_layer_freq", low=1, default=None, null=True)


def argument_problems(
    args: Mapping[str, Any], where: str, ignored: Collection[str]
) -> Iterator[str]:
    """Yield the arguments of experts that no model here has, and those that nothing here knows, but
    for names that the user has ``ignored``."""
    do = "such models cannot be converted"
    for name, values in FIXED.items():
        value = args.get(name)
        if value is not None and value not in values:
            yield describe(f"{where} {name}", got=shown(value), expected=values[0], do=do)
    types = args.get("moe_router_load_balancing_type") or LOAD_BALANCING[0]
    listed = list(types) if isinstance(types, list | tuple) else [types]
    if not all(kind in LOAD_BALANCING for kind in listed):
        yield describe(
            f"{where} moe_router_load_balancing_type",
            got=shown(types),
            expected=" or ".join(LOAD_BALANCING),
            do=do,
        )
    capacity = args.get("moe_expert_capacity_factor")
    # Megatron reads a negative factor as none.
    if capacity is not None and not (isinstance(capacity, int | float) and capacity < 0):
        yield describe(
            f"{where} moe_expert_capacity_factor",
            got=shown(capacity),
            expected="None: no token is dropped",
            do=do,
        )
    known = {*FIXED, *READ, *OF_A_RUN, *ignored}
    for name, value in args.items():
        if name.startswith("moe_") and name not in known and value not in (None, False):
            yield describe(
                f"{where} {name}",
                got=shown(value),
                expected="an argument that is known here",
                do=f"name it if the model computes the same without it: {IGNORE} {name}",
            )


def given_experts(args: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return the values of these arguments in a file, in the form of ``model_experts``."""
    if "num_experts" not in args:
        return {}
    if not args["num_experts"]:
        return {"num_experts": 0}
    width = args.get("moe_ffn_hidden_size") or args.get("ffn_hidden_size")
    values = {
        "num_experts": args["num_experts"],
        "moe_router_topk": args.get("moe_router_topk"),
        "moe_ffn_hidden_size": width,
    }
    return {
        **{name: value for name, value in values.items() if value is not None},
        "moe_router_pre_softmax": bool(args.get("moe_router_pre_softmax")),
        "moe_layer_freq": _layer_list(args.get("moe_layer_freq") or EVERYWHERE, layers),
    }


def model_experts(model: ModelConfig) -> dict[str, Any]:
    """Return the arguments that a model's fields follow from. Layers with experts are listed."""
    if not model.num_experts:
        return {"num_experts": 0}
    return {
        "num_experts": model.num_experts,
        "moe_router_topk": model.num_experts_per_tok,
        "moe_ffn_hidden_size": model.moe_intermediate_size,
        "moe_router_pre_softmax": not model.norm_topk_prob,
        "moe_layer_freq": [int(is_sparse(model, n)) for n in range(model.num_hidden_layers)],
    }


def _layer_list(frequency: int | Sequence[int], layers: int) -> list[int]:
    """Return 1 for each layer with experts and 0 for the others. A number n is every n-th, from the
    first on."""
    if not isinstance(frequency, int):
        return list(frequency)
    return [int(layer % frequency == 0) for layer in range(layers)]


def family_fields(
    args: Mapping[str, Any], layers: int, window: int | None
) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of a config.json for a model with experts, and the names of the arguments
    that are missing. ``window`` is the number of positions that a query sees; None: all."""
    given = given_experts(args, layers)
    names = ("moe_router_topk", "moe_ffn_hidden_size")
    missing = [name for name in names if name not in given]
    chosen = {"num_experts_per_tok": given.get("moe_router_topk")}
    width = given.get("moe_ffn_hidden_size")
    if not args.get("qk_layernorm"):
        own = {"num_local_experts": given["num_experts"], "intermediate_size": width}
        return {"model_type": "mixtral", **own, **chosen, "sliding_window": window}, missing
    dense = [layer for layer, sparse in enumerate(given["moe_layer_freq"]) if not sparse]
    return {
        "model_type": "qwen3_moe",
        "num_experts": given["num_experts"],
        **chosen,
        "moe_intermediate_size": width,
        "norm_topk_prob": not given["moe_router_pre_softmax"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        "use_sliding_window": window is not None,
        "sliding_window": window,
    }, missing


def expert_args(model: ModelConfig) -> dict[str, Any]:
    """Return Megatron-LM's arguments of a model with experts."""
    args = model_experts(model)
    if has_experts_everywhere(model):
        # With a list Megatron looks for tensors of single layers.
        args["moe_layer_freq"] = EVERYWHERE
    return {
        **{name: values[0] for name, values in FIXED.items()},
        **args,
        "moe_router_load_balancing_type": LOAD_BALANCING[0],
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
        "moe_router_dtype": "fp32",
        "moe_expert_capacity_factor": None,
        "moe_grouped_gemm": True,
        "expert_tensor_parallel_size": 1,
    }


def has_experts_everywhere(model: ModelConfig) -> bool:
    """Whether all layers have experts."""
    return sparse_layers(model) == model.num_hidden_layers


def held_problems(model: ModelConfig) -> Iterator[str]:
    """Yield the features of a model with experts that Megatron-LM cannot compute, or whose tensors
    are not known."""
    do = "take another format: hf and native hold every model"
    if model.model_type not in FAMILIES:
        expected = f"{' or '.join(FAMILIES)}: of others it is not known how Megatron-Core has them"
        yield describe("megatron model_type", got=model.model_type, expected=expected, do=do)
    elif model.num_experts_per_tok == 1 and model.norm_topk_prob:
        yield describe(
            "megatron num_experts_per_tok",
            got="1 with norm_topk_prob",
            expected="2 or more: Megatron-LM refuses a router whose weights are all 1",
            do=do,
        )
