"""Optimizer state in the memory of the host: what it lives in, who copies, who updates, and the
rules."""
