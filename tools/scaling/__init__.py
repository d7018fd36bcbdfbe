"""What grows with the number of processes, measured on one machine (``tools/scale.py``)."""
