"""The step of a run traced without a device: the project's own model, engine and pipeline over
tensors that have no memory.

Integers come out (``planner.traced``). Nothing here changes what a run does: a trace is the run,
looked at.
"""
