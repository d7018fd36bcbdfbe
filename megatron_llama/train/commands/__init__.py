"""One file for each command, and shared code in ``common/``.

A command imports torch and other heavy libraries inside its function, so that ``--help`` appears at
once.
"""
