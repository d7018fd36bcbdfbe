"""Timing of everything that the planner has coefficients for, on the devices and links at hand. The
kinds of points are listed in ``planner/measurements.py``."""
