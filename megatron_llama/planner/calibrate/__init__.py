"""Timing of what the planner has coefficients for, on the devices and links at hand; the kinds of
points: ``planner/measurements.py``."""
