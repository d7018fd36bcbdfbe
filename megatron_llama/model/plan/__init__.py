"""The parameters of each rank, and the bytes and windows of its layers, as integers.

Nothing in here imports torch."""
