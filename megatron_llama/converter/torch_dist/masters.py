"""Checks that fp32 masters lie at their expected places."""

from __future__ import annotations

import torch

from megatron_llama.converter.torch_dist.names import Boxes
from megatron_llama.converter.torch_dist.reader import TorchDistReader
from megatron_llama.errors import CheckpointError

NORMS = ("norm.weight", "layer_norm_weight", "router.weight")
"""Endings of the keys of norms and routers. These are small, and would show a wrong place in the
file."""


def require_masters(reader: TorchDistReader, masters: Boxes, prefix: str, *, do: str) -> None:
    """Raise CheckpointError with the remedy ``do`` unless the masters of all norms and routers,
    which ``masters`` has under ``prefix`` and the key, equal the model's values when rounded."""
    container = reader.checkpoint.container
    for stored in reader.weights:
        if not stored.key.endswith(NORMS):
            continue
        tensor = container.tensors[stored.key]
        inner = tensor.shape[len(stored.index) :]
        size = (*(1 for _ in stored.index), *inner)
        offset = (*stored.index, *(0 for _ in inner))
        weight = torch.empty(size, dtype=tensor.dtype)
        master = torch.empty(size, dtype=torch.float32)
        container.read(stored.key, offset, weight)
        masters.read(prefix + stored.key, offset, master)
        if not torch.equal(master.to(weight.dtype), weight):
            layer = "".join(f" of layer {number}" for number in stored.index)
            raise CheckpointError(
                f"{reader.folder} {prefix}{stored.key}{layer}",
                got=f"other values than those of {stored.key}",
                expected="the fp32 masters of the model's parameters",
                do=do,
            )
