"""The ``args`` in checkpoints of Megatron-LM and Megatron-LLaMA, and the model that they describe.

Fields without an argument in these programs are kept in an extra one, ``hf_config``, which their
loaders ignore."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from megatron_llama.checkpoint.model_folders.model_fields import (
    GIVE_CONFIG,
    LLAMA31_SCALING,
    is_llama31_scaling,
    kind_problems,
    true_vocab_size,
)
from megatron_llama.checkpoint.model_folders.tokenizer_files import tokenizer_in
from megatron_llama.config.fields import read_fields, shown
from megatron_llama.config.limits import LARGEST_LAYERS, LARGEST_REAL, SMALLEST_REAL
from megatron_llama.config.schema import ModelConfig
from megatron_llama.converter.megatron.names import LEGACY
from megatron_llama.errors import CheckpointError, describe, listing
from megatron_llama.model.families.reader import LARGEST
from megatron_llama.model.hf import hf_config_from_model, model_config_from_hf
from megatron_llama.model.plan.params import padded_vocab_size
from megatron_llama.model.windows import FULL, SLIDING, layer_windows

HELD = (
    "attention_bias",
    "add_qkv_bias",
    "mlp_bias",
    "qk_norm",
    "sliding_window",
    "layer_types",
    "partial_rotary_factor",
)
"""Fields that LLaMA does not have, and that Megatron-LM has arguments for."""
SIZES: Mapping[str, str] = MappingProxyType(
    {
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "ffn_hidden_size": "intermediate_size",
        "num_attention_heads": "num_attention_heads",
    }
)
OTHER_MODELS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "swiglu": (True,),
        "normalization": ("RMSNorm",),
        "RMSNorm": (True,),
        "position_embedding_type": ("rope",),
        "rotary_interleaved": (False,),
        "multi_latent_attention": (False,),
        "apply_layernorm_1p": (False,),
        "apply_residual_connection_post_layernorm": (False,),
        "squared_relu": (False,),
        "quick_geglu": (False,),
        "openai_gelu": (False,),
        "glu_linear_offset": (0.0,),
        "activation_func_clamp_value": (None,),
        "no_rope_freq": (None,),
        "softmax_type": ("vanilla",),
        "qk_l2_norm": (False,),
        "attention_output_gate": (False,),
        "experimental_attention_variant": (None,),
        "mtp_num_layers": (None, 0),
        "use_mup": (False,),
        "is_hybrid_model": (False,),
        "hybrid_override_pattern": (None,),
        "heterogeneous_layers_config_path": (None,),
        "heterogeneous_layers_config_encoded_json": (None,),
        "spec": (None,),
    }
)
"""Arguments that change the computation, with the values that every model here has. A checkpoint
holds some hundred arguments, most of them of the run and different in each version, so this names
the harmful ones and not the harmless ones."""
COUNTS = (
    *SIZES,
    "num_query_groups",
    "kv_channels",
    "max_position_embeddings",
    "make_vocab_size_divisible_by",
)
REALS = (
    "norm_epsilon",
    "layernorm_epsilon",
    "rotary_base",
    "rotary_percent",
    "rope_scaling_factor",
    "rotary_seq_len_interpolation_factor",
)
SWITCHES = (
    "group_query_attention",
    "use_rope_scaling",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "untie_embeddings_and_output_weights",
)
"""Arguments that are positive integers, positive numbers, and true or false."""
MEGATRON_LLAMA_ONLY = ("causal_lm", "RMSNorm")
MEGATRON_ONLY = ("normalization", "group_query_attention", "rotary_base")
"""Arguments that one of the families has and the other does not."""


def read_args(
    args: Mapping[str, Any],
    config: ModelConfig | None,
    *,
    tied: bool,
    where: str,
    has_experts: bool = False,
    ignored: Collection[str] = (),
) -> ModelConfig:
    """Return the model of a file's arguments, its vocabulary still unknown (1). ``config`` is the
    user's or the file's own, which must not contradict them. ``has_experts``: the format holds
    models with experts; unknown arguments of these are refused unless their names are ``ignored``.

    Raises CheckpointError with every argument that is missing, of another kind than Megatron's, or
    that no LLaMA has."""
    require_kinds(args, where)
    problems = [
        describe(
            f"{where} {name}",
            got=args[name],
            expected=" or ".join(map(str, values)),
            do="such models cannot be converted",
        )
        for name, values in OTHER_MODELS.items()
        if args.get(name, values[0]) not in values
    ]
    sparse = args.get("num_experts") or (config.num_experts if config else 0)
    if sparse and not has_experts:
        raise CheckpointError(
            f"{where} num_experts",
            got=shown(sparse),
            expected="None: in this format dense models alone are read",
            do="load it with Megatron-LM and save it with --ckpt-format torch_dist",
        )
    if sparse:
        from megatron_llama.converter.megatron import expert_args  # of few models

        expert_args.require_kinds(args, where)
        problems += expert_args.argument_problems(args, where, ignored)
    if config is not None:
        problems += _contradictions(args, config, tied=tied, where=where)
        fields = hf_config_from_model(config, dtype="float32") | {"vocab_size": 1}
    else:
        fields, missing = _hf_fields(args, tied=tied)
        problems += [
            describe(f"{where} {name}", got="nothing", expected="a value", do=GIVE_CONFIG)
            for name in missing
        ]
    if problems:
        raise CheckpointError(listing(f"{where} cannot be used:", problems))
    model = model_config_from_hf(fields, where=where)
    expected = kind_args(model)
    given = _given_kind(args, model.num_hidden_layers)
    if sparse:
        expected |= expert_args.model_experts(model)
        given |= expert_args.given_experts(args, model.num_hidden_layers)
    problems = [
        describe(
            f"{where} {name}",
            got=args.get(name),
            expected=f"{expected.get(name)}, by the config of a {model.model_type}",
            do="give the config of this model (--hf-config)",
        )
        for name, value in given.items()
        if value != expected.get(name)
    ]
    if problems:
        raise CheckpointError(listing(f"{where} cannot be used:", problems))
    return model


def require_kinds(args: Mapping[str, Any], where: str) -> None:
    """Raise CheckpointError for arguments of a model that are no numbers, or that no model can
    have."""
    with read_fields(args, where, do=GIVE_CONFIG) as fields:
        for name in COUNTS:
            fields.integer(name, low=1, high=LARGEST, default=None, null=True)
        for name in ("vocab_size", "orig_vocab_size", "padded_vocab_size"):
            fields.integer(name, high=LARGEST, default=None, null=True)
        for name in REALS:
            fields.number(name, low=SMALLEST_REAL, high=LARGEST_REAL, default=None, null=True)
        fields.number("init_method_std", low=0, high=LARGEST_REAL, default=None, null=True)
        for name in SWITCHES:
            if args.get(name) is not None:
                fields.switch(name)
        window = fields.sequence("window_size", int, length=2, default=None, null=True)
        if window and not all(-1 <= size <= LARGEST for size in window):
            fields.problem("window_size", shown(window), "two numbers of positions, or -1")
        every = fields.value("window_attn_skip_freq", None)
        if isinstance(every, list | tuple):
            fields.sequence("window_attn_skip_freq", int)
        else:
            fields.integer("window_attn_skip_freq", low=1, default=None, null=True)


def stored_vocab_size(
    args: Mapping[str, Any],
    where: str,
    stored: int,
    files: Sequence[Path],
    *,
    tp: int,
    user: ModelConfig | None,
    given: int,
    believed: int,
) -> int:
    """Return the number of token ids of a model that stores ``stored`` rows, padding included,
    saved with ``tp`` tensor ranks.

    ``given`` is the user's number, ``user`` the configuration of the user or the file, ``believed``
    the size of the tokenizer that belongs to the weights, or 0 to look for it among ``files``.
    Raises CheckpointError rather than take padding for tokens."""
    tokenizer = None if believed else tokenizer_in(files)
    tokens = tokenizer.vocab_size if tokenizer is not None else believed
    known = args.get("orig_vocab_size") or (
        args.get("vocab_size") if args.get("tokenizer_type") != "NullTokenizer" else 0
    )
    known = (user.vocab_size if user else 0) or known or 0
    multiple = args.get("make_vocab_size_divisible_by")
    padded = multiple and tokens and -(-tokens // (multiple * tp)) * multiple * tp
    # A tokenizer with fewer tokens than the model would cost rows. If the file has the multiple of
    # its padding, the tokenizer has to fit that.
    exact = padded == stored if multiple else believed > 0
    return true_vocab_size(
        where,
        stored,
        given=given,
        known=known,
        least=tokenizer.base_vocab_size if tokenizer is not None else 0,
        tokens=tokens,
        exact=exact,
    )


def kind_args(model: ModelConfig) -> dict[str, Any]:
    """Return Megatron-LM's arguments for features that LLaMA does not have. A window is the number
    of positions before a query's own, with a list of the layers that have one."""
    windows = layer_windows(model)
    return {
        "add_bias_linear": model.attention_bias and model.mlp_bias,
        "add_qkv_bias": model.add_qkv_bias,
        "qk_layernorm": model.qk_norm == "head",
        "rotary_percent": model.partial_rotary_factor,
        "window_size": (model.sliding_window - 1, 0) if model.sliding_window else None,
        "window_attn_skip_freq": [int(w > 0) for w in windows] if model.layer_types else None,
    }


