"""The kernels as ``Ops``, for ``choice.py``."""

from __future__ import annotations

from megatron_llama.model.nn.kernels.cross_entropy import cross_entropy
from megatron_llama.model.nn.kernels.gate import geglu, geglu_backward, swiglu, swiglu_backward
from megatron_llama.model.nn.kernels.head_norm import norm_heads, norm_heads_backward
from megatron_llama.model.nn.kernels.norm import add_norm, norm_backward
from megatron_llama.model.nn.kernels.rotary import rotate, rotate_back
from megatron_llama.model.nn.ops import Ops

KERNELS = Ops(
    add_norm=add_norm,
    norm_backward=norm_backward,
    norm_heads=norm_heads,
    norm_heads_backward=norm_heads_backward,
    rotate=rotate,
    rotate_back=rotate_back,
    swiglu=swiglu,
    swiglu_backward=swiglu_backward,
    geglu=geglu,
    geglu_backward=geglu_backward,
    cross_entropy=cross_entropy,
)
"""Triton for every function."""
