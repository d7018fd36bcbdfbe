"""Commands and formats that this room registers with the trainer (``megatron_llama/hooks.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megatron_llama.hooks import Command, Format

COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "convert": Command(
            "converter.commands.convert",
            "convert",
            "converter.configs:ConvertConfig",
            "Write a model in another format.",
            ("src", "dst"),
            "SRC DST --to FORMAT [--option value ...]",
            listed=110,
        ),
        "merge": Command(
            "converter.commands.merge",
            "merge",
            "converter.configs:MergeConfig",
            "Add LoRA adapters to their model.",
            ("src", "dst"),
            "SRC DST [--option value ...]",
            listed=120,
        ),
        "verify": Command(
            "converter.commands.verify",
            "verify",
            "converter.configs:VerifyConfig",
            "Compare two models, of any formats.",
            ("a", "b"),
            "A B [--option value ...]",
            listed=130,
        ),
    }
)

_MEGATRON = Format(
    opened="converter.megatron.reader:opened",
    files="converter.megatron.reader:weight_files",
    kind="converter.megatron.reader:family",
)
FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "megatron": _MEGATRON,
        "megatron-llama": _MEGATRON,
        "meta": Format(
            opened="converter.meta.reader:opened", files="converter.meta.reader:weight_files_of"
        ),
        "torch_dist": Format(
            opened="converter.torch_dist.reader:opened",
            files="checkpoint.model_folders.torch_dist.folder:chunk_files",
            run="converter.torch_dist.saved_run:saved_run",
            shown="converter.torch_dist.inspected:show",
            verified="converter.torch_dist.inspected:verify",
        ),
    }
)