def _given_kind(args: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return the values of these arguments in a file, in the form of ``kind_args``."""
    given = {name: args[name] for name in kind_args(ModelConfig()) if name in args}
    window = tuple(given.get("window_size") or (-1, -1))
    slides = window != (-1, -1)
    if "window_size" in given:
        given["window_size"] = window if slides else None
    every = given.get("window_attn_skip_freq") or []
    if isinstance(every, int):
        every = [int((layer + 1) % every != 0) for layer in range(layers)]
    if "window_attn_skip_freq" in given:
        given["window_attn_skip_freq"] = list(every) if slides and 0 in every else None
    return given


def _family_fields(args: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of a config.json for features that LLaMA does not have, of the family that
    has them, and the names of arguments that are missing. If no family has all of them,
    ``read_args`` sees the difference."""
    # A window is listed for each layer; more layers than the limit are refused later.
    layer_count = min(int(args.get("num_layers") or 0), LARGEST_LAYERS)
    given = _given_kind(args, layer_count)
    window = given.get("window_size")
    size = None if window is None else int(window[0]) + 1
    if args.get("num_experts"):
        from megatron_llama.converter.megatron.expert_args import family_fields  # of few models

        return family_fields(args, layer_count, size)
    return _dense_family(given, size), []


def _dense_family(given: Mapping[str, Any], size: int | None) -> dict[str, Any]:
    types = given.get("window_attn_skip_freq")
    layers = {} if types is None else {"layer_types": [SLIDING if on else FULL for on in types]}
    qwen = {"use_sliding_window": size is not None, "sliding_window": size, "max_window_layers": 0}
    if given.get("qk_layernorm"):
        return {"model_type": "qwen3", **qwen, **layers}
    if given.get("add_qkv_bias"):
        return {"model_type": "qwen2", **qwen, **layers}
    if given.get("rotary_percent", 1.0) != 1.0:
        share = given["rotary_percent"]
        return {"model_type": "phi3", "partial_rotary_factor": share, "sliding_window": size}
    if size is not None:
        return {"model_type": "mistral", "sliding_window": size}
    biases = bool(given.get("add_bias_linear"))
    return {"model_type": "llama", "attention_bias": biases, "mlp_bias": biases}


def _contradictions(
    args: Mapping[str, Any], config: ModelConfig, *, tied: bool, where: str
) -> Iterator[str]:
    do = "give the config of this model"
    for name, field in SIZES.items():
        size = getattr(config, field)
        if field == "intermediate_size" and config.num_experts:
            from megatron_llama.converter.megatron.expert_args import has_experts_everywhere

            if has_experts_everywhere(config):
                continue  # no layer has such an MLP
        if args.get(name, size) != size:
            expected = f"{size}, by the config"
            yield describe(f"{where} {name}", got=args[name], expected=expected, do=do)
    if config.tie_word_embeddings != tied:
        got, expected = ("none", "one") if tied else ("a head", "none")
        yield describe(f"{where} head", got=got, expected=f"{expected}, by the config", do=do)


def _hf_fields(args: Mapping[str, Any], *, tied: bool) -> tuple[dict[str, Any], list[str]]:
    """Return a config.json made of the arguments of a training run, and the names of the arguments
    that are missing."""
    eps = args.get("norm_epsilon", args.get("layernorm_epsilon"))
    # Before there was an argument for the base, it was fixed; a converter's args, which lack this
    # argument, leave it open.
    theta = args.get("rotary_base", 10000 if "position_embedding_type" in args else None)
    required = {name: args.get(name) for name in (*SIZES, "max_position_embeddings")} | {
        "norm_epsilon": eps,
        "rotary_base": theta,
    }
    own, absent = _family_fields(args)
    missing = [*(name for name, value in required.items() if value is None), *absent]
    fields = {field: args.get(name) for name, field in SIZES.items()}
    groups = args.get("num_query_groups") if args.get("group_query_attention") else None
    fields |= {
        "vocab_size": 1,
        "num_key_value_heads": groups or args.get("num_attention_heads"),
        "head_dim": args.get("kv_channels"),
        "max_position_embeddings": args.get("max_position_embeddings"),
        "rms_norm_eps": eps,
        "rope_theta": theta,
        "rope_scaling": _scaling(args),
        "tie_word_embeddings": tied,
        "initializer_range": args.get("init_method_std", 0.02),
        **own,
    }
    return fields, missing


def _scaling(args: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the rotary scaling. Megatron knows LLaMA 3.1's, with one free number, and linear
    interpolation."""
    if args.get("use_rope_scaling"):
        factor = float(args.get("rope_scaling_factor", 8.0))
        return {"rope_type": "llama3", "factor": factor, **LLAMA31_SCALING}
    linear = args.get("rotary_seq_len_interpolation_factor")
    return {"rope_type": "linear", "factor": float(linear)} if linear else None


def make_args(
    model: ModelConfig, family: str, dtype: torch.dtype, tp: int, split: Sequence[int], layout: str
) -> dict[str, Any]:
    """Return the arguments that the loaders of the family read. ``split`` holds the number of
    blocks of each pipeline stage."""
    scaling = model.rope_scaling or {}
    kind = scaling.get("rope_type")
    own = {
        "causal_lm": not model.tie_word_embeddings,
        "RMSNorm": True,
        "add_bias_linear": False,
        "rotary_percent": 1.0,
    }
    theirs = {
        "normalization": "RMSNorm",
        "norm_epsilon": model.rms_norm_eps,
        "group_query_attention": model.num_key_value_heads != model.num_attention_heads,
        "num_query_groups": model.num_key_value_heads,
        "rotary_base": int(model.rope_theta) if model.rope_theta.is_integer() else model.rope_theta,
        "rotary_interleaved": False,
        "rotary_seq_len_interpolation_factor": scaling["factor"] if kind == "linear" else None,
        "use_rope_scaling": kind == "llama3",
        "rope_scaling_factor": scaling["factor"] if kind == "llama3" else 8.0,
        **kind_args(model),
        **_experts_of(model),
        "transformer_impl": "local" if layout != "transformer_engine" else layout,
        "use_legacy_models": layout == "legacy",
        **_uneven(split),
    }
    return {
        **{name: getattr(model, field) for name, field in SIZES.items()},
        **(own if family == "megatron-llama" else theirs),
        "kv_channels": model.head_dim,
        "max_position_embeddings": model.max_position_embeddings,
        "seq_length": model.max_position_embeddings,
        "layernorm_epsilon": model.rms_norm_eps,
        "init_method_std": model.initializer_range,
        "position_embedding_type": "rope",
        "use_rotary_position_embeddings": True,
        "add_position_embedding": True,
        "swiglu": True,
        "untie_embeddings_and_output_weights": not model.tie_word_embeddings,
        "make_vocab_size_divisible_by": model.make_vocab_size_divisible_by,
        "vocab_size": model.vocab_size,
        "orig_vocab_size": model.vocab_size,
        "padded_vocab_size": padded_vocab_size(model, tp),
        "tokenizer_type": "HuggingFaceTokenizer" if family == "megatron" else "PretrainedFromHF",
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": len(split),
        "virtual_pipeline_model_parallel_size": None,
        "data_parallel_size": 1,
        "world_size": tp * len(split),
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "iteration": 0,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "hf_config": hf_config_from_model(model, dtype=str(dtype).removeprefix("torch.")),
    }


def _experts_of(model: ModelConfig) -> dict[str, Any]:
    if not model.num_experts:
        return {}
    from megatron_llama.converter.megatron.expert_args import expert_args  # of few models

    return expert_args(model)


def _uneven(split: Sequence[int]) -> dict[str, int | None]:
    """Return Megatron-LM's arguments for a first or last stage with another number of blocks."""
    equal = len(set(split)) == 1
    first = "decoder_first_pipeline_num_layers"
    last = "decoder_last_pipeline_num_layers"
    return {first: None, last: None} if equal else {first: split[0], last: split[-1]}


def held_problems(
    model: ModelConfig, family: str, layout: str, *, has_experts: bool = False
) -> Iterator[str]:
    """Yield the features that the family's own program cannot compute, whatever its arguments.
    ``has_experts``: the format holds models with experts."""
    grown = family == "megatron" and layout != LEGACY
    held = HELD if grown else ()
    if has_experts and model.num_experts:
        from megatron_llama.converter.megatron import expert_args  # of few models

        held = (*held, "num_experts")
        yield from expert_args.held_problems(model)
    yield from kind_problems(f"{family}{'' if grown else f' ({layout})'}", model, held)
    if grown and model.attention_bias != model.mlp_bias:
        yield describe(
            f"{family} attention_bias",
            got=f"{model.attention_bias} with mlp_bias {model.mlp_bias}",
            expected="both or none: Megatron-LM has one switch for them",
            do="take another format: hf and native hold every model",
        )
    if grown and model.qk_norm == "projection":
        yield describe(
            f"{family} qk_norm",
            got="projection",
            expected="head or none",
            do="take another format: hf and native hold every model",
        )


def lost_fields(model: ModelConfig, family: str, split: Sequence[int]) -> Iterator[str]:
    """Yield the features that the family's own program cannot express. The files keep them for the
    way back, but that program does not use them."""
    scaling = model.rope_scaling or {}
    if family == "megatron-llama":
        if model.num_key_value_heads != model.num_attention_heads:
            yield "grouped-query attention"
        if model.rope_theta != 10000.0:
            yield "rope_theta"
        if scaling:
            yield "rope_scaling"
    elif scaling.get("rope_type", "default") not in ("default", "linear") and not (
        is_llama31_scaling(scaling)
    ):
        yield "rope_scaling other than LLaMA 3.1's but for its factor"
    if len(set(split)) > 1 and (family == "megatron-llama" or len(set(split[1:-1])) > 1):
        yield "an uneven pipeline split"
