"""Traces the step of a run without a device: this trainer's own model, engine and pipeline run with
tensors that have no memory. The result is the integers of ``planner.traced``. Runs are not
affected."""
