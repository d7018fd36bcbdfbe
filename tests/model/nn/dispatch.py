"""What reaches torch's dispatcher."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Dispatched(TorchDispatchMode):
    """Every call: the operator's name, and what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = list[tuple[str, tuple[Any, ...], dict[str, Any]]]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((function.overloadpacket.__name__, args, kwargs or {}))
        return function(*args, **(kwargs or {}))

    def named(self, part: str) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
        """The calls of operators whose names have this in them."""
        return [call for call in self.calls if part in call[0]]


def scores(dispatched: Dispatched) -> tuple[int, int]:
    """Attention scores that torch's kernel for hosts was asked for, forward and backward."""
    found = [0, 0]
    for name, args, _ in dispatched.named("scaled_dot_product_flash_attention_for_cpu"):
        backward = name.endswith("backward")
        query, key = args[backward : backward + 2]
        queries, keys = query.shape[2], key.shape[2]
        causal = args[7] if backward else len(args) > 4 and args[4]
        found[backward] += query.shape[:2].numel() * (queries * (queries + 1) // 2 if causal else queries * keys)
    return found[0], found[1]
