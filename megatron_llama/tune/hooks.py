"""The offers of this room to the trainer (``megatron_llama/hooks.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megatron_llama.hooks import Command

COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "sft": Command(
            "tune.commands.sft",
            "sft",
            "tune.commands.sft:SECTIONS",
            "Tune a model on conversations; started like pretrain.",
            logs_notes=True,
            listed=40,
        ),
        "align": Command(
            "tune.commands.align",
            "align",
            "tune.commands.align:SECTIONS",
            "Tune a model on preferences (DPO and others), or train a reward model.",
            logs_notes=True,
            listed=50,
        ),
        "data": Command(
            "tune.commands.data",
            "data",
            "tune.commands.data:SECTIONS",
            "Look at examples for sft, or at pairs for align.",
            ("action", "train_data"),
            "preview|check|stats FILE --tokenizer-model FOLDER [--option value ...]",
            listed=70,
        ),
        "chat": Command(
            "tune.commands.chat",
            "chat",
            "tune.commands.chat:SECTIONS",
            "Talk with a trained model, line by line.",
            listed=90,
        ),
    }
)
