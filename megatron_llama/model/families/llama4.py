"""LLaMA 4 (2025): the text model of Scout and Maverick."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_llama.config.fields import shown
from megatron_llama.config.limits import LARGEST_EXPERTS, LARGEST_LAYERS
from megatron_llama.config.schema import ModelConfig
from megatron_llama.errors import CheckpointError
from megatron_llama.model.families.family import Family, OwnFields
from megatron_llama.model.families.reader import COPY, ConfigReader
from megatron_llama.model.plan.experts import is_sparse
from megatron_llama.model.windows import CHUNKED, FULL, chunk_of, normal_windows

_LAYERS = 48
_SCOUT = ModelConfig(
    model_type="llama4_text",
    vocab_size=202048,
    hidden_size=5120,
    intermediate_size=16384,
    num_hidden_layers=_LAYERS,
    num_attention_heads=40,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=262144,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling={
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    initializer_range=0.02,
    bos_token_id=200000,
    eos_token_id=200001,
    qk_norm="l2",
    layer_types=(CHUNKED, CHUNKED, CHUNKED, FULL) * (_LAYERS // 4),
    attention_chunk_size=8192,
    attn_temperature_tuning=True,
    num_experts=16,
    num_experts_per_tok=1,
    moe_intermediate_size=8192,
    moe_router_score_function="sigmoid",
    moe_apply_probs_on_input=True,
    moe_shared_expert_intermediate_size=8192,
)
_MAVERICK = replace(
    _SCOUT, rope_scaling=None, qk_norm="none", num_experts=128, decoder_sparse_step=2
)


def text_fields(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the fields of the text model from the ``config.json`` of a model that also sees
    pictures, Llama4ForConditionalGeneration. Raises CheckpointError without any."""
    text = content.get("text_config")
    if not isinstance(text, Mapping):
        expected = "the fields of the text model"
        raise CheckpointError(f"{where} text_config", got=shown(text), expected=expected, do=COPY)
    fields = {**text, "model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"]}
    # Of both parts.
    for name in ("quantization_config", "torch_dtype", "dtype"):
        if name in content:
            fields[name] = content[name]
    return fields


def _read(reader: ConfigReader, model: ModelConfig) -> dict[str, Any]:
    experts = reader.size("num_local_experts", high=LARGEST_EXPERTS)
    chosen = reader.size("num_experts_per_tok")
    if experts and chosen > experts:
        reader.problem("num_experts_per_tok", chosen, f"at most the {experts} experts", COPY)
    reader.number("router_aux_loss_coef", default=0.0)
    # Published files have 4 here.
    tuning = reader.value("attn_temperature_tuning") or 0
    if type(tuning) not in (bool, int):
        reader.problem("attn_temperature_tuning", shown(tuning), "true or false", COPY)
    layers = model.num_hidden_layers
    step, dense = _dense_blocks(reader, layers)
    scale = reader.positive("attn_scale", reader.value("attn_scale"), zero=True)
    return {
        # The width of dense blocks has another name, and that of experts this one.
        "intermediate_size": reader.size("intermediate_size_mlp"),
        "moe_intermediate_size": model.intermediate_size,
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "decoder_sparse_step": step,
        "mlp_only_layers": dense,
        "qk_norm": "l2" if reader.switch("use_qk_norm", default=True) else "none",
        "attention_chunk_size": reader.size("attention_chunk_size"),
        "layer_types": _layer_types(reader, layers),
        "attn_temperature_tuning": bool(tuning),
        "floor_scale": reader.size("floor_scale"),
        "attn_scale": scale,
    }


