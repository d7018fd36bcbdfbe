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

# Options.
OPTION_FILE_CHARACTERS = 512 << 10
"""Of a YAML file. It is read in Python, which takes seconds for so many; a long one has 10,000."""
OPTION_FILE_VALUES = 50_000
"""Of a YAML file, each counted as often as aliases repeat it: ten lines of aliases can stand for
more than fit into any memory."""
OPTION_FILE_DEPTH = 20
"""Of lists and mappings within each other. Options need three."""
SHOWN_OPTION = 400
"""Characters of a refused value."""
LONGEST_WEIGHT = 40
WEIGHT_EXPONENT_DIGITS = 2
"""Of a weight of --data-path: 1e999999999 is a number of a billion digits."""

# Chat templates, which come with models from anywhere.
TEMPLATE_SOURCE_CHARACTERS = 1 << 20
"""Of a template. The longest in use have 20,000."""
TEMPLATE_STEPS = 3_000_000
"""Passes of loops, calls and filters while one conversation is rendered. A template that looks at
all messages for each of 1,000 takes a million."""
TEMPLATE_CHARACTERS = 128 << 20
TEMPLATE_CHARACTERS_OF_INPUT = 256
"""All texts that a template makes of one conversation, together: so many, and for each character
of the conversation so many more. A template that builds its text piece by piece makes it many
times."""
TEMPLATE_SECONDS = 2.0
TEMPLATE_SECONDS_OF_A_CHARACTER = 1e-6
"""Of the processor, for one conversation, and more for each of its characters. A usual one takes
a thousandth of a second."""
TEMPLATE_INTEGER_BITS = 4096
"""Of the result of a product or a power."""
TEMPLATE_INDENT = 100
"""Characters of an indentation of JSON."""

# Examples and pairs.
LARGEST_SCORES_HEADER = 1 << 20
"""Bytes of a file of reference scores beside its scores."""
LARGEST_LINE = 1 << 30
"""Bytes of a line of JSON, or of a text that is one document. Compressed files of some kilobytes
can hold lines that fill any memory."""
