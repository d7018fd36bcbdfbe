"""A run that has been trained, as its folder tells of it: curves, incidents, plan and measurement,
and the page of ``report``."""
