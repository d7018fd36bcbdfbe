"""Bounds on what a file may claim before anything is allocated or repeated by its word, each with
its reason. A bound is far above what any real file holds, and far below what takes a machine.

What is refused by one of them is refused with what the file claims and what is allowed."""

from __future__ import annotations

LARGEST_INTEGER = 2**63 - 1
"""Integers of files become int64 in torch."""
SHOWN_CHARACTERS = 80
"""An error shows so much of a value."""

# Datasets.
LARGEST_VOCABULARY = 2**31 - 1
"""Token ids are int32 in every dataset."""
DATASET_CHECK_SECONDS = 600.0
"""A run compares its data with their sums in the background for so long. Terabytes would take
hours, in which the disk belongs to the run."""
