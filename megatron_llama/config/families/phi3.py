"""Phi-3 and Phi-4."""

from __future__ import annotations

from megatron_llama.config.families.family import Family

PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    fused={
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    },
)
