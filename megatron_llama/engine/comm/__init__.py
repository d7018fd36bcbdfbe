"""Devices, streams and queues, and the collectives and transfers that go through them.

Read ``collectives.py`` and ``queues.py`` first. ``host/`` has the parts for gloo alone."""
