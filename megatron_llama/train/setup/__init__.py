"""The decisions between the words of a user and the first step, with their order and ranks.

Reading order: ``deciders.py`` (the list of decisions, top to bottom), ``driver.py`` (the walk over
the list: which rank decides and what the others do), ``draft.py`` (the decisions so far),
``processes.py`` (the processes that decide together), ``layout.py`` (``--auto-parallel``).

A run, its dry run, an evaluation and a proof walk parts of the same list. Nothing here trains, and
the loop imports nothing from here: a run gets the decisions as a frozen ``Ready``."""
