"""Walks the schedule of a rank: passes, sends and receives, in the order of ``schedule/``.

In the order in which to read: ``runtime.py`` (a step), ``microbatch.py`` (the input of a pass),
``objective.py`` (the loss of the last stage), ``build.py`` (the engine of a run),
``plan/stage_accesses.py`` (the weights that a schedule reads, in order).

The room never imports data, checkpoints or the trainer."""
