"""Megatron-LM's and Megatron-LLaMA's checkpoints."""
