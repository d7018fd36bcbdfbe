"""The engine around any module.

In the order in which to read: ``shard.py`` (the function), ``module_buckets.py`` (the plan of a
module), ``engine.py`` (what the user holds), ``intercept.py`` (where weights are asked for),
``order.py`` (what a step learns from the one before)."""
