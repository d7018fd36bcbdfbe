"""What the engine does in a step, decided beforehand as integers: buckets, gathers, memory.

Nothing in here imports torch."""
