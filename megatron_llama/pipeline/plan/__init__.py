"""What a schedule means for the engine: buckets of stages, accesses of weights, traffic.

Nothing in here imports torch."""
