"""What the search for a dead rank asks of the job's one store, in a job of 16,384 ranks: the watch itself, on a store that counts."""

from __future__ import annotations

import pytest
from megatron_llama.engine.comm.recorder import Recorder
from megatron_llama.launch import watch as watching
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.watch import ALARM, FAILED, STUCK, Watch
from tools.scaling.watch import search
from torch.distributed import HashStore

REQUEST_SECONDS = 21e-6
"""As measured with 512 ranks."""
NAMED_WITHIN = 15.0
DEAD, CALLER = 4711, 300


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [STUCK, FAILED])
def test_the_right_rank_is_named_in_time_at_16384_ranks(kind: str) -> None:
    result = search(16384, kind, dead=DEAD, caller=CALLER)
    assert {(one.reason, one.silent) for one in result.found} == {(f"rank {DEAD} does not answer", (DEAD,))}
    assert result.seconds(REQUEST_SECONDS) < NAMED_WITHIN
    (reader, _), *others = result.requests.most_common()
    assert reader == 0, "the first who asked"
    assert max(count for _, count in others) <= 8, "however many ranks there are"


def test_polls_leave_the_store_most_of_its_time() -> None:
    for world in (8, 1024, 16384):
        watch = Watch(Place(0, world, 0), Recorder())
        assert world * watching.STORE_SECONDS / watch._pace(watching.POLL_SECONDS) <= watching.STORE_SHARE + 1e-9
    assert Watch(Place(0, 8, 0), Recorder())._pace(watching.POLL_SECONDS) == watching.POLL_SECONDS


def test_a_reader_that_dies_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has claimed to read, and nothing came."""
    monkeypatch.setattr(watching, "ANSWER_SECONDS", 0.05)
    store = HashStore()
    store.set(ALARM, f"{FAILED} 1")
    store.compare_set(f"{watching.READER}/0", "", "2")
    watches = [Watch(Place(rank, 3, rank), Recorder()) for rank in range(2)]
    for watch in watches:
        watch._post(store)
        watch._answer(store)
    assert [watch._findings(store).silent for watch in watches] == [(2,), (2,)]
