"""Collectives and point-to-point transfers, the order in which they are issued, and the watch over
ranks that hang. What only gloo needs is in ``host``."""
