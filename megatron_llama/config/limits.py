"""Bounds on the claims of a file, each with its reason, checked before anything is allocated or
repeated by them. A bound is far above any real file, and far below what takes down a machine.

An error of a bound names the file's claim and the allowed value."""

from __future__ import annotations

LARGEST_INTEGER = 2**63 - 1
"""The largest int64: integers of files become int64 in torch."""
SHOWN_CHARACTERS = 80
"""Characters of a value that an error shows."""
LONGEST_NAME = 255
"""Bytes of a file's name, the limit of the file systems in use."""
LARGEST_DIMENSIONS = 64
"""Dimensions of a tensor, the limit of torch."""
LARGEST_CHECKSUM_LIST = 2**26
"""Bytes of ``SHA256SUMS``: 256 for each of LARGEST_RANKS, which writes one file. A line has 90."""
LARGEST_META = 2**26
"""Bytes of ``meta.json``, whatever lies beside it: a hundred for each lane of each text that is
streamed."""
META_BYTES_PER_FILE = 2**16
"""Bytes of ``meta.json`` for each ``.distcp`` beside it, besides LARGEST_META: runs of more ranks
have more lanes."""
LARGEST_INDEX = 2**26
"""Bytes of ``.metadata``, or of ``index.json`` or one of its parts, whatever lies beside it."""
INDEX_BYTES_PER_KIB = 512
"""Bytes of these for each 1,024 of the ``.distcp`` beside it, besides LARGEST_INDEX: 150 to
250 for each chunk, and no chunk has less than 1,500. Megatron-Core's has all plans of all ranks,
too."""
LARGEST_TRACKER = 64
"""Bytes of ``latest_checkpointed_iteration.txt``: one number."""
LARGEST_CHUNK_HEADER = 2**16
"""Bytes of the pickle that describes one tensor: real ones have some 200."""
LARGEST_TUPLE = 2**12
"""Values in a tuple of a pickle, those of nested tuples included. Hashing takes a part of the C
stack for each level of tuples. A tuple that holds the one before twice takes twice as long: 40
levels of 4 bytes would take days."""
PICKLED_BYTES_PER_OBJECT = 4
"""Bytes of a pickle for each object that it makes, beside 2**18 objects: real ones take ten. One
byte can make a dict of 64."""
HASHED_PER_PICKLED_BYTE = 16
"""Values that may be hashed for each byte of a pickle: real ones have less than one."""
LARGEST_COVER_WORK = 64
"""Looks at each chunk, beside a million in all, to see that chunks do not overlap. Boxes that were
cut straight take one look for each direction."""

# Models and clusters, for which tables are built.
LARGEST_LAYERS = 2_048
"""Transformer blocks: plans list the parameters of each. The deepest models published have 1,000,
the largest 126."""
LARGEST_EXPERTS = 1_024
"""Experts of a block: plans list the tensors of each. The models published have up to 512."""
LARGEST_SIZE = 2**31 - 1
"""Widths, heads, rows of a vocabulary, positions: no published model comes near."""
LARGEST_RANKS = 2**18
"""Processes of a run, and parts into which a model is split: lists of ranks are made of it. The
largest runs published have 10**5."""
LARGEST_STAGES = 512
"""Pipeline ranks times chunks: the proof of a schedule takes time with their square, a second for
this many. The largest runs published have 64."""
LARGEST_PASSES = 1_000_000
"""Passes of all microbatches through all stages in a step: a schedule lists them, in 10 to 20
microseconds for each. A step of 2,048 microbatches in 128 stages has half as many."""
LARGEST_RAMP = 1_000_000
"""Steps, and sizes, of a growing batch: they are counted one by one."""

# Files of torch.save.
LARGEST_PICKLE = 64 * 2**20
"""Bytes of the pickle that names the tensors of one file: about 300 for each tensor."""
LARGEST_DEPTH = 100
"""Objects within objects. Settings and optimizer states have fewer than 20 levels; Python's own
functions end at 1,000, and some of C's take the process with them."""
LARGEST_VALUES = 2_000_000
"""Objects of one file, counted as often as they are reached: ten lists that each hold the next one
ten times are 10**10."""
LARGEST_ENTRIES = 200_000
"""Entries of a zip archive, one for each tensor: Python takes 600 bytes for each."""

