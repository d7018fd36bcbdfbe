"""The command of this room in the trainer (``megatron_llama/hooks.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megatron_llama.hooks import Command

COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "prove": Command(
            "prove.commands.prove",
            "prove",
            "prove.commands.prove:SECTIONS",
            "Show on this machine, before a cluster is booked, that a run computes what it should.",
            words="--config FILE.yaml [any option of pretrain or sft] [--option value ...]",
            listed=170,
        )
    }
)
