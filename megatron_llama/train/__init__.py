"""The trainer: the setup of a run, and its steps.

Reading order: ``api/train.py`` (from options to a result), ``setup/`` (from words to decisions),
``run/loop.py`` (the steps), ``run/callbacks.py`` (the hooks of its parts), ``run/build.py`` (the
construction of a run). Its commands are in ``commands/``.

The room never imports ``tune``, ``converter``, ``planner`` or ``prove``: ``hooks.py`` connects
them."""
