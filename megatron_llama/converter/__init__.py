"""Formats of other programs, and the commands that go from one to another.

Read first: ``hooks.py`` (which formats there are), ``megatron/names.py`` (where a tensor of
HuggingFace's stands in Megatron's files), ``torch_dist/reader.py`` (Megatron-Core's folders),
``torch_dist/saved_run.py`` (a run with which one here goes on), ``convert.py`` (from a reader to a
writer).

A reader is a ``ModelReader``, a writer a ``ModelWriter`` (``checkpoint/model_folders/formats.py``).
The room never imports ``tune`` or ``prove``, and the trainer reaches it through ``hooks.py``
alone."""
