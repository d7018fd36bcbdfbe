"""What this room hangs into the trainer (``megatron_llama/hooks.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megatron_llama.hooks import Format

_MEGATRON = Format(
    opened="converter.megatron.reader:opened", kind="converter.megatron.reader:family"
)
FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "megatron": _MEGATRON,
        "megatron-llama": _MEGATRON,
        "meta": Format(opened="converter.meta.reader:opened"),
        "torch_dist": Format(
            opened="converter.torch_dist.reader:opened",
            run="converter.torch_dist.saved_run:saved_run",
            shown="converter.torch_dist.inspected:show",
            verified="converter.torch_dist.inspected:verify",
        ),
    }
)
