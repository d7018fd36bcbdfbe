"""LLaMA, and its initial weights."""
