"""What stands on hosts for the graphs of a device: a replay runs the pass again, into the places of the capture.

So everything but the device's part is tried: which places are fixed, what is asked of the engine before and after a pass, and the buffers of
microbatches in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from megatron_llama.engine.comm import device as devices
from megatron_llama.train.run import block_graphs as graphs
from torch import Tensor


@contextmanager
def rerunning() -> Iterator[list[str]]:
    """A section in which graphs can be captured on a host. Yields a list that tells what was captured and replayed."""
    told: list[str] = []
    capturing = [False]
    view_of = graphs._Handle.grad_view

    def grad_view(handle: graphs._Handle) -> tuple[Tensor, float]:
        view, beta = view_of(handle)
        # A capture computes nothing. The slot may be on its way to other ranks.
        return (torch.zeros_like(view) if capturing[0] else view), beta

    def capture(work: Callable[[], Any], pool: int, stream: object) -> tuple[Any, Callable[[], None]]:
        told.append(f"capture in {pool}")
        capturing[0] = True
        try:
            result = work()
        finally:
            capturing[0] = False
        if result is not None:
            result.fill_(torch.nan)  # until a replay has written it

        def replay() -> None:
            told.append("replay")
            again = work()
            if result is not None:
                result.copy_(again)

        return result, replay

    pools = iter(range(1000))
    with ExitStack() as stack:
        stack.enter_context(patch.object(devices, "capture", capture))
        stack.enter_context(patch.object(devices, "graph_pool", lambda: next(pools)))
        stack.enter_context(patch.object(devices, "new_stream", lambda device: None))
        stack.enter_context(patch.object(graphs._Handle, "grad_view", grad_view))
        yield told
