"""An exchange of the sequence for heads runs in the computing stream, which is its order. Beside that stream and not waited for, it races."""

from __future__ import annotations

from typing import Any

import pytest
from megatron_llama.engine.comm import collectives, head_exchange
from tools.stream_check.layouts import layouts
from tools.stream_check.run import measured


def not_waited_for(*arguments: Any, async_op: bool) -> collectives.Pending:
    collectives.all_to_all(*arguments, async_op=True)
    return collectives.DONE


@pytest.mark.parametrize("name", ["cp by heads, no clipping", "cp by heads of pairs, in a ring"])
def test_an_exchange_that_is_not_waited_for_races(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert measured(name, layouts()[name]).races == ()
    monkeypatch.setattr(head_exchange, "all_to_all", not_waited_for)
    races = measured(name, layouts()[name]).races
    assert races and all("all_to_all" in str(race) or "head_exchange" in str(race) for race in races)
