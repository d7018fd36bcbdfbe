"""Model folders that a run reads and writes: HuggingFace's and our own, and the interfaces that
formats of other programs (``converter``) are opened through.

Read first: ``formats.py`` (readers, writers, which format a folder has), ``hf/reader.py``,
``hf/writer.py``, ``native/reader.py``, ``export.py`` (the last step of a run, and ``export``)."""
