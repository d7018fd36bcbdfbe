"""The trainer: what a run is and how it goes from step to step.

``run/`` is the loop. Read ``run/loop.py`` first.

The room imports engine, pipeline, data and checkpoints, and nothing of what hangs on a run:
commands, proofs, the functions of ``train/api/``."""
