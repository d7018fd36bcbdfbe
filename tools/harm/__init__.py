"""Harm done to files, processes and options on purpose, and what the program makes of it."""