# Files of lines: logs and events, ours and other trainers'.
LARGEST_LINE = 4 * 2**20
"""Bytes or characters of a line. A start's line has the configuration: some kB, and 100 bytes for
each of a blend's datasets."""
LARGEST_UNPACKED = 400
"""The unpacked size of a log over its packed size: zlib's own bound is 1,030, which blanks reach
and logs do not."""
LARGEST_COLUMNS = 200
"""Names of numbers in a log: a trainer writes 40."""
LARGEST_ITERATION = 10**12
"""The largest iteration: a step each millisecond for 30 years."""

# Calibrations and timelines.
LARGEST_RATE = 1e24
SMALLEST_RATE = 1e-15
"""Bytes, operations and seconds of devices, and factors of them: their products and quotients stay
finite in fp64."""
LARGEST_TIMELINE = 50
"""The unpacked size of a timeline over its packed size, beside ROOM_OF_TIMELINE: real ones 20."""
ROOM_OF_TIMELINE = 16 * 2**20
"""Bytes that every timeline may unpack to."""

# Files of models, tokenizers and adapters from elsewhere.
LARGEST_SMALL_FILE = 64 * 2**20
"""A config.json has a few kB, the index of the largest published model 9 MB. JSON takes up to 24
times its size as objects."""
LARGEST_TOKENIZER_FILE = 512 * 2**20
"""Bytes of a tokenizer.json: the largest published one has 33 MB."""
LARGEST_VOCABULARY = 2**24
"""Tokens of a tokenizer: the largest known one has 262,208."""
LARGEST_ADAPTER_RANK = 2**16
"""Columns of a low-rank addition: more than the width of any model, where it saves nothing."""
LARGEST_REAL = 1e12
"""Bases, factors and scales of models are far smaller: the largest rotary base known is 5e8. They
become float32, in which their products must not overflow."""
SMALLEST_REAL = 1e-30
"""A positive number of a model: a smaller one becomes 0 in float32 once it is multiplied."""
SMALLEST_ROPE = 1e-6
"""A rotary base, or a factor of one: positions are divided by it."""
WEIGHT_CHECK_SECONDS = 120.0
"""How long the first save of a run waits for the comparison of its weights with their sums. Then it
is made, since a late save may be lost. 140 GB of a slow disk take ten minutes."""

# Datasets.
DATASET_CHECK_SECONDS = 600.0
"""How long a run compares its data with their sums in the background. Terabytes would take hours,
in which the run needs the disk."""

# Options.
OPTION_FILE_CHARACTERS = 512 << 10
"""Characters of a YAML file. It is read in Python, which takes seconds for this many; a long one
has 10,000."""
OPTION_FILE_VALUES = 50_000
"""Values of a YAML file, counted as often as aliases repeat them: ten lines of aliases can stand
for more than fit into any memory."""
OPTION_FILE_DEPTH = 20
"""Levels of nested lists and mappings. Options need three."""
SHOWN_OPTION = 400
"""Characters of a refused value."""
LONGEST_WEIGHT = 40
WEIGHT_EXPONENT_DIGITS = 2
"""Characters of a weight of --data-path, and digits of its exponent: 1e999999999 is a number of a
billion digits."""

# Chat templates, which come with models from anywhere.
TEMPLATE_SOURCE_CHARACTERS = 1 << 20
"""Characters of a template. The longest in use have 20,000."""
TEMPLATE_STEPS = 3_000_000
"""Passes of loops, calls and filters in the rendering of one conversation. A template that looks at
all messages for each of 1,000 takes a million."""
TEMPLATE_CHARACTERS = 128 << 20
TEMPLATE_CHARACTERS_OF_INPUT = 256
"""Characters of all texts that a template makes of one conversation: a constant, and a number for
each character of the conversation. A template that builds its text piece by piece makes it many
times."""
TEMPLATE_SECONDS = 2.0
TEMPLATE_SECONDS_OF_A_CHARACTER = 1e-6
"""Processor time for one conversation: a constant, and a time for each of its characters. A usual
one takes a millisecond."""
TEMPLATE_INTEGER_BITS = 4096
"""Bits of the result of a product or a power."""
TEMPLATE_INDENT = 100
"""Characters of an indentation of JSON."""

# Examples and pairs.
LARGEST_SCORES_HEADER = 1 << 20
"""Bytes of a file of reference scores beside its scores."""
LARGEST_RECORD = 1 << 30
"""Bytes of a line of JSON, or of a compressed text that is one document. Compressed files of some
kilobytes can hold lines that fill any memory."""
