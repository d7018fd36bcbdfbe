"""--cuda-graph-scope block, of a whole run. What the graphs compute: ``tests/train/run/test_block_graphs.py``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import megatron_llama as ml
import pytest
from megatron_llama.errors import ConfigError
from megatron_llama.train.setup import graphs as graph_deciders
from megatron_llama.train.setup.deciders import CONFIGURATION
from megatron_llama.train.setup.driver import decide
from megatron_llama.train.setup.processes import imagined_processes

from tests.refused import refused
from tests.train.api.test_setup import drafted
from tests.train.run.rerun_graphs import rerunning

Options = Mapping[str, Any]


@pytest.mark.tries("cuda_graph_scope")
def test_a_run_replays_from_its_second_step_on(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**options, "log_interval": 1}
    plain = ml.train(options, train_iters=3).losses
    monkeypatch.setattr(graph_deciders, "captures", lambda: True)
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    with rerunning() as told:
        assert ml.train(options, train_iters=1, cuda_graph_scope="block").losses == {1: plain[1]} and told == []
        assert ml.train(options, train_iters=3, cuda_graph_scope="block").losses == plain
        assert told[0].startswith("capture") and told[-1] == "replay" and os.environ["NCCL_GRAPH_REGISTER"] == "0"
        told.clear()
        assert ml.train(options, train_iters=3).losses == plain and told == []


def test_a_host_refuses_the_run_and_not_its_plan(options: Options) -> None:
    asked = {**options, "cuda_graph_scope": "block"}
    with pytest.raises(ConfigError) as error:
        decide(drafted(asked), CONFIGURATION)
    assert (refused(error.value).where, refused(error.value).got) == ("--cuda-graph-scope block", "a machine without a GPU")
    there = replace(drafted(asked), processes=imagined_processes(1, 0, are_here=False))
    assert decide(there, CONFIGURATION).missing == (str(error.value),)


def test_a_strategy_that_memory_decides_may_have_graphs(options: Options) -> None:
    asked = {**options, "cuda_graph_scope": "block", "data_parallel_sharding_strategy": "auto"}
    found = decide(replace(drafted(asked), processes=imagined_processes(2, 0, are_here=False)), CONFIGURATION)
    assert found.config.parallel.data_parallel_sharding_strategy == "optim"
