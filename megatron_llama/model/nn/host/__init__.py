"""Implementations for CPUs. For tensors on a GPU these modules are not called, or call torch's
operator at once."""
