"""Our own checkpoints as a source and a target of conversions."""
