"""What this room hangs into the trainer (``megatron_llama/hooks.py``)."""

from __future__ import annotations

from megatron_llama.hooks import Layouts

LAYOUTS = Layouts(chosen="planner.auto_parallel:chosen", imagined="planner.auto_parallel:imagined")
