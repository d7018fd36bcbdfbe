"""The offers of this room to the trainer (``megatron_llama/hooks.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megatron_llama.hooks import Command

COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "quickstart": Command(
            "train.commands.quickstart",
            "quickstart",
            "train.commands.common.configs:QuickstartConfig",
            "Train a small LLaMA on Python's documentation in minutes, sample and export it.",
            words="[--output FOLDER]",
            listed=10,
        ),
        "preprocess": Command(
            "train.commands.preprocess",
            "preprocess",
            "data.preprocess_config:PreprocessConfig",
            "Turn text into an indexed dataset of tokens.",
            listed=20,
        ),
        "pretrain": Command(
            "train.commands.pretrain",
            "pretrain",
            "train.commands.pretrain:SECTIONS",
            "Train a LLaMA; torchrun or srun start it on several processes.",
            logs_notes=True,
            listed=30,
        ),
        "evaluate": Command(
            "train.commands.evaluate",
            "evaluate",
            "train.commands.evaluate:SECTIONS",
            "Loss and perplexity of --load or --init-from-hf on a dataset or text.",
            logs_notes=True,
            listed=60,
        ),
        "generate": Command(
            "train.commands.generate",
            "generate",
            "train.commands.generate:SECTIONS",
            "Continue prompts with a trained model.",
            listed=80,
        ),
        "export": Command(
            "train.commands.export",
            "export",
            "train.commands.common.configs:ExportConfig",
            "Write a checkpoint as a HuggingFace folder.",
            listed=100,
        ),
        "inspect": Command(
            "train.commands.inspect",
            "inspect",
            "train.commands.common.configs:NoOptions",
            "Look at a file, or list the presets: inspect presets.",
            words="config|checkpoint|dataset PATH [--verify]",
            listed=140,
        ),
        "doctor": Command(
            "train.commands.doctor",
            "doctor",
            "train.commands.common.configs:NoOptions",
            "What this machine can do for a run, and what is missing for which feature.",
            words="",
            listed=185,
        ),
        "env": Command(
            "train.commands.env",
            "env",
            "train.commands.common.configs:NoOptions",
            "Versions and devices, for a bug report.",
            words="",
            listed=190,
        ),
    }
)
