"""The parts of ``tools/bench_offload.py``."""
