"""The sums of squares of a gradient's blocks."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.closeness import draw, error

pytestmark = pytest.mark.kernels
ALIGN = 64


@pytest.mark.parametrize("count", [0, 1, 63, 64, 1000])
def test_squares(count: int, device: torch.device) -> None:
    """Each to a few roundings, the same to the bit wherever its block stands, and of what is no number no number."""
    from megatron_llama.engine.squares_kernel import squares

    blocks = draw(count, ALIGN, seed=1, device=device) * torch.logspace(-12, 12, ALIGN, device=device)
    if count > 2:
        blocks[1, 3] = float("nan")
        blocks[2, 5] = float("-inf")
    found = squares(blocks)
    assert found.dtype is torch.float32 and found.shape == (count,)
    usual = blocks.isfinite().all(dim=1)
    assert torch.equal(usual, found.isfinite()) and (count < 3 or (found[1].isnan() and found[2] == float("inf")))
    if count:
        exact = blocks[usual].double().square().sum(dim=1)
        assert error(found[usual] / exact, exact / exact) < 8 * torch.finfo(torch.float32).eps
        assert torch.equal(found.nan_to_num(), squares(blocks.flip(0)).flip(0).nan_to_num())
