"""Keepers that are gone, or give no sign."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

from megatron_llama.launch.processes import process_of, this_process
from megatron_llama.launch.signs import SignsOfLife, enter, has_ended
from torch.distributed import HashStore  # type: ignore[attr-defined]


def test_a_process_that_has_ended_is_seen_at_once() -> None:
    store = HashStore()
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = process_of(other.pid)
    assert process is not None
    enter(store, 0, this_process())
    enter(store, 1, process)
    signs = SignsOfLife(store, 0, [0, 1], [0, 1], counts=False)
    assert signs.lost() == []
    other.communicate()
    assert signs.lost() == [1]


def test_a_process_elsewhere_is_lost_when_its_count_stands_still() -> None:
    store, now = HashStore(), [0.0]
    elsewhere = replace(this_process(), boot="another machine", pid=os.getpid())
    assert not has_ended(elsewhere)
    for keeper in range(3):
        enter(store, keeper, elsewhere)

    def signs_of(keeper: int, *, counts: bool) -> SignsOfLife:
        return SignsOfLife(store, keeper, range(3), [keeper], counts=counts, clock=lambda: now[0])

    keepers = [signs_of(0, counts=True), signs_of(1, counts=False), signs_of(2, counts=True)]
    for second in range(100):
        now[0] = second
        for keeper in keepers if second < 30 else keepers[:2]:
            keeper.give()
        assert keepers[0].lost(60.0) == ([2] if second > 29 + 60 else []), second
        assert keepers[1].lost(60.0) == []
