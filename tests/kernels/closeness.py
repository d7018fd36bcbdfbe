"""How near kernels come to torch: both are compared with torch in fp64, and a kernel may not be further from that than torch itself is,
but for roundings in another order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Body = Callable[..., Any]


def draw(*shape: int, seed: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def error(found: Tensor, exact: Tensor) -> float:
    """Largest difference, relative to the largest exact value."""
    assert found.shape == exact.shape and found.isfinite().all()
    return float((found.double() - exact.double()).abs().max() / exact.double().abs().max().clamp(min=1e-30))


def as_near_as_torch(kernel: Body, torchs: Body, given: Sequence[Any]) -> None:
    """Both get copies of ``given``; what they return, and the tensors that they may have overwritten, are compared."""
    results = []
    for body, wide in ((kernel, False), (torchs, False), (torchs, True)):
        copies = [_copy(value, wide) for value in given]
        returned = body(*copies)
        returned = returned if isinstance(returned, tuple) else (returned,)
        results.append([value for value in (*returned, *copies) if isinstance(value, Tensor) and value.is_floating_point()])
    for number, (found, plain, exact) in enumerate(zip(*results, strict=True)):
        assert found.dtype is plain.dtype, number
        roundings = 4 if found.device.type == "cpu" else 32  # a device's own exponentials and divisions are approximate
        rounding = roundings * torch.finfo(found.dtype).eps if found.dtype is torch.float32 else torch.finfo(found.dtype).eps / 2
        assert error(found, exact) <= 1.5 * error(plain, exact) + rounding, number


def _copy(value: Any, wide: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    if 0 in value.stride():  # expanded: nobody can write there
        return value.double() if wide else value
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)
    return copy.double() if wide and value.is_floating_point() else copy
