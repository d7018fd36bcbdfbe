"""Reports of a run: FLOPs and MFU, the averages of a log interval, log lines, TensorBoard and
Weights & Biases."""
