"""Checkpoints of Megatron-Core's ``torch_dist`` format."""
