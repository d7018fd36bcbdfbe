"""How one shard of a bucket is updated: AdamW, moments in fewer bits, Muon, schedule-free AdamW.

``update_rule.py`` is the interface and AdamW, ``registry.py`` says where the others are; what
updates on the host is in ``engine/offload/``."""
