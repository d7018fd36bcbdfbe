"""A zoo of models of others' libraries, each trained by ``megatron_llama.shard`` and by torch's
DistributedDataParallel: ``python -m tools.zoo``.

``entry.py`` says what a model of the zoo is, ``texts.py``, ``pictures.py`` and ``sounds.py`` list
them, ``training.py`` trains one, and ``__main__.py`` compares and prints."""
