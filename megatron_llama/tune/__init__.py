"""Tuning: training on conversations (``sft``) and on judged answers (``align``), and the commands
that inspect such files and talk with a tuned model.

Read first: ``sft/formats.py`` (a record as an example), ``sft/chat.py`` (an example as tokens, and
which of them are learned), ``sft/dataset.py`` (examples as samples), ``preference/objective.py``
(the losses of preference tuning), ``preference/inputs.py`` (the inputs of ``align``).

It calls the trainer with its own deciders (``train/setup``) of the inputs: samples, and for
preferences an ``Objective``. It never imports ``prove``."""
