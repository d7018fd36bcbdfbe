"""The digest of a model: of the values of its weights, and of the fields that decide how they are
used.

It does not depend on the place, format or dtype of the weights, nor on the layout of the run: the
same values give the same digest, and one other bit another one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron_llama.config.schema import ModelConfig
from megatron_llama.engine.comm.object_collectives import all_gather_object, raise_on_all_ranks
from megatron_llama.engine.mesh import Axis
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.model.plan.params import hf_shapes

BLOCK_ELEMENTS = 2**24
"""Values that a rank reads and hashes at once: 64 MiB in fp32. The digest depends on it."""
BYTES = 16


def model_digest(
    source: WeightSource,
    model: ModelConfig,
    fields: Mapping[str, Any],
    world: Axis,
    *,
    dtype: torch.dtype = torch.float32,
) -> str:
    """Return the digest of the weights of ``model``, hexadecimal, the same on every rank. Each rank
    reads its share from ``source`` in ``dtype``, which must hold the stored values: fp32, or fp64
    in a run that computes in it. ``fields``, for JSON, has everything else that decides what the
    weights compute. Collective. Raises CheckpointError, on every rank, if the weights cannot be
    read."""
    own = dict[int, bytes]()
    with raise_on_all_ranks(world):
        for number, block in enumerate(blocks(model)):
            if number % world.size == world.rank:
                own[number] = _hashed(source, block, dtype)
    known = {n: digest for share in all_gather_object(own, world) for n, digest in share.items()}
    whole = hashlib.blake2b(_json(fields), digest_size=BYTES)
    for number, block in enumerate(blocks(model)):
        whole.update(_json([block.name, block.shape, block.offset]))
        whole.update(known[number])
    return whole.hexdigest()


def blocks(model: ModelConfig) -> Iterator[Rectangle]:
    """Yield all weights of a model in blocks of rows, in the order of the tensors' names."""
    for name, shape in sorted(hf_shapes(model).items()):
        columns = shape[1:]
        width = columns[0] if columns else 1
        rows = max(1, BLOCK_ELEMENTS // width)
        for first in range(0, shape[0], rows):
            size = (min(rows, shape[0] - first), *columns)
            yield Rectangle(name, shape, (first, *(0 for _ in columns)), size, 0)


def _hashed(source: WeightSource, block: Rectangle, dtype: torch.dtype) -> bytes:
    values = torch.empty(block.size, dtype=dtype)
    source(block, values)
    content = values.view(-1).view(torch.uint8).numpy().data
    return hashlib.blake2b(content, digest_size=BYTES).digest()


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
