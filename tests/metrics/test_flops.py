from dataclasses import replace

import pytest
from megatron_llama.config.schema import LoraConfig
from megatron_llama.metrics.flops import flops_per_token, peak_flops
from megatron_llama.model.presets import PRESETS


@pytest.mark.parametrize(("name", "seq_length", "full", "causal"), [("llama2-7b", 4096, 46.08, 42.86), ("llama3-8b", 8192, 57.91, 51.47)])
def test_known_models(name: str, seq_length: int, full: float, causal: float) -> None:
    assert round(flops_per_token(PRESETS[name], seq_length, causal=False) / 1e9, 2) == full
    assert round(flops_per_token(PRESETS[name], seq_length, causal=True) / 1e9, 2) == causal


def test_by_hand() -> None:
    model = replace(
        PRESETS["llama-7b"],
        vocab_size=11,
        hidden_size=8,
        intermediate_size=20,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
    )
    # q and o: 8 x 24 each; k and v: 8 x 12 each; gate, up, down: 8 x 20 each; head: 11 x 8.
    weights = 3 * (2 * 8 * 24 + 2 * 8 * 12 + 3 * 8 * 20) + 11 * 8
    assert flops_per_token(model, 5, causal=False) == 6 * weights + 12 * 3 * 24 * 5
    assert flops_per_token(model, 5, causal=True) == 6 * weights + 6 * 3 * 24 * 5
    # Frozen weights have no gradients; q: A 2 x 8, B 24 x 2; down: A 2 x 20, B 8 x 2.
    lora = LoraConfig(lora_rank=2, lora_target_modules=("q_proj", "down_proj"))
    additions = 3 * (2 * 8 + 24 * 2 + 2 * 20 + 8 * 2)
    assert flops_per_token(model, 5, causal=True, lora=lora) == 4 * weights + 6 * additions + 6 * 3 * 24 * 5
    # A tied head is computed like any other.
    assert flops_per_token(replace(model, tie_word_embeddings=True), 5, causal=True) == flops_per_token(model, 5, causal=True)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA A800-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce GTX 1080", None),
        ("cpu", None),
        ("", None),
    ],
)
def test_peaks(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak
