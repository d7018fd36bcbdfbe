"""The page of ``doctor``: a machine's abilities for a run, and what is missing for which feature.

Read ``findings.py`` (the parts of a page), ``machine.py`` (processor, memory, disk, limits),
``network.py``, ``features.py`` (packages), ``trials.py`` (processes that exchange a tensor). A run
imports nothing of it."""
