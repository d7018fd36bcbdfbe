"""Floating-point operations of training, and the peak rates of devices.

Two conventions are in use and differ by 10 to 20 %. torchtitan (and the PaLM paper, appendix B)
counts the whole square of attention scores; Megatron-LM counts the half below the diagonal. MFU
follows the first one here. Both count only matrix products, forward once and backward twice,
without recomputation and the embedding lookup.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType

from megatron_llama.config.schema import Config, LoraConfig, ModelConfig
from megatron_llama.model.plan.lora import NO_LORA, adapter_shapes
from megatron_llama.model.windows import layer_windows


def flops_per_token(
    model: ModelConfig, seq_length: int, *, causal: bool, lora: LoraConfig = NO_LORA
) -> int:
    """Forward and backward FLOPs of one token in a sequence of ``seq_length``.

    ``model`` has every derived field filled in, and a ``vocab_size`` without padding. ``causal``
    counts only the scores that the mask leaves (Megatron) instead of all (torchtitan). A layer with
    a window has that many keys for each query; if ``causal``, the first queries have fewer. One
    with chunks has their squares. Of experts those count that a token is sent to, and the router.
    """
    queries = model.num_attention_heads * model.head_dim
    blocks = model.num_hidden_layers * _matrix_elements(model)
    if model.num_experts:
        from megatron_llama.model.plan.experts import elements_in_place_of_mlps  # of few models

        blocks += elements_in_place_of_mlps(model)
    head = (model.num_labels or model.vocab_size) * model.hidden_size
    # Scores and their product with V: 2 products x 2 FLOPs x 3 passes = 12 per score and channel.
    windows = [min(window or seq_length, seq_length) for window in layer_windows(model)]
    # Halves of (query, key) pairs of a sequence: the band below the diagonal.
    halves = sum(2 * seq_length * window - window**2 for window in windows)
    keys = sum(windows)
    if model.attention_chunk_size:
        from megatron_llama.model.plan.windows import chunk_squares  # of few models

        squares = chunk_squares(model, seq_length)
        halves, keys = squares, squares // seq_length
    scores = 6 * queries * halves // seq_length if causal else 12 * queries * keys
    if lora.lora_rank:
        # Frozen weights have no gradient, which is one of three products. The additions have all
        # three.
        additions = sum(math.prod(shape) for shape in adapter_shapes(model, lora).values())
        # The score of a reward model is trained beside them.
        head_passes = 6 if model.num_labels else 4
        return 4 * blocks + head_passes * head + 6 * additions + scores
    return 6 * (blocks + head) + scores


def _matrix_elements(model: ModelConfig) -> int:
    """Return the elements of the matrices of a layer."""
    heads = 2 * model.num_attention_heads + 2 * model.num_key_value_heads
    return model.hidden_size * (heads * model.head_dim + 3 * model.intermediate_size)


def run_peak(config: Config, peak: float | None, *, causal: bool = False) -> float | None:
    """Return the FLOP/s of a device, whose bf16 peak is ``peak``, at which each product of a run
    has its own peak: twice as much for those in FP8, which are all of their layers' but the weight
    gradients. ``causal``: with scores counted as ``flops_per_token`` does."""
    if peak is None or config.training.fp8 == "none":
        return peak
    from megatron_llama.model.plan.fp8 import fp8_layers

    model = config.model
    length = config.training.seq_length
    flops = flops_per_token(model, length, causal=causal, lora=config.lora)
    elements = len(fp8_layers(config)) * _matrix_elements(model)
    if model.num_experts:
        from megatron_llama.model.plan.expert_fp8 import active_elements  # of few models

        elements = active_elements(config)
    in_fp8 = 4 * elements
    return peak * flops / (flops - in_fp8 / 2)


PEAK_FLOPS: Mapping[str, float] = MappingProxyType(
    {
        "A100": 312e12,
        "A800": 312e12,
        "A40": 149.7e12,
        "A30": 165e12,
        "A10": 125e12,
        "L4": 121e12,
        "L40S": 362e12,
        "H100": 989e12,
        "H100 PCIE": 756e12,
        "H100 NVL": 835e12,
        "H800": 989e12,
        "H800 PCIE": 756e12,
        "H200": 989e12,
        "H200 NVL": 835e12,
        "H20": 148e12,
        "GH200": 989e12,
        "B200": 2250e12,
        "GB200": 2500e12,
    }
)
"""Dense bfloat16 FLOP/s by data sheet. Data sheets lead with the figure for 2:4 sparsity, which is
twice this."""


def peak_flops(device_name: str) -> float | None:
    """Return the dense bf16 peak in FLOP/s of a device by its name (``NVIDIA H100 80GB HBM3``).
    None: unknown, so there is no MFU."""
    words = re.split(r"[^A-Z0-9]+", device_name.upper())
    known = [name for name in PEAK_FLOPS if set(name.split()) <= set(words)]
    return PEAK_FLOPS[max(known, key=len)] if known else None
