"""A trained run, read from its folder: curves, incidents, plan and measurement, and the page of
``report``."""
