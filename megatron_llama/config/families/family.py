"""What a model family says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Family:
    """A family of dense decoders, as HuggingFace's transformers has it."""

    model_type: str
    """Its name in ``config.json``."""
    architecture: str
    """The class of its causal language model."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """Modules of a block that have another name in the HuggingFace model: ours -> theirs."""
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Modules of the HuggingFace model that are several of ours, stacked: theirs -> ours, from the
    first row to the last."""

    def place(self, module: str, rows: Mapping[str, int]) -> tuple[str, int, int]:
        """Return where the outputs of one of our modules of a block, such as
        ``self_attn.q_proj``, are in the HuggingFace model: its module there, all rows of that
        module, and the first of those rows. ``rows`` has the outputs of each of our modules."""
        for theirs, ours in self.fused.items():
            if module in ours:
                before = sum(rows[name] for name in ours[: ours.index(module)])
                return theirs, sum(rows[name] for name in ours), before
        return self.tensors.get(module, module), rows[module], 0
