from dataclasses import FrozenInstanceError

import pytest

from megatron_llama.config import ModelConfig
from megatron_llama.presets import PRESETS

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
    queries, keys = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    block = 2 * model.hidden_size * (queries + keys) + 3 * model.hidden_size * model.intermediate_size + 2 * model.hidden_size
    embeddings = (1 if model.tie_word_embeddings else 2) * model.vocab_size * model.hidden_size
    return model.num_hidden_layers * block + embeddings + model.hidden_size


def test_parameter_counts() -> None:
    assert {name: count(model) for name, model in PRESETS.items()} == TOTALS


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


def test_presets_are_immutable() -> None:
    with pytest.raises(TypeError):
        PRESETS["llama-7b"] = ModelConfig()  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        PRESETS["llama-7b"].hidden_size = 1  # type: ignore[misc]
