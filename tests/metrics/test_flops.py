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


PEAKS = {
    "A100-SXM4-80GB": 312, "A100 80GB PCIe": 312, "A800-SXM4-80GB": 312, "A10": 125, "H100 80GB HBM3": 989, "H100 PCIe": 756, "H100 NVL": 835,
    "H200": 989, "GH200 480GB": 989, "H20": 148, "B200": 2250, "GB200": 2500, "L4": 121, "L40S": 362,
}


def test_peaks() -> None:
    """Of names of which some are parts of others, in TFLOP/s."""
    assert {name: peak_flops(f"NVIDIA {name}") for name in PEAKS} == {name: peak * 1e12 for name, peak in PEAKS.items()}
    assert [peak_flops(name) for name in ("NVIDIA GeForce GTX 1080", "cpu", "")] == [None] * 3
