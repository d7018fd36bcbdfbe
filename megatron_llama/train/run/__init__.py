"""The loop of a run and its parts.

In the order in which to read them: ``loop.py`` (the loop), ``callbacks.py`` (the hooks, which users
have, too), ``build.py`` (what a run is built from, and the order of its parts), ``bad_steps.py``
(steps that must not stay), ``prefetch.py`` (batches and requests, a step ahead).

Nothing here reads options from a command line, opens samples or looks for what --load names: a run
gets what was decided as a ``Ready``, from ``train/setup``."""
