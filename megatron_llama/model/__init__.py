"""LLaMA and its relatives, as stages of a pipeline.

In the order in which to read: ``plan/params.py`` (the table of parameters: every other room
addresses weights by it), ``llama.py`` (a stage), ``nn/linear.py`` (a layer that is split),
``nn/attention.py``, ``families/family.py`` (the declaration of a family).

The room never imports the pipeline, data, checkpoints or the trainer."""
