"""Times kernels and links on the present devices for the planner's coefficients. The kinds of
points are listed in ``planner/measurements.py``."""
