"""Kernels for CPUs only. A GPU run uses none of them."""
