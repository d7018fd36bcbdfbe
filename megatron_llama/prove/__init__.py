"""A configuration, run small on this machine and held against what is known to be right.

Read first: ``case.py`` (what is proven), ``small_run.py`` (how a run is made small), ``proof.py``
(the checks and what each is held against), ``reference.py`` (one process that computes the same),
``compare.py`` (bounds, and what is beyond them).

Every other room may stand before it; none imports it."""
