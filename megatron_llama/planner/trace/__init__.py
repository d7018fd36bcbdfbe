"""The step of a run traced without a device: this trainer's own model, engine and pipeline, over
tensors that have no memory. The result are the integers of ``planner.traced``. Nothing here changes
what a run does."""
