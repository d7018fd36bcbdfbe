"""Rotary embedding (Su et al., 2021): frequencies of each rotary scaling, and tables of cosines and
sines.

Frequencies are those of transformers 5 (``modeling_rope_utils.py``), bit for bit. Two scalings
depend on the length of a sequence: ``dynamic`` and ``longrope`` change beyond the original context.
The length is a tensor, so that a device is never waited for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_llama.config.schema import ModelConfig

LENGTH_DEPENDENT = frozenset({"dynamic", "longrope"})
"""The scalings whose frequencies depend on the length of the sequence."""


@dataclass(frozen=True)
class Rotary:
    """The rotary embedding of a model's layers."""

    width: int
    """Channels of a head that rotate, its first ones."""
    theta: float
    scaling: Mapping[str, Any] | None
    """``rope_scaling`` of a resolved ModelConfig."""
    max_position_embeddings: int

    @staticmethod
    def of(model: ModelConfig) -> Rotary:
        """Return the embedding of a resolved model's layers, or of its full-attention layers if
        sliding ones have another."""
        return Rotary(
            rotary_width(model), model.rope_theta, model.rope_scaling, model.max_position_embeddings
        )

    @staticmethod
    def of_sliding_layers(model: ModelConfig) -> Rotary | None:
        """Return the embedding of sliding layers, never scaled; None: that of all layers."""
        if not model.rope_local_base_freq:
            return None
        theta = model.rope_local_base_freq
        return Rotary(rotary_width(model), theta, None, model.max_position_embeddings)

    @property
    def depends_on_length(self) -> bool:
        """Whether ``table`` needs lengths."""
        return self.scaling is not None and self.scaling["rope_type"] in LENGTH_DEPENDENT

    @property
    def switches_at(self) -> int | None:
        """The length beyond which all positions of a sequence rotate otherwise (``longrope``);
        None: a longer sequence leaves its first positions as they are."""
        if self.scaling is None or self.scaling["rope_type"] != "longrope":
            return None
        return int(self.scaling["original_max_position_embeddings"])

    def table(self, positions: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return cos and sin [s, 1 or b, 1, width / 2], fp32, of positions [s, 1 or b].

        ``lengths``, int64 [] or [b], are those of the whole sequences."""
        frequencies = rope_frequencies(
            self.width,
            self.theta,
            self.scaling,
            positions.device,
            lengths=lengths,
            max_position_embeddings=self.max_position_embeddings,
        )
        factor = attention_factor(self.scaling, self.max_position_embeddings)
        cos, sin = rope_table(positions, frequencies)
        return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def rotary_width(model: ModelConfig) -> int:
    """Return how many channels of a head rotate."""
    return int(model.head_dim * model.partial_rotary_factor)


def rope_frequencies(
    width: int,
    theta: float,
    scaling: Mapping[str, Any] | None,
    device: torch.device,
    *,
    lengths: Tensor | None = None,
    max_position_embeddings: int = 0,
) -> Tensor:
    """Return angular frequencies [width / 2], fp32, in radians per position (Su et al., 2021,
    section 3.4.2), or [b, width / 2] for ``lengths`` [b] if they depend on these.

    ``scaling`` as in a resolved ModelConfig. ``lengths`` are int64, and None is a length within the
    original context. Raises ValueError for an unknown type."""
    channels = torch.arange(0, width, 2, dtype=torch.int64, device=device).to(torch.float32) / width
    kind = "default" if scaling is None else scaling["rope_type"]
    if scaling is None or kind == "default":
        return 1.0 / (theta**channels)
    if kind == "linear":
        return 1.0 / (theta**channels) / float(scaling["factor"])
    if kind == "llama3":
        return _llama3(1.0 / (theta**channels), scaling)
    if kind == "dynamic":
        return _dynamic(channels, width, theta, scaling, lengths, max_position_embeddings)
    if kind == "yarn":
        return _yarn(channels, width, theta, scaling)
    if kind == "longrope":
        return _longrope(channels, theta, scaling, lengths)
    raise ValueError(f"rope_type {kind}: expected linear, llama3, dynamic, yarn or longrope")


def attention_factor(scaling: Mapping[str, Any] | None, max_position_embeddings: int) -> float:
    """Return the factor of cosines and sines that gives attention scores the spread that they have
    in the original context (Peng et al., 2023, section 3.4)."""
    if scaling is None or scaling["rope_type"] not in ("yarn", "longrope"):
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor = scaling.get("factor")
    original = scaling["original_max_position_embeddings"]
    if factor is None:
        factor = max_position_embeddings / original
    if scaling["rope_type"] == "longrope":
        return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    mscale = scaling.get("mscale")
    mscale_all_dim = scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all_dim)
    return _yarn_scale(factor, 1.0)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Slow down the waves longer than the original context, keep the short ones, blend between
    (Llama 3.1)."""
    factor = float(scaling["factor"])
    context = float(scaling["original_max_position_embeddings"])
    low = float(scaling["low_freq_factor"])
    high = float(scaling["high_freq_factor"])
    wavelength = 2 * math.pi / frequencies
    blend = (context / wavelength - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    scaled = torch.where(wavelength > context / low, frequencies / factor, blended)
    return torch.where(wavelength < context / high, frequencies, scaled)


def _dynamic(
    channels: Tensor,
    width: int,
    theta: float,
    scaling: Mapping[str, Any],
    lengths: Tensor | None,
    context: int,
) -> Tensor:
    """Raise the base with the length beyond the context, so that the longest wave spans the
    sequence and the shortest one stays (NTK-aware scaling)."""
    factor = float(scaling["factor"])
    exponent = width / (width - 2)
    initial = theta * ((factor * context / context) - (factor - 1)) ** exponent
    within: Tensor = 1.0 / (initial**channels)
    if lengths is None:
        return within
    # In fp32, as transformers computes it from the tensor of a length.
    longer = lengths.clamp(min=context)
    base = theta * ((factor * longer / context) - (factor - 1)) ** exponent
    beyond = 1.0 / torch.pow(base.unsqueeze(-1), channels)
    return torch.where(lengths.unsqueeze(-1) > context, beyond, within)


def _yarn(channels: Tensor, width: int, theta: float, scaling: Mapping[str, Any]) -> Tensor:
    """Divide the frequencies of waves that turn less than ``beta_slow`` times within the original
    context, keep those that turn more than ``beta_fast`` times, blend between (Peng et al., 2023,
    section 3.2)."""
    original = scaling["original_max_position_embeddings"]

    def channel(turns: float) -> float:
        """Return the pair of channels, as a real number, that turns so often."""
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = channel(scaling.get("beta_fast") or 32)
    high = channel(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, width - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(width // 2, dtype=torch.float32, device=channels.device)
    kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    slow = 1.0 / (float(scaling["factor"]) * theta**channels)
    fast = 1.0 / (theta**channels)
    return slow * (1 - kept) + fast * kept


def _longrope(
    channels: Tensor, theta: float, scaling: Mapping[str, Any], lengths: Tensor | None
) -> Tensor:
    """Divide each frequency by a number that was searched for it: one list for sequences within the
    original context, another for longer ones (Ding et al., 2024)."""
    waves = theta**channels
    short: Tensor = 1.0 / (_numbers(tuple(scaling["short_factor"]), channels.device) * waves)
    long = 1.0 / (_numbers(tuple(scaling["long_factor"]), channels.device) * waves)
    if lengths is None:
        return short
    is_long = lengths.unsqueeze(-1) > scaling["original_max_position_embeddings"]
    return torch.where(is_long, long, short)


@cache
def _numbers(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return fp32 numbers on a device, kept because a copy from the host makes it wait."""
    return torch.tensor(values, dtype=torch.float32, device=device)


def rope_table(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin [..., 1, width / 2] of positions [...]. fp32: bf16 would merge 4096
    positions into 769."""
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    return angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)
