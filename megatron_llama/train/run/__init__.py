"""The loop of a run and its parts.

In the order in which to read them: ``loop.py`` (the loop), ``callbacks.py`` (the hooks that users
have), ``bad_steps.py`` (steps that must not stay), ``prefetch.py`` (batches and requests, a step
ahead), ``progress.py`` (what becomes of a step in the log).

Nothing here reads options from a command line, opens samples or looks for checkpoints: what a run
begins with comes from ``loop/``, complete."""
