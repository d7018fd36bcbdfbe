"""Our own checkpoints as the target of ``convert``."""
