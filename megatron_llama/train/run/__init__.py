"""The loop of a run and its parts.

Reading order: ``loop.py`` (the loop), ``callbacks.py`` (the hooks, also for users), ``build.py``
(the construction of a run, and the order of its parts), ``bad_steps.py`` (steps that must not
stay), ``prefetch.py`` (batches and requests, a step ahead).

Nothing here reads a command line, opens samples or looks for the folder of --load: a run gets all
decisions as a ``Ready`` from ``train/setup``."""
