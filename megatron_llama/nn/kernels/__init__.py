"""Triton's kernels for what a device would otherwise compute in many small operators, each reading
and writing whole activations.

``choice.py`` alone decides where they run. A module here imports triton, and is imported only when
its kernels run; ``bodies.py`` beside this folder has the same functions in torch's operators, for
hosts and for devices without Triton.
"""
