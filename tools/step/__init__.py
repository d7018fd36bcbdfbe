"""Who takes part in ``bench_step.py``, each in a process of its own."""
