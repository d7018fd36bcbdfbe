"""Numbers that the device still computes, on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_llama.distributed import device as devices


class Readback:
    """Copies 0-dim tensors behind what was issued so far, into memory that the device writes by
    itself.

    ``float(tensor)`` would wait for all that was issued until it is called, ``read`` waits for what
    came before this object only: a host that reads the numbers of one step after it has issued the
    next never keeps the device waiting."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        values = torch.stack([tensor.detach().to(torch.float64) for tensor in tensors])
        self._values, self._there = devices.copy_to_host(values)

    def read(self) -> list[float]:
        """The numbers, in the order of the tensors."""
        if self._there is not None:
            self._there.synchronize()
        return list(self._values.tolist())
