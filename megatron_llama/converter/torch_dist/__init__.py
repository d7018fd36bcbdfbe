"""The `torch_dist` folders of Megatron-Core: their tensors, and the state of their optimizer."""
