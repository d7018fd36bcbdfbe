"""Processes, devices and the messages between them."""
