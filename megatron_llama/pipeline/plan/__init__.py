"""The plans of the engine that follow from a schedule: buckets, weight accesses, traffic.

Nothing in here imports torch."""
