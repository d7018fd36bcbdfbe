"""An emulated cluster on one machine, and data-parallel training of many kinds on it. Started by
``bench_overlap.sh``."""
