"""Finds infinite values and NaN in the tensors that a run saves, and in those that it begins with.

Such a value may stand in a row that no token uses, or in a second moment: then the loss of a run
does not show it, and every checkpoint from then on holds it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_llama.checkpoint.chunks import Region, is_state
from megatron_llama.errors import counted

BLOCK = 2**18
"""Elements that are copied and checked together, while the processor's cache holds them: a second
pass over the memory would take twice as long."""
NAMED = 5
"""Tensors that a message names: after a step that went wrong all may be meant."""


@dataclass(frozen=True)
class NotFinite:
    """The values of one saved tensor that are not finite."""

    name: str
    """Key of the tensor in a checkpoint: that of the HuggingFace model, or that of a moment."""
    count: int
    """Number of values that are infinite or NaN."""
    first: tuple[int, ...]
    """Indices of the first of them in the whole tensor."""
    value: str
    """That value: ``nan``, ``inf`` or ``-inf``."""

    @property
    def words(self) -> str:
        """The tensor for a message."""
        return f"{self.name} ({self.place})"

    @property
    def place(self) -> str:
        """The number of these values, and the first of them, in words."""
        indices = ", ".join(map(str, self.first))
        return f"{counted(self.count, 'value')}, the first is {self.value} at [{indices}]"

    def entry(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)


def read_not_finite(entry: Mapping[str, Any]) -> NotFinite:
    """Return the object whose ``entry`` has these fields. Raises KeyError, TypeError or ValueError
    for other fields."""
    first = tuple(int(index) for index in entry["first"])
    return NotFinite(str(entry["name"]), int(entry["count"]), first, str(entry["value"]))


def is_finite(values: Tensor) -> bool:
    """Whether no value is infinite or NaN. ``values`` are floats, on any device."""
    if values.device.type == "cpu" and values.is_contiguous():
        blocks = torch.split(values.view(-1), BLOCK)
        if _all_finite([block.sum(dtype=_sum_dtype(values)) for block in blocks]):
            return True
    # The two ends suffice, and need no mask of the tensor's size: NaN wins in both.
    return not values.numel() or all(bool(end.isfinite()) for end in values.aminmax())


def find_not_finite(region: Region, values: Tensor) -> NotFinite | None:
    """Return the values of the region that are not finite; None if all are finite, or if they are
    no floats but codes of moments in 8 bits. Waits for the device that holds them."""
    if not values.is_floating_point() or is_finite(values):
        return None
    flat = values.reshape(-1)
    odd = flat.isfinite().logical_not()
    place = int(odd.to(torch.uint8).argmax())
    within = torch.unravel_index(torch.tensor(place), region.size)
    first = tuple(start + int(index) for start, index in zip(region.offset, within, strict=True))
    return NotFinite(region.key, int(odd.sum()), first, f"{float(flat[place])}")


def copy_to_host(region: Region) -> tuple[Tensor, NotFinite | None]:
    """Return a contiguous copy of a region's values in the memory of the host, and those of them
    that are not finite."""
    source = region.tensor.detach()
    if source.device.type != "cpu" or not source.is_contiguous() or not source.is_floating_point():
        values = source.to("cpu", copy=True, memory_format=torch.contiguous_format)
        return values, find_not_finite(region, values)
    values = torch.empty_like(source)
    sums = [
        copied.copy_(block).sum(dtype=_sum_dtype(source))
        for copied, block in zip(
            torch.split(values.view(-1), BLOCK), torch.split(source.view(-1), BLOCK), strict=True
        )
    ]
    return values, None if _all_finite(sums) else find_not_finite(region, values)


def _sum_dtype(values: Tensor) -> torch.dtype | None:
    """Return the dtype in which a block is summed; None stands for its own. Half precision would
    overflow in every block."""
    return torch.float32 if values.dtype == torch.float16 else None


def _all_finite(sums: Sequence[Tensor]) -> bool:
    """Whether the sums are finite: then all of their terms are. Finite terms may overflow in a sum,
    so after False the values have to be checked themselves."""
    return not sums or all(map(math.isfinite, torch.stack(list(sums)).tolist()))


def find_all_not_finite(regions: Iterable[Region]) -> tuple[NotFinite, ...]:
    """Return the values that are not finite in these regions, one entry for each saved tensor."""
    blocks = (block for region in regions for block in region.split())
    problems = (find_not_finite(block, block.tensor.detach()) for block in blocks)
    return merge_not_finite(entry for entry in problems if entry is not None)


def merge_not_finite(entries: Iterable[NotFinite]) -> tuple[NotFinite, ...]:
    """Return one entry for each tensor, ordered by name, of entries for its parts."""
    merged: dict[str, NotFinite] = {}
    for entry in entries:
        known = merged.get(entry.name, entry)
        earlier = min(known, entry, key=lambda part: part.first)
        count = entry.count + (known.count if entry.name in merged else 0)
        merged[entry.name] = NotFinite(entry.name, count, earlier.first, earlier.value)
    return tuple(merged[name] for name in sorted(merged))


def describe_not_finite(entries: Sequence[NotFinite]) -> str:
    """Return the tensors in words, the weights first, since moments follow from them."""
    weights_first = sorted(entries, key=lambda entry: (is_state(entry.name), entry.name))
    words = [entry.words for entry in weights_first[:NAMED]]
    if len(entries) > NAMED:
        words.append(counted(len(entries) - NAMED, "more tensor"))
    return ", ".join(words)
