"""The model's own shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from megatron_llama.config.parse import flag
from megatron_llama.config.presets import PRESETS
from megatron_llama.config.rope import rope_problems
from megatron_llama.config.schema import MODEL_SIZES, Config, ModelConfig
from megatron_llama.errors import describe, nearest_divisors

LLAMA_ONLY: Mapping[str, object] = MappingProxyType(
    {
        "model_type": "llama",
        "attention_bias": False,
        "add_qkv_bias": False,
        "mlp_bias": False,
        "qk_norm": "none",
        "norm_position": "before",
        "apply_layernorm_1p": False,
        "hidden_act": "silu",
        "embedding_multiplier": 1.0,
        "query_pre_attn_scalar": 0.0,
        "attn_logit_softcapping": 0.0,
        "final_logit_softcapping": 0.0,
        "sliding_window": 0,
        "layer_types": (),
        "partial_rotary_factor": 1.0,
        "rope_local_base_freq": 0.0,
    }
)
"""Fields that are refused with any other value than LLaMA's."""


def missing_model_problems(config: Config) -> Iterator[str]:
    """Yield one sentence with the sizes that nobody gave."""
    missing = [name for name in MODEL_SIZES if getattr(config.model, name) == 0]
    if (
        config.model.vocab_size == 0
        and config.data.tokenizer_model is None
        and not config.data.data_path
    ):
        missing.append("vocab_size")
    if missing:
        remedy = (
            f"give --model NAME (such as {next(iter(PRESETS))}), --init-from-hf FOLDER, or "
            f"{' '.join(map(flag, missing))}"
        )
        yield describe(
            "model", got=f"no {', '.join(missing)}", expected="the shape of a model", do=remedy
        )


def model_problems(model: ModelConfig) -> Iterator[str]:
    """Yield sizes that do not fit each other, and what no LLaMA has."""
    heads = model.num_attention_heads
    groups = model.num_key_value_heads
    if model.hidden_size > 0 and heads > 0 and model.head_dim == 0:
        do = "change one of them or give --head-dim"
        yield describe(
            "--hidden-size",
            got=model.hidden_size,
            expected=f"a multiple of num_attention_heads {heads}",
            do=do,
        )
    if model.head_dim > 0 and model.head_dim % 2:
        do = "rotary embeddings turn pairs: change --head-dim or --num-attention-heads"
        yield describe("--head-dim", got=model.head_dim, expected="an even number", do=do)
    if heads > 0 and groups > 0 and heads % groups:
        do = f"choose {nearest_divisors(heads, groups)}"
        yield describe(
            "--num-key-value-heads",
            got=groups,
            expected=f"a divisor of num_attention_heads {heads}",
            do=do,
        )
    for name, wanted in LLAMA_ONLY.items():
        if getattr(model, name) != wanted:
            yield describe(
                flag(name),
                got=getattr(model, name),
                expected=f"{wanted}, as in every LLaMA",
                do=f"leave {name} out",
            )
    for name in ("bos_token_id", "eos_token_id"):
        token = getattr(model, name)
        if token is not None and token >= model.vocab_size > 0:
            do = f"give {flag(name)} of your tokenizer"
            yield describe(
                flag(name), got=token, expected=f"an id below vocab_size {model.vocab_size}", do=do
            )
    if model.rope_scaling is not None:
        yield from rope_problems("rope_scaling", model.rope_scaling)
