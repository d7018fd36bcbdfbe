"""Writes a safetensors file tensor by tensor: the library's own writer needs the whole file in
memory."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_llama.checkpoint.finite import is_finite
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.errors import CheckpointError

DTYPES: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
)
"""Float dtypes by their names in the format."""
BLOCK_ELEMENTS = 2**24
"""Values of one request to a source: 64 MiB in fp32, and more than a chunk of a checkpoint, which
is read whole."""


EXPORTED: Mapping[str, str] = MappingProxyType({"exported_by": "megatron_llama"})
"""Metadata in the header of every file of an export: a later export may replace it."""


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    source: WeightSource,
    *,
    is_export: bool,
) -> None:
    """Write and sync the tensors in the order of ``shapes``; an export is marked as one. Raises
    CheckpointError when a value is not finite.

    The format is the length of the header (8 bytes, little-endian), the header (JSON, padded to a
    multiple of 8 bytes), and the data without gaps.
    """
    with path.open("wb") as file:
        file.write(_header(shapes, dtype, EXPORTED if is_export else {}))
        for name, shape in shapes.items():
            for block in row_blocks(name, shape):
                out = torch.empty(block.size, dtype=dtype)
                source(block, out)
                _require_finite(path, block, out)
                file.write(out.view(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _header(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, metadata: Mapping[str, str]
) -> bytes:
    content: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for name, shape in shapes.items():
        stop = at + math.prod(shape) * dtype.itemsize
        content[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": (at, stop)}
        at = stop
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def is_exported(path: Path) -> bool:
    """Whether an export wrote this file."""
    try:
        with cast(Any, safe_open(path, framework="pt")) as file:
            return EXPORTED.items() <= (file.metadata() or {}).items()
    except (SafetensorError, OSError):
        return False


def row_blocks(name: str, shape: tuple[int, ...]) -> Iterable[Rectangle]:
    """Yield a whole tensor as rectangles of at most BLOCK_ELEMENTS, but at least one row."""
    rows = max(1, BLOCK_ELEMENTS // math.prod(shape[1:]))
    for row in range(0, shape[0], rows):
        size = (min(rows, shape[0] - row), *shape[1:])
        yield Rectangle(name, shape, (row,) + (0,) * (len(shape) - 1), size, 0)


def _require_finite(path: Path, block: Rectangle, values: Tensor) -> None:
    if not is_finite(values):
        do = (
            "export as bfloat16 or float32"
            if values.dtype == torch.float16
            else "export an earlier checkpoint"
        )
        raise CheckpointError(
            f"{path.name} {block.name}",
            got=f"values beyond {values.dtype}",
            expected="finite values",
            do=do,
        )
