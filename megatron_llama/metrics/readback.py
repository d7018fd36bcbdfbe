"""Numbers that the device still computes, and that the host reads later."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_llama.engine.comm import device as devices


class Readback:
    """An asynchronous copy of 0-dim tensors to the host.

    ``float(tensor)`` waits for everything that has been issued when it is called; ``read`` waits
    only for what was issued before this object was made. So a host that reads the numbers of a step
    after it has issued the next step never keeps the device waiting."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        values = torch.stack([tensor.detach().to(torch.float64) for tensor in tensors])
        self._values, self._copied = devices.copy_to_host(values)

    def read(self) -> list[float]:
        """Wait for the numbers, and return them in the order of the tensors."""
        if self._copied is not None:
            self._copied.synchronize()
        return list(self._values.tolist())
