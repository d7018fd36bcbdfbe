"""Triton's kernels for what a device would otherwise compute in many small operators, each reading
and writing whole activations.

``choice.py`` alone decides where they run. The other modules import triton, and are imported only
where their kernels run. ``model/nn/ops.py`` has the same functions in torch's operators, for CPUs
and for devices without Triton.
"""
