"""Bounds on what a file may claim before anything is allocated or repeated by its word, each with
its reason. A bound is far above what any real file holds, and far below what takes a machine.

What is refused by one of them is refused with what the file claims and what is allowed."""

from __future__ import annotations

LARGEST_INTEGER = 2**63 - 1
"""Integers of files become int64 in torch."""
SHOWN_CHARACTERS = 80
"""An error shows so much of a value."""
LONGEST_NAME = 255
"""Bytes of a file's name, by the file systems in use."""
LARGEST_DIMENSIONS = 64
"""torch knows no tensor of more dimensions."""
LARGEST_CHECKSUM_LIST = 2**26
"""Bytes of ``SHA256SUMS``: 256 for each of LARGEST_RANKS, which writes one file. A line has 90."""
LARGEST_META = 2**26
"""Bytes of ``meta.json``, whatever lies beside it: a hundred for each lane of each text that is
streamed."""
META_BYTES_PER_FILE = 2**16
"""Bytes of ``meta.json`` for each ``.distcp`` beside it, besides LARGEST_META: runs of more ranks
have more lanes."""
LARGEST_INDEX = 2**26
"""Bytes of ``.metadata``, whatever lies beside it."""
INDEX_BYTES_PER_KIB = 512
"""Bytes of ``.metadata`` for each 1,024 of the ``.distcp`` beside it, besides LARGEST_INDEX: 150 to
250 for each chunk, and no chunk has less than 1,500. Megatron-Core's has all plans of all ranks,
too."""
LARGEST_TRACKER = 64
"""Bytes of ``latest_checkpointed_iteration.txt``: one number."""
LARGEST_CHUNK_HEADER = 2**16
"""The pickle that describes one tensor has some 200 bytes. A larger one is something else."""
LARGEST_TUPLE = 2**12
"""Values in a tuple of a pickle, those of tuples in it included. Each level of tuples takes a part
of the C stack when a tuple is hashed, and a tuple that holds the one before twice takes twice as
long: 40 levels of 4 bytes would take days."""
PICKLED_BYTES_PER_OBJECT = 4
"""A pickle makes at most one object for so many of its bytes, beside 2**18: real ones take ten. One
byte can make a dict of 64."""
HASHED_PER_PICKLED_BYTE = 16
"""So many values may be hashed for each byte of a pickle: real ones have less than one."""
LARGEST_COVER_WORK = 64
"""Chunks are looked at so often, beside a million times in all, to see that they do not overlap.
Boxes that were cut straight take one look for each direction."""

# Models and clusters: what tables are built for.
LARGEST_LAYERS = 2_048
"""Transformer blocks: plans list the parameters of each. The deepest models published have 1,000,
the largest 126."""
LARGEST_SIZE = 2**31 - 1
"""Widths, heads, rows of a vocabulary, positions: no published model has one near this."""
LARGEST_RANKS = 2**18
"""Processes of a run, and parts into which a model is split: lists of ranks are made of it. The
largest runs published have 10**5."""
LARGEST_STAGES = 512
"""Pipeline ranks times chunks: the proof of a schedule takes time with their square, a second
for so many. The largest runs published have 64."""
LARGEST_PASSES = 1_000_000
"""Passes of all microbatches through all stages in a step: a schedule has them in a list, 10 to 20
microseconds for each. A step of 2,048 microbatches in 128 stages has half as many."""
LARGEST_RAMP = 1_000_000
"""Steps, and sizes, of a batch that grows: they are counted one by one."""

# Files of torch.save.
LARGEST_PICKLE = 64 * 2**20
"""Bytes of the pickle that names the tensors of one file: about 300 for each tensor."""
LARGEST_DEPTH = 100
"""Objects within objects. Settings and optimizer states have fewer than 20 levels; Python's own
functions end at 1,000, and some of C's take the process with them."""
LARGEST_VALUES = 2_000_000
"""Objects that are reached in one file, counted as often as they are reached: ten lists that each
hold the next one ten times are 10**10."""
LARGEST_ENTRIES = 200_000
"""Entries of a zip archive, one for each tensor: Python takes 600 bytes for each."""

# Files of lines: logs and events, ours and other trainers'.
LARGEST_LINE = 4 * 2**20
"""Bytes or characters of a line. A start's line has the configuration: some kB, and 100 bytes for
each of a blend's datasets."""
LARGEST_UNPACKED = 400
"""A packed log becomes so many times its size at most: zlib's own bound is 1,030, which blanks
reach and logs do not."""
LARGEST_COLUMNS = 200
"""Names of numbers in a log: a trainer writes 40."""
LARGEST_ITERATION = 10**12
"""A step a millisecond for 30 years."""

# Calibrations and timelines.
LARGEST_RATE = 1e24
SMALLEST_RATE = 1e-15
"""Bytes, operations and seconds of devices, and factors on them: their products and quotients stay
numbers of fp64."""
LARGEST_TIMELINE = 50
"""A packed timeline becomes so many times its size at most, and ROOM_OF_TIMELINE: real ones 20."""
ROOM_OF_TIMELINE = 16 * 2**20
"""Bytes that every timeline may unpack to."""

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
LARGEST_REAL = 1e12
"""Bases, factors and scales of models are far smaller: the largest rotary base known is 5e8. They
become float32, in which their products must not overflow."""
SMALLEST_REAL = 1e-30
"""A positive number of a model: a smaller one becomes 0 in float32 once it is multiplied."""
SMALLEST_ROPE = 1e-6
"""A rotary base, or a factor of one: positions are divided by it."""
WEIGHT_CHECK_SECONDS = 120.0
"""The first save of a run waits so long for the comparison of its weights with their sums, and is
made then: what a run keeps late it may lose. 140 GB of a slow disk take ten minutes."""

# Datasets.
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
LARGEST_RECORD = 1 << 30
"""Bytes of a line of JSON, or of a compressed text that is one document. Compressed files of some
kilobytes can hold lines that fill any memory."""
