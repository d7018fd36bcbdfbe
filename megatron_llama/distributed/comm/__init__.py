"""Collectives, with and without autograd, and point-to-point transfers."""
