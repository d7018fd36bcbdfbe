"""Megatron-style 3D-parallel training of LLaMA on PyTorch."""

__version__ = "0.1.0"
