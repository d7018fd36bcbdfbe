"""Weights and training state on disk.

In the order in which to read: ``native.py`` (save and load in any layout), ``checkpoint_dir.py``
(a folder that is whole or not there), ``container.py`` (the one reader of folders of
torch.distributed.checkpoint), ``saver.py`` (when, and in the background),
``model_folders/formats.py`` (folders that a run reads and writes: HuggingFace's and others).

The room never imports the trainer."""
