from dataclasses import FrozenInstanceError

import pytest
from megatron_llama.config.schema import ModelConfig
from megatron_llama.model.hf import model_config_from_hf
from megatron_llama.model.presets import PRESETS

# Parameters of the published weights (tied heads counted once).
TOTALS = {
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-30b": 32_528_943_616,
    "llama-65b": 65_285_660_672,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3.3-70b": 70_553_706_496,
}


def count(model: ModelConfig) -> int:
    queries, keys = (model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim)
    block = 2 * model.hidden_size * (queries + keys) + 3 * model.hidden_size * model.intermediate_size + 2 * model.hidden_size
    embeddings = (1 if model.tie_word_embeddings else 2) * model.vocab_size * model.hidden_size
    return model.num_hidden_layers * block + embeddings + model.hidden_size


def test_parameter_counts() -> None:
    assert {name: count(model) for name, model in PRESETS.items() if model.model_type == "llama"} == TOTALS


@pytest.mark.parametrize("name", TOTALS)
def test_facts_of_each_generation(name: str) -> None:
    model = PRESETS[name]
    family = name.split("-")[0]
    vocabulary = 128256 if family.startswith("llama3") else 32000
    theta = 500000.0 if family.startswith("llama3") else 10000.0
    longest = {"llama": 2048, "llama2": 4096, "llama3": 8192}.get(family, 131072)
    tokens = (128000, 128001) if family.startswith("llama3") else (1, 2)
    eps = 1e-6 if name in ("llama-7b", "llama-13b", "llama-30b") else 1e-5
    assert (model.vocab_size, model.rope_theta, model.max_position_embeddings) == (vocabulary, theta, longest)
    assert (model.bos_token_id, model.eos_token_id, model.rms_norm_eps) == (*tokens, eps)
    assert model.tie_word_embeddings == (family == "llama3.2")
    assert model.head_dim == (64 if name == "llama3.2-1b" else 128)
    assert model.num_attention_heads * model.head_dim == model.hidden_size
    grouped = family.startswith("llama3") or name == "llama2-70b"
    assert model.num_key_value_heads == (8 if grouped else model.num_attention_heads)
    if family in ("llama", "llama2", "llama3"):
        assert model.rope_scaling is None
    else:
        assert model.rope_scaling == {
            "rope_type": "llama3",
            "factor": 32.0 if family == "llama3.2" else 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }


def published(
    hidden: int, intermediate: int, layers: int, heads: int, groups: int, *, longest: int, eps: float, factor: float = 0.0, **more: object
) -> dict[str, object]:
    """A ``config.json`` as Meta published it for transformers, in its spelling of that time."""
    third = groups != heads and longest != 4096
    fields: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 128000 if third else 1,
        "eos_token_id": 128001 if third else 2,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": intermediate,
        "max_position_embeddings": longest,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": groups,
        "pretraining_tp": 1,
        "rms_norm_eps": eps,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16" if third else "float16",
        "use_cache": True,
        "vocab_size": 128256 if third else 32000,
    }
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


def test_presets_are_immutable() -> None:
    with pytest.raises(TypeError):
        PRESETS["llama-7b"] = ModelConfig()  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        PRESETS["llama-7b"].hidden_size = 1  # type: ignore[misc]
