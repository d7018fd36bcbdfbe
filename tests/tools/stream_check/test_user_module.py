"""That layouts of a user's module have no race, and show the waits for which ``engine/shard/`` asks the engine."""

from __future__ import annotations

from functools import cache

import pytest
from tools.stream_check.planted import calls, reason
from tools.stream_check.run import Result, measured, plant, reaching
from tools.stream_check.user_module import user_layouts

SOME = ("shard, one microbatch", "shard, optim, between steps", "shard, any order", "shard, exact offload", "shard, two replicas")


@cache
def result_of(name: str) -> Result:
    return measured(name, user_layouts()[name])


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in SOME else [pytest.mark.long]) for name in user_layouts()])
def test_a_users_module_has_no_race(name: str) -> None:
    found = result_of(name)
    assert found.accesses > 1000 and found.races == ()


@pytest.mark.long
def test_waits_that_are_left_out_in_sharding_are_found() -> None:
    waits = [call for call in calls() if call.file.startswith("megatron_llama/engine/shard/")]
    found = {}
    for call in waits:
        outcome = plant(call, reaching(call, [result_of(name) for name in SOME]), lambda name: user_layouts()[name])
        assert not outcome.is_missed, outcome
        found[call.file.rpartition("/")[2]] = outcome.found is not None
    # A unit that begins, a layer that waits itself, a whole parameter; the last one only looks again.
    assert found == {"accesses.py": True, "passes.py": True, "values.py": True, "backward.py": False}
    assert {call.file.rpartition("/")[2] for call in waits if reason(call)} == {"backward.py"}
