"""Walks the schedule of a rank: passes, sends and receives, in the order of ``schedule/``.

In the order in which to read: ``runtime.py`` (a step), ``microbatch.py`` (what a pass reads),
``objective.py`` (what the last stage computes), ``build.py`` (the engine of a run),
``plan/stage_accesses.py`` (which weights a schedule reads, in which order).

The room never imports data, checkpoints or the trainer."""
