"""Updates of one shard of a bucket: AdamW, moments in fewer bits, Muon, schedule-free AdamW.

``update_rule.py`` is the interface and AdamW, ``registry.py`` lists the other rules. Rules that
update on the host are in ``engine/offload/``."""
