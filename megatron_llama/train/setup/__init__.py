"""Between the words of a user and the first step: who decides what, in which order, on which rank.

In the order in which to read them: ``deciders.py`` (the list of what is decided, top to bottom),
``driver.py`` (walks the list, and says which rank decides and what the others do), ``draft.py``
(what has been decided so far), ``processes.py`` (who decides together), ``layout.py``
(``--auto-parallel``).

A run, its dry run, an evaluation and a proof walk parts of the same list. Nothing here trains, and
nothing here is imported by the loop: a run gets what was decided as a frozen ``Ready``."""
