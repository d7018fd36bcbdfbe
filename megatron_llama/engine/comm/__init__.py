"""Devices, streams and queues, and the collectives and transfers that go through them.

Read ``collectives.py`` and ``queues.py`` first. What only gloo needs is in ``host/``."""
