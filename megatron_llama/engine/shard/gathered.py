"""Whole parameters between steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_llama.engine.comm.object_collectives import raise_on_all_ranks
from megatron_llama.engine.shard.values import ModuleValues, named
from megatron_llama.errors import TrainingError


@contextmanager
def gathered(values: ModuleValues, *, modify: bool = False) -> Iterator[None]:
    """Have all parameters whole in the module, on every rank, in memory of their own that is freed
    at the end. Collective.

    They are copies, in the compute dtype. With ``modify`` they are in the dtype of the masters, and
    at the end rank 0's parameters and buffers become those of all ranks; the state of the optimizer
    stays. They require no gradient. Raises TrainingError, on all ranks, where a parameter has no
    values or has been changed without ``modify``."""
    values.engine.settle()
    names = tuple(values.aliases)
    if modify:
        buffers = tuple(values.buffers())
        with values.changing(names, buffers, (*names, *buffers)), _noted(values):
            yield
        values.engine.publish()
        return
    values.require_initialized()
    parameters = values.whole(names, values.engine.dtype)
    before = _digests(parameters.values())
    with values.installed(parameters):
        with _noted(values):
            yield
        changed = [
            name
            for (name, parameter), old, new in zip(
                parameters.items(), before, _digests(parameters.values()), strict=True
            )
            if old != new or getattr(*next(values.places(name))) is not parameter
        ]
    with raise_on_all_ranks(values.engine.mesh.world):
        if changed:
            raise TrainingError(
                "engine.gathered",
                got=f"a change of {named(changed)}",
                expected="parameters as they were, because changes here are lost",
                do="write engine.gathered(modify=True), which keeps rank 0's",
            )


def _digests(parameters: Iterable[Tensor]) -> list[tuple[int, int, int]]:
    """Return what a change of a parameter changes: its version, its memory, and the sum of its
    elements as integers."""
    # The version alone is not enough: ``parameter.data.clamp_(...)`` leaves it as it is.
    listed = list(parameters)
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [
        parameter.detach().view(integers[parameter.element_size()]).sum() for parameter in listed
    ]
    read = torch.stack(sums).tolist() if sums else []  # the host waits once
    return [
        (parameter._version, parameter.data_ptr(), total)
        for parameter, total in zip(listed, read, strict=True)
    ]


@contextmanager
def _noted(values: ModuleValues) -> Iterator[None]:
    """Let ``model.state_dict()`` know that the parameters are whole."""
    values.are_whole = True
    try:
        yield
    finally:
        values.are_whole = False
