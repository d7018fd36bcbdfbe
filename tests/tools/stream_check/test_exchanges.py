"""An exchange of the sequence for heads runs in the computing stream, which is its order. Beside that stream and not waited for, it races. So
does one message of several for the keys and values of some heads."""

from __future__ import annotations

from typing import Any

import pytest
from megatron_llama.engine.comm import collectives, head_exchange
from megatron_llama.model.nn import context
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


def test_a_gather_that_is_cut_waits_for_each_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two messages only the first is waited for."""
    monkeypatch.setattr(context, "LEAST_MESSAGE", 1)
    assert measured("cp", layouts()["cp"]).races == ()
    start = context.start_all_gather
    started = []

    def first_of_two(*arguments: Any) -> Any:
        full, pending = start(*arguments)
        started.append(pending)
        return full, pending if len(started) % 2 else collectives.DONE

    monkeypatch.setattr(context, "start_all_gather", first_of_two)
    races = measured("cp", layouts()["cp"]).races
    assert races and all("all_gather" in str(race) for race in races)