def _dense_blocks(reader: ConfigReader, layers: int) -> tuple[int, tuple[int, ...]]:
    """Return decoder_sparse_step and mlp_only_layers: a list of blocks with experts wins over their
    distance."""
    step = reader.size("interleave_moe_layer_step")
    listed = reader.value("moe_layers", None)
    if listed is None:
        return step, ()
    known = isinstance(listed, list) and len(listed) <= LARGEST_LAYERS
    if not known or not all(type(layer) is int and 0 <= layer < layers for layer in listed):
        expected = f"numbers of layers, from 0 to {layers - 1}"
        reader.problem("moe_layers", shown(listed), expected, COPY)
        return 1, ()
    if {*listed} == {*range(step - 1, layers, max(step, 1))}:
        return step, ()
    return 1, tuple(layer for layer in range(layers) if layer not in listed)


def _layer_types(reader: ConfigReader, layers: int) -> tuple[str, ...]:
    """Return the kind of each layer, in the normal form: a layer with rotary positions has chunks,
    and one without them has none."""
    every = reader.size("no_rope_layer_interval")
    # An empty list stands for the interval.
    turns = reader.value("no_rope_layers", None) or [
        int((layer + 1) % max(every, 1) != 0) for layer in range(layers)
    ]
    if not isinstance(turns, list) or any(
        type(turn) not in (bool, int) or turn not in (0, 1) for turn in turns
    ):
        expected = "1, with rotary positions, or 0 for each layer"
        reader.problem("no_rope_layers", shown(turns), expected, COPY)
        return ()
    if len(turns) < layers:
        expected = f"at least {layers} of them, one for each layer"
        reader.problem("no_rope_layers", f"{len(turns)} layers", expected, COPY)
        return ()
    types = [CHUNKED if turn else FULL for turn in turns[:layers]]
    if types and CHUNKED not in types:
        do = "such models are not supported"
        reader.problem("no_rope_layers", "0 alone", "a layer with rotary positions", do)
    listed = reader.value("layer_types", None)
    if listed is not None and listed != types:
        expected = f"{CHUNKED} for the layers with rotary positions, {FULL} for the others"
        reader.problem("layer_types", shown(listed), expected, "such models are not supported")
    return normal_windows(0, types)[1]


def _write(model: ModelConfig) -> Mapping[str, Any]:
    layers = range(model.num_hidden_layers)
    turns = [int(chunk_of(model, layer) > 0) for layer in layers]
    return {
        "intermediate_size": model.moe_intermediate_size,
        "intermediate_size_mlp": model.intermediate_size,
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.num_experts_per_tok,
        "interleave_moe_layer_step": model.decoder_sparse_step,
        "moe_layers": [layer for layer in layers if is_sparse(model, layer)],
        "use_qk_norm": model.qk_norm == "l2",
        "attention_chunk_size": model.attention_chunk_size,
        "no_rope_layers": turns,
        "layer_types": [CHUNKED if turn else FULL for turn in turns],
        "attn_temperature_tuning": model.attn_temperature_tuning,
        "floor_scale": model.floor_scale,
        "attn_scale": model.attn_scale,
    }


LLAMA4_TEXT = Family(
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    always={"moe_router_score_function": "sigmoid", "moe_apply_probs_on_input": True},
    derived={"moe_shared_expert_intermediate_size": lambda model: model.moe_intermediate_size},
    fields=("attention_bias",),
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "intermediate_size_mlp": 16384,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "router_aux_loss_coef": 0.001,
    },
    neutral={
        # Its class adds no loss that balances experts, whatever this says.
        "output_router_logits": (False, True),
        "router_jitter_noise": (0.0,),
        "cache_implementation": ("hybrid",),
        "for_llm_compressor": (False,),
    },
    experts=OwnFields(
        ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "attention_chunk_size"),
        _read,
        _write,
    ),
    tensors={
        "mlp.gate": "feed_forward.router",
        "mlp.experts": "feed_forward.experts",
        "mlp.shared_expert": "feed_forward.shared_expert",
        **{f"mlp.{name}": f"feed_forward.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
    },
    stacked_experts=True,
    presets={"llama4-scout": _SCOUT, "llama4-maverick": _MAVERICK},
)
