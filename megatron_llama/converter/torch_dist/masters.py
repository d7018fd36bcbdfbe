"""Checks that fp32 masters lie at their expected places."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron_llama.converter.torch_dist.names import Boxes, StoredWeight
from megatron_llama.converter.torch_dist.reader import TorchDistReader
from megatron_llama.errors import CheckpointError

NORMS = ("norm.weight", "layer_norm_weight", "router.weight")
"""Endings of the keys of norms and routers. These are small, and would show a wrong place in the
file."""

EXPERTS = ".mlp.experts."
"""A part of the keys of experts, of which nothing else shows that they have their own values."""


def require_masters(reader: TorchDistReader, masters: Boxes, prefix: str, *, do: str) -> None:
    """Raise CheckpointError with the remedy ``do`` unless the masters of all norms and routers, and
    of the first and last row of each expert's matrices, equal the model's values when rounded.
    ``masters`` has them under ``prefix`` and the key."""
    container = reader.checkpoint.container
    for stored, first, rows in _compared(reader):
        tensor = container.tensors[stored.key]
        inner = tensor.shape[len(stored.index) + 1 :]
        size = (*(1 for _ in stored.index), rows, *inner)
        offset = (*stored.index, first, *(0 for _ in inner))
        weight = torch.empty(size, dtype=tensor.dtype)
        master = torch.empty(size, dtype=torch.float32)
        container.read(stored.key, offset, weight)
        masters.read(prefix + stored.key, offset, master)
        if not torch.equal(master.to(weight.dtype), weight):
            named = zip(("layer", "expert"), stored.index, strict=False)
            place = " of" * bool(stored.index) + ",".join(f" {name} {n}" for name, n in named)
            raise CheckpointError(
                f"{reader.folder} {prefix}{stored.key}{place}",
                got=f"other values than those of {stored.key}",
                expected="the fp32 masters of the model's parameters",
                do=do,
            )


def _compared(reader: TorchDistReader) -> Iterator[tuple[StoredWeight, int, int]]:
    """Yield what is compared of each weight: its first row and the number of rows."""
    for stored in reader.weights:
        rows = stored.map.shape[0]
        if stored.key.endswith(NORMS):
            yield stored, 0, rows
        elif EXPERTS in stored.key:
            yield stored, 0, 1
            yield stored, rows - 1, 1
