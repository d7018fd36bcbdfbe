"""A handle of a weight without an engine."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron_llama.engine.param_handle import attach_param_handle
from torch import Tensor


class Handle:
    """What layers ask of a weight and deliver for it. The first contribution must write, not add."""

    def __init__(self, weight: Tensor, *, put_off: bool = False, log: Callable[[], object] = lambda: None) -> None:
        self.grad, self.work, self.written = torch.full_like(weight, torch.nan), list[Callable[[], object]](), 0
        self.put_off, self.log = put_off, log
        attach_param_handle(weight, self)

    def wait_unsharded(self) -> int:
        self.log()
        return 0

    def check_version(self, version: int) -> None:
        self.log()
        assert version == 0

    def grad_view(self) -> tuple[Tensor, float]:
        return self.grad, float(self.written > 0)

    def grad_written(self) -> None:
        self.written += 1

    def keep_wgrad(self, work: Callable[[], object]) -> bool:
        self.work += [work] * self.put_off
        return self.put_off
