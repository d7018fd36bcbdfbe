"""The trainer: what a run is, and how it goes from step to step.

In the order in which to read: ``api/train.py`` (from options to a result), ``setup/`` (from words
to what is decided), ``run/loop.py`` (the steps), ``run/callbacks.py`` (the hooks of its parts),
``run/build.py`` (what a run is built from). Its commands are in ``commands/``.

The room never imports ``tune``, ``converter``, ``planner`` or ``prove``: they hang on by
``hooks.py``."""
