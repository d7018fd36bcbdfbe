"""Optimizer state in the memory of the host: the memory, the copies, the worker that updates, and
the update rules."""
