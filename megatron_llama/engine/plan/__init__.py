"""The plan of the engine's steps, as integers: buckets, gathers, memory.

Nothing in here imports torch."""
