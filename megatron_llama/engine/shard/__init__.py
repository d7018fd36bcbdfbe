"""The engine around any module: ``shard`` and what belongs to it."""
