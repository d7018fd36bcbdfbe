"""The log of a run in two processes against the first steps in one, with the run's own data and weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from types import MappingProxyType

import pytest
from megatron_llama.config.parse import Parsed
from megatron_llama.config.schema import CheckpointConfig
from megatron_llama.launch.launcher import Place
from megatron_llama.prove.case import Case
from megatron_llama.prove.drift import lines
from megatron_llama.prove.first_steps import LEFT_OUT, first_steps
from megatron_llama.prove.given import SECTIONS
from megatron_llama.prove.logs import RunLog, read_log
from megatron_llama.prove.materials import make_materials, parsed_options
from megatron_llama.train.api.common.options import read_options
from megatron_llama.train.api.train import run_training
from megatron_llama.train.setup.deciders import TEXT

from tests.harness import Cluster

OPTIONS: dict[str, object] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 300, "seq_length": 16,
    "tensor_model_parallel_size": 2, "micro_batch_size": 1, "global_batch_size": 4, "lr": 1e-3,
}  # fmt: skip


def train(place: Place, options: Mapping[str, object]) -> None:
    """The user's run."""
    run_training(parsed_options(Case("the user's", options, 2)), TEXT, place=replace(place, joined=True, local_world_size=2))


@pytest.fixture(scope="module")
def mine(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, object], RunLog]:
    """Options of a run, and the log that it has written."""
    folder = tmp_path_factory.mktemp("run")
    materials = make_materials(Case("the user's", OPTIONS, 2), folder, 6)
    saves = {"log_interval": 1, "save_interval": 3, "save": str(folder / "saved")}
    options = {**OPTIONS, **materials.options, **saves, "train_iters": 20, "exit_interval": 6}
    cluster.run(2, train, options)
    return options, read_log(folder / "saved")


def parsed(options: Mapping[str, object], **more: object) -> Parsed:
    return read_options(options, more, SECTIONS)


def test_a_run_that_trained_something_else_is_seen_where_it_parts(cluster: Cluster, mine: tuple[dict[str, object], RunLog]) -> None:
    """A learning rate acts first on the loss of the second step."""
    options, log = mine
    found = first_steps(cluster, parsed(options, lr=1.01e-3), 2, log, seconds=60)
    assert found.verdict == "drift" and found.rises[0].iteration == 2, found


@pytest.mark.long
def test_weights_that_were_drawn_elsewhere_are_not_called_a_drift(cluster: Cluster, mine: tuple[dict[str, object], RunLog]) -> None:
    options, log = mine
    drawn = {name: value for name, value in options.items() if name != "init_from_hf"}
    for every in (1, 2):
        found = first_steps(cluster, parsed(drawn), 2, lines_of(log, range(every, 7, every)), seconds=60)
        assert found.verdict == "cannot say" and "--seed on a GPU" in found.why, every


def lines_of(log: RunLog, steps: Iterable[int]) -> RunLog:
    """A log that has a line for these steps alone."""
    return replace(log, steps=MappingProxyType({step: log.steps[step] for step in steps}))


@pytest.mark.long
def test_one_process_trains_what_the_log_says(cluster: Cluster, mine: tuple[dict[str, object], RunLog]) -> None:
    """Also of a run that would go on from its own folder: what that has now is of later steps than those of the log."""
    options, log = mine
    for load in (None, "auto", str(options["save"])):
        found = first_steps(cluster, parsed(options, load=load), 2, log, seconds=60)
        assert found.verdict == "rounding" and [d.iteration for d in found.differences] == [1, 2, 3, 4, 5, 6], (load, found)
        assert max(abs(d.loss or 0.0) for d in found.differences) < 1e-6 and found.dtype == "fp32"


def test_a_log_that_begins_behind_a_checkpoint(cluster: Cluster, mine: tuple[dict[str, object], RunLog]) -> None:
    options, log = mine
    third = parsed(options, load=f"{options['save']}/iter_0000003", init_from_hf=None)
    found = first_steps(cluster, third, 2, lines_of(log, (4, 5, 6)), seconds=60)
    assert found.verdict == "rounding" and [d.iteration for d in found.differences] == [4, 5, 6], found
    found = first_steps(cluster, third, 2, log, seconds=60)
    assert found.verdict == "cannot say" and "has done 3 steps, and the log begins with step 1" in found.why
    found = first_steps(cluster, third, 2, lines_of(log, (5, 6)), seconds=60)
    assert found.verdict == "cannot say" and "the log has 2 steps; it takes 3" in found.why


def test_options_of_checkpoints_that_do_not_save_say_how_a_run_starts() -> None:
    when = {"save_interval", "save_first_step", "save_retain", "save_retain_interval"}
    saves = {"save", "steal_save", "on_bad_checkpoint", "async_save", "export_hf"} | when
    assert {field.name for field in fields(CheckpointConfig)} & LEFT_OUT == saves


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("more", "seconds", "reason"),
    [
        ({"hidden_size": 2**20, "num_attention_heads": 2**13, "intermediate_size": 2**20, "init_from_hf": None}, 60.0, "one process needs"),
        ({}, 1e-9, "3 steps of this model take about"),
        ({"data_path": ("nowhere",)}, 60.0, "nowhere"),
    ],
)
def test_what_is_not_feasible_is_said(
    cluster: Cluster, mine: tuple[dict[str, object], RunLog], more: Mapping[str, object], seconds: float, reason: str
) -> None:
    options, log = mine
    found = first_steps(cluster, parsed(options, **more), 2, log, seconds=seconds)
    assert found.verdict == "cannot say" and reason in found.why and found.differences == ()
    assert "no step compared" in next(lines(found))
