"""The planner's functions for Python users."""
