"""What a GPU adds in backward of a lookup: zeros go where nobody waits for them, and no bit depends on it."""

from __future__ import annotations

import torch
from megatron_llama.model.nn.embedding import spread_idle

ROWS, TOKENS, HIDDEN = 50, 900, 8


def test_zeros_are_spread_and_change_no_bit() -> None:
    """Of 900 tokens 800 are idle (of other ranks: -0.0, padding: 0.0), and one of the others has a NaN."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(ROWS, (TOKENS,), generator=generator)
    values = torch.randn(TOKENS, HIDDEN, generator=generator)
    idle = torch.randperm(TOKENS, generator=generator)[:800]
    rows[idle] = 0
    values[idle[:400]], values[idle[400:]] = 0.0, -0.0
    busy = torch.ones(TOKENS, dtype=torch.bool).index_fill_(0, idle, False)
    values[busy.nonzero()[0]] = float("nan")
    begun = torch.randn(ROWS, HIDDEN, generator=generator)
    begun[7] = 0.0
    spread = spread_idle(rows, values, ROWS)
    assert torch.equal(spread[busy], rows[busy])
    assert spread[idle].bincount(minlength=ROWS).max() <= -(-TOKENS // ROWS), "in a row: as few as there can be"
    expected, found = (begun.clone().index_put_((where,), values, accumulate=True) for where in (rows, spread))
    assert torch.equal(expected.view(torch.int32), found.view(torch.int32))
