"""Runs pipeline schedules."""
