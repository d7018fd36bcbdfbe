"""Processes, their devices, and the messages between them."""
