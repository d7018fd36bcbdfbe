"""Triton's kernels, in place of many small operators that each read and write whole activations.

``choice.py`` alone decides where they run. The other modules import triton, and are imported only
where their kernels run. ``model/nn/ops.py`` has the same functions in torch's operators, for CPUs
and for devices without Triton.
"""
