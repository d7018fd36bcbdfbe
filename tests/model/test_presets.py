from megatron_llama.model.hf import model_config_from_hf
from megatron_llama.model.presets import PRESETS


def published(
    hidden: int, intermediate: int, layers: int, heads: int, groups: int, *, longest: int, eps: float, factor: float = 0.0, **more: object
) -> dict[str, object]:
    """A ``config.json`` as Meta published it for transformers, in its spelling of that time."""
    third = groups != heads and longest != 4096
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads}
    sizes |= {"num_key_value_heads": groups, "max_position_embeddings": longest, "vocab_size": 128256 if third else 32000}
    tokens = {"bos_token_id": 128000 if third else 1, "eos_token_id": 128001 if third else 2}
    common = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "initializer_range": 0.02, "use_cache": True}
    common |= {"pretraining_tp": 1, "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16" if third else "float16"}
    fields: dict[str, object] = {**common, **sizes, **tokens, "rms_norm_eps": eps}
    if third:
        fields |= {"attention_bias": False, "attention_dropout": 0.0, "rope_theta": 500000.0}
    if factor:
        scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        fields |= {"mlp_bias": False, "rope_scaling": {**scaling, "rope_type": "llama3"}}
    return fields | more


L2, L3 = {"longest": 4096, "eps": 1e-5}, {"longest": 8192, "eps": 1e-5}
L31, L32 = ({"longest": 131072, "eps": 1e-5, "factor": 8.0}, {"longest": 131072, "eps": 1e-5, "factor": 32.0, "tie_word_embeddings": True})
CONFIGS: dict[str, dict[str, object]] = {
    "llama-7b": published(4096, 11008, 32, 32, 32, longest=2048, eps=1e-6),
    "llama-13b": published(5120, 13824, 40, 40, 40, longest=2048, eps=1e-6),
    "llama-30b": published(6656, 17920, 60, 52, 52, longest=2048, eps=1e-6),
    "llama-65b": published(8192, 22016, 80, 64, 64, longest=2048, eps=1e-5),
    "llama2-7b": published(4096, 11008, 32, 32, 32, **L2),
    "llama2-13b": published(5120, 13824, 40, 40, 40, **L2),
    "llama2-70b": published(8192, 28672, 80, 64, 8, **L2),
    "llama3-8b": published(4096, 14336, 32, 32, 8, **L3),
    "llama3-70b": published(8192, 28672, 80, 64, 8, **L3),
    "llama3.1-8b": published(4096, 14336, 32, 32, 8, **L31),
    "llama3.1-70b": published(8192, 28672, 80, 64, 8, **L31),
    "llama3.1-405b": published(16384, 53248, 126, 128, 8, **L31),
    "llama3.2-1b": published(2048, 8192, 16, 32, 8, head_dim=64, **L32),
    "llama3.2-3b": published(3072, 8192, 28, 24, 8, head_dim=128, **L32),
    "llama3.3-70b": published(8192, 28672, 80, 64, 8, **L31),
}


def test_presets_are_what_their_config_json_says() -> None:
    """Read as any HuggingFace folder's: every field, derived ones too."""
    assert {name for name, model in PRESETS.items() if model.model_type == "llama"} == CONFIGS.keys()
    for name, config_json in CONFIGS.items():
        assert model_config_from_hf(config_json, where=name) == PRESETS[name], name
