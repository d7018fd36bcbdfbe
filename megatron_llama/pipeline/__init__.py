"""Executes pipeline schedules."""
