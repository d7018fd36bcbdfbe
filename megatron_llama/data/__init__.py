"""Text, tokens, samples and their order.

In the order in which to read: ``indexed.py`` (a dataset on disk), ``order.py`` (which sample comes
when), ``loader.py`` (batches of a rank), ``preprocess.py`` (text to datasets),
``tokenizer/base.py`` (text to ids).

The room never imports checkpoints or the trainer."""
