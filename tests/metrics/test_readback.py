"""Numbers are read as they were when they were sent; on a GPU the host waits for nothing that came later."""

from __future__ import annotations

import time

import pytest
import torch
from megatron_llama.metrics.readback import Readback


def test_numbers_are_those_of_their_moment() -> None:
    loss, norm, skipped = (torch.tensor(1.5, dtype=torch.float64), torch.tensor(0.25), torch.tensor(True))
    found = Readback((loss, norm, skipped))
    for number in (loss, norm):
        number.fill_(7.0)
    assert found.read() == found.read() == [1.5, 0.25, 1.0]


def test_what_is_no_number_is_told() -> None:
    nan, inf = Readback((torch.tensor(float("nan")), torch.tensor(float("-inf")))).read()
    assert nan != nan and inf == float("-inf")


@pytest.mark.gpu
def test_reading_waits_for_what_came_before_only() -> None:
    number = torch.ones((), device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(300_000_000)  # cycles
    begin = time.monotonic()
    found = Readback((number.add_(1.0),))
    sent = time.monotonic() - begin
    torch.cuda._sleep(5_000_000_000)  # the next step
    assert found.read() == [2.0]
    read = time.monotonic() - begin
    torch.cuda.synchronize()
    assert sent < 0.1 and read < 1.5 < time.monotonic() - begin
