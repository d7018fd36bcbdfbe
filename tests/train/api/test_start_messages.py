"""What the ranks of an ordinary run tell each other as Python values before their first step: each message costs a job of 16,384 a second."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import megatron_llama as ml
import pytest
import torch.distributed as dist
from megatron_llama.checkpoint import native
from megatron_llama.checkpoint.native import LARGEST_WHOLE_INDEX
from megatron_llama.pipeline.runtime import PipelineRuntime
from megatron_llama.prove.pool import Place

from tests.harness import Cluster

Options = Mapping[str, Any]
BELOW = ("object_collectives.py", "test_start_messages.py", "contextlib.py", "c10d_logger.py")
"""Files of which a message is not named: the next one above has it sent."""


def sender() -> str:
    frame = sys._getframe(2)
    while Path(frame.f_code.co_filename).name in BELOW:
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_code.co_name


def messages(place: Place, options: Options, largest: int = LARGEST_WHOLE_INDEX) -> list[str]:
    """The functions that have sent a message until the first step, in their order. ``largest``: chunks of an index that a save writes whole."""
    sent: list[str] = []
    begun: list[bool] = []

    def recorded(send: Callable[..., Any]) -> Callable[..., Any]:
        def also(*args: Any, **named: Any) -> Any:
            if not begun:
                sent.append(sender())
            return send(*args, **named)

        return also

    step = PipelineRuntime.step

    def first(*args: Any, **named: Any) -> Any:
        begun.append(True)
        return step(*args, **named)

    with ExitStack() as stack:
        for name in ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"):
            stack.enter_context(patch.object(dist, name, recorded(getattr(dist, name))))
        stack.enter_context(patch.object(PipelineRuntime, "step", first))
        stack.enter_context(patch.object(native, "LARGEST_WHOLE_INDEX", largest))
        ml.train(options)
    assert begun
    return sent


START = ["launched_processes", "_apart", "_apart", "open_run"]
"""The devices of all; what rank 0 has decided; whether anyone refuses, and which files each sees; whether rank 0 can write."""


def test_an_ordinary_run_sends_four(cluster: Cluster, options: Options, tmp_path: Path) -> None:
    """It evaluates, saves, and takes its folder."""
    options = {**options, "save": str(tmp_path / "run"), "train_iters": 1}
    assert cluster.run(2, messages, options) == [START] * 2


RESUME = [*START[:3], "load", START[3]]
"""Whether all have read their shards, besides: before that is known rank 0 writes nothing into the folder, so one message cannot say both."""


@pytest.mark.parametrize("largest", [LARGEST_WHOLE_INDEX, 0], ids=["one index", "an index in parts"])
def test_a_run_that_goes_on_sends_five(cluster: Cluster, options: Options, tmp_path: Path, largest: int) -> None:
    """The others have rank 0's findings of the second message: path, meta.json, and the table of an index in parts."""
    options = {**options, "save": str(tmp_path / "run"), "load": "auto"}
    cluster.run(2, messages, {**options, "train_iters": 1}, largest)
    assert bool(list((tmp_path / "run").glob("iter_*/index.json"))) == (not largest)
    assert cluster.run(2, messages, {**options, "train_iters": 2}) == [RESUME] * 2
