"""The library: the overlapped distributed optimizer, and ``shard``, which puts it around any
module.

In the order in which to read: ``plan/buckets.py`` (how parameters are packed into messages),
``parameters.py`` (gathering), ``gradients.py`` (reducing), ``optimizer.py`` (a step),
``rules/update_rule.py`` (the update of one shard). ``options.py`` is all that it obeys.

The room imports nothing but ``errors.py``: no configuration, no model, no world of a launcher."""
