"""The recipes of this room for ``shard(fp8=)`` (``megatron_llama/hooks.py``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_llama.registry import Registry

FP8_RECIPES: Registry[Callable[[], Any]] = Registry(
    {"blockwise": "model.nn.fp8.modules:blockwise", "tensorwise": "model.nn.fp8.modules:tensorwise"}
)
