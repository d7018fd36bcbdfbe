"""Times messages between processes, inside a machine and between machines, alone and together with
products."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm import exchange
from megatron_llama.engine.comm.collectives import all_reduce
from megatron_llama.engine.comm.object_collectives import all_gather_float
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.planner.calibrate.kernels import FEWEST, MOST
from megatron_llama.planner.measurements import Point

MESSAGES = (1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 26)
"""Bytes over all ranks. All ranks leave out messages that take too long."""


def link_points(mesh: Mesh, dtype: torch.dtype, budget: float) -> Iterator[tuple[Point, float]]:
    """Yield the points of links. The tp axis of ``mesh`` is a machine, and the dp axis has one rank
    of each machine. Collective; every rank yields the same points."""
    for axis, nodes in ((mesh.tp, 1), (mesh.dp, mesh.dp.size)):
        if axis.size > 1:
            for size in MESSAGES:
                numel = size // dtype.itemsize // axis.size * axis.size
                full = torch.ones(numel, dtype=dtype, device=mesh.device)
                own = full[: numel // axis.size].clone()
                kinds: tuple[tuple[str, Callable[[], object]], ...] = (
                    ("gather", partial(_gather, full, own, axis)),
                    ("reduce", partial(_reduce, full, axis)),
                )
                longest = 0.0
                for kind, call in kinds:
                    seconds = _together(call, mesh, budget)
                    longest = max(longest, seconds)
                    yield (kind, (axis.size, nodes, full.nbytes)), seconds
                if longest > budget / FEWEST / 8:
                    break
    if mesh.world.size > 1:
        yield from _overlapped(mesh, dtype, budget)


def _gather(full: torch.Tensor, own: torch.Tensor, axis: Axis) -> None:
    message = exchange.gather(full, own, axis, index=0)
    message.start()
    message.wait()


def _reduce(full: torch.Tensor, axis: Axis) -> None:
    all_reduce(full, axis).wait()


def _overlapped(mesh: Mesh, dtype: torch.dtype, budget: float) -> Iterator[tuple[Point, float]]:
    """Yield the points of a product, of a message of about the same duration, and of both."""
    axis = mesh.tp if mesh.tp.size > 1 else mesh.dp
    message = torch.ones(1 << 20, dtype=dtype, device=mesh.device)
    square = torch.ones(512, 512, dtype=dtype, device=mesh.device)

    send = partial(_reduce, message, axis)
    sending = _together(send, mesh, budget)
    single = _together(partial(torch.mm, square, square), mesh, budget)
    repeated = max(1, round(sending / single))

    def compute() -> None:
        for _ in range(repeated):
            torch.mm(square, square)

    def both() -> None:
        pending = all_reduce(message, axis)
        compute()
        pending.wait()

    calls: tuple[Callable[[], object], ...] = (compute, send, both)
    for which, call in enumerate(calls):
        yield ("beside", (which,)), _together(call, mesh, budget)


def _together(call: Callable[[], object], mesh: Mesh, budget: float) -> float:
    """Return the least seconds on the slowest rank of a call that all ranks make at the same time,
    equally often. Collective."""

    def timed() -> float:
        begin = time.perf_counter()
        call()
        devices.synchronize(mesh.device)
        return time.perf_counter() - begin

    timed()
    slowest = max(all_gather_float(timed(), mesh.world))
    repeated = min(MOST, max(FEWEST, int(budget / max(slowest, 1e-9))))
    return max(all_gather_float(min(timed() for _ in range(repeated)), mesh.world))
