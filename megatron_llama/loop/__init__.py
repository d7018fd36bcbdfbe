"""The parts of a run that the training loop calls."""
