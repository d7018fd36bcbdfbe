"""Bounds on what a file may claim before anything is allocated or repeated by its word, each with
its reason. A bound is far above what any real file holds, and far below what takes a machine.

What is refused by one of them is refused with what the file claims and what is allowed."""

from __future__ import annotations

LARGEST_INTEGER = 2**63 - 1
"""Integers of files become int64 in torch."""
SHOWN_CHARACTERS = 80
"""An error shows so much of a value."""

# Files of models, tokenizers and adapters from elsewhere.
LARGEST_SMALL_FILE = 64 * 2**20
"""A config.json has a few kB, the index of the largest published model 9 MB. JSON takes up to 24
times its size as objects."""
LARGEST_TOKENIZER_FILE = 512 * 2**20
"""The largest published tokenizer.json has 33 MB."""
LARGEST_VOCABULARY = 2**24
"""Tokens of a tokenizer: the largest known one has 262,208."""
LARGEST_ADAPTER_RANK = 2**16
"""Columns of a low-rank addition: more than any model is wide, where it saves nothing."""
LARGEST_TRACKER_FILE = 4096
"""A file that names the newest checkpoint."""
LARGEST_LAYERS = 10_000
"""Layers of a model: the deepest published ones have 126. Each has a dozen tensors in every
table."""
LARGEST_SUMS_FILE = 16 * 2**20
"""A list of checksums: 100,000 files."""
LARGEST_REAL = 1e12
"""Bases, factors and scales of models are far smaller: the largest rotary base known is 5e8. They
become float32, in which their products must not overflow."""
SMALLEST_REAL = 1e-30
"""A positive number of a model: a smaller one becomes 0 in float32 once it is multiplied."""
LARGEST_POSITIONS = 2**31 - 1
"""Positions of a sequence: they are counted in int32 where a kernel does it."""
SMALLEST_ROPE = 1e-6
"""A rotary base, or a factor of one: positions are divided by it."""
