"""Plugins for training loops of other libraries, whose steps are then those of ``ml.shard``.

``accelerate.py`` (``prepare``), ``transformers.py`` (``EngineTrainer``, and ``EngineMixin`` for the
trainers of TRL), ``lightning.py`` (``EngineStrategy``). ``accelerator.py`` belongs to the first
two, ``steps.py`` and ``schedulers.py`` to all. Nothing of the package imports this room: users
import the plugin of the library that they have. It imports the engine alone."""
