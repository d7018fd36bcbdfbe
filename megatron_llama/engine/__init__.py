"""The library: the overlapped distributed optimizer, and ``shard``, which puts it around any
module.

In the order in which to read: ``plan/buckets.py`` (how parameters are packed into messages),
``parameters.py`` (gathering), ``gradients.py`` (reducing), ``optimizer.py`` (a step),
``rules/update_rule.py`` (the update of one shard). ``options.py`` has all its options.

From other rooms it imports only ``errors.py``, ``option.py`` and ``registry.py``, and where
``shard(fp8=)`` is given ``hooks.py``: no configuration, no model, no world of a launcher."""
