"""Runs a configuration on this machine, made small, and compares it with known right results.

Read first: ``case.py`` (the configuration that is proven), ``small_run.py`` (how a run is made
small), ``proof.py`` (the checks and their references), ``reference.py`` (one process that computes
the same), ``compare.py`` (bounds, and deviations beyond them).

This room may import every other room; no room imports it."""
