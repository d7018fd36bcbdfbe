"""The functions for users of Python."""
