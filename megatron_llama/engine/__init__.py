"""The overlapped distributed optimizer, its update rules and the learning-rate schedule."""
