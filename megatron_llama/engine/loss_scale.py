"""Dynamic loss scale for float16 (Micikevicius et al., 2018, section 3.2), kept on the device: the
host never waits to learn whether a step overflowed."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_llama.engine.options import LossScaling

FACTOR = 2.0


class LossScale:
    """A factor for the loss that halves after ``hysteresis`` overflowing steps in a row, and
    doubles after ``loss_scale_window`` steps without overflow.

    Overflow is found in the global gradient norm, which every rank has, so all ranks change the
    scale together. Without ``scaling`` it stays 1."""

    def __init__(self, scaling: LossScaling | None, device: torch.device) -> None:
        self._scaling = scaling
        start = 1.0 if scaling is None else scaling.initial_loss_scale
        self.value = torch.full((), start, dtype=torch.float32, device=device)
        """The current scale, 0-dim."""
        self._clean = torch.zeros((), dtype=torch.float32, device=device)
        self._overflows = torch.zeros((), dtype=torch.float32, device=device)

    def update(self, overflow: Tensor) -> None:
        """Count a step. ``overflow`` is 1 or 0, 0-dim on the device."""
        scaling = self._scaling
        if scaling is None:
            return
        # ``where`` instead of ``if``: the host would have to wait for the device to decide.
        zero = torch.zeros_like(self._clean)
        self._overflows = torch.where(overflow > 0, self._overflows + 1, zero)
        self._clean = torch.where(overflow > 0, zero, self._clean + 1)
        shrink = self._overflows >= scaling.hysteresis
        grow = self._clean >= scaling.loss_scale_window
        smaller = (self.value / FACTOR).clamp(min=scaling.min_loss_scale)
        # A new tensor: the step that ends has handed out the old one, which may still be read.
        self.value = torch.where(
            shrink, smaller, torch.where(grow, self.value * FACTOR, self.value)
        )
        self._overflows = torch.where(shrink, zero, self._overflows)
        self._clean = torch.where(grow, zero, self._clean)

    @property
    def dynamic(self) -> bool:
        """Whether the scale follows overflows."""
        return self._scaling is not None

    @property
    def memory(self) -> list[Tensor]:
        """All tensors that are kept here, 0-dim on the device."""
        return [self.value, self._clean, self._overflows]

    def reset(self) -> None:
        """Return to the initial scale."""
        if self._scaling is not None:
            self.load([self._scaling.initial_loss_scale, 0.0, 0.0])

    def state(self) -> list[float]:
        """Return the state for a checkpoint: scale, steps without overflow, overflows in a row."""
        return [float(t) for t in (self.value, self._clean, self._overflows)]

    def load(self, state: list[float]) -> None:
        """Continue from the ``state`` that a run with --fp16 has saved. Does nothing without
        --fp16."""
        if self.dynamic:
            self.value, self._clean, self._overflows = (
                torch.full_like(self.value, number) for number in state
            )
