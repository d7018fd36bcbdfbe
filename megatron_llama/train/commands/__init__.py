"""One file for each command; what several share is in ``common/``.

A command imports torch and other heavy libraries inside its function, so that ``--help`` appears at
once.
"""
