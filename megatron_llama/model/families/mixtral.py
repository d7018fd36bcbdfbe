"""Mixtral: Mistral's models with experts."""

from __future__ import annotations

from dataclasses import replace

from megatron_llama.config.schema import ModelConfig
from megatron_llama.model.families.experts import BALANCING, EVERY_BLOCK
from megatron_llama.model.families.family import Family
from megatron_llama.model.families.windows import EVERY_LAYER

_8X7B = ModelConfig(
    model_type="mixtral",
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=32768,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    initializer_range=0.02,
    bos_token_id=1,
    eos_token_id=2,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=14336,
    norm_topk_prob=True,
)
_8X22B = replace(
    _8X7B,
    hidden_size=6144,
    intermediate_size=16384,
    num_hidden_layers=56,
    num_attention_heads=48,
    max_position_embeddings=65536,
    moe_intermediate_size=16384,
)

MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    classifier="MixtralForSequenceClassification",
    always={"norm_topk_prob": True},
    derived={"moe_intermediate_size": lambda model: model.intermediate_size},
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    },
    neutral={**BALANCING, "router_jitter_noise": (0.0,)},
    windows=EVERY_LAYER,
    experts=EVERY_BLOCK,
    tensors={
        "mlp.gate": "block_sparse_moe.gate",
        "mlp.experts": "block_sparse_moe.experts",
        "experts.gate_proj": "w1",
        "experts.up_proj": "w3",
        "experts.down_proj": "w2",
    },
    presets={"mixtral-8x7b": _8X7B, "mixtral-8x22b": _8X22B},
)
