"""A right case holds in every check, with room; what did not run says why; and a run that ends with an error is a finding."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from megatron_llama.checkpoint.checkpoint_dir import checkpoint_path
from megatron_llama.config.schema import Config
from megatron_llama.errors import ConfigError
from megatron_llama.prove.case import Case
from megatron_llama.prove.compare import Row
from megatron_llama.prove.fuzz import finding_of
from megatron_llama.prove.pool import PRINTED_LAST, WorkerError, WorkerPool
from megatron_llama.prove.proof import CHECKS, CheckResult, prove_case, used
from megatron_llama.prove.run import RankRecord

from tests.harness import Cluster

SMALL: dict[str, object] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 200, "seq_length": 24, "micro_batch_size": 1, "global_batch_size": 4, "lr": 1e-3,
}  # fmt: skip
SPREAD: dict[str, object] = {
    "tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2, "bf16": True, "lr_decay_style": "cosine",
    "data_parallel_sharding_strategy": "optim_grads_params", "eval_interval": 2, "eval_iters": 1, "lr_warmup_iters": 1,
    "reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True,
}  # fmt: skip


@pytest.mark.long
def test_a_right_case_holds_in_every_check_with_room(cluster: Cluster, tmp_path: Path) -> None:
    proof = prove_case(cluster, Case("as given", SMALL | SPREAD, 4), tmp_path, 600.0, steps=3)
    assert proof.holds and proof.location is None, proof.location
    assert [check.name for check in proof.checks] == list(CHECKS)
    kinds = {check.name: set(check.worst) for check in proof.checks}
    assert all(kinds.values()), [(check.name, check.not_run) for check in proof.checks]
    numbers = {"loss", "gradient norm", "gradient", "whole gradient"}
    steps = {"learning rate", "second moment", "update"}
    assert kinds["one process"] == numbers | steps | {"validation loss"}
    assert kinds["precision"] == kinds["one process"] | {"skipped steps"}
    assert kinds["transformers"] == numbers
    gradients = {(row.step, row.tensor) for row in proof.checks[0].rows if row.what == "gradient"}
    assert len(gradients) == 3 * (2 * 9 + 3), "of every tensor in every step"
    for row in proof.rows:
        assert used(row) < 0.6, row
    assert [note.option for note in proof.case.notes] == ["--adam-eps"]


def test_without_time_nothing_runs_and_says_so(cluster: Cluster, tmp_path: Path) -> None:
    proof = prove_case(cluster, Case("as given", SMALL, 1), tmp_path, 0.0, checks=("one process", "data"))
    assert not proof.rows and not proof.holds, "nothing was compared"
    reasons = {check.name: check.not_run for check in proof.checks}
    assert "no time is left" in reasons["one process"] and "no time is left" in reasons["data"]
    assert "not asked for" in reasons["export"]
    with pytest.raises(ConfigError, match="num_attention_heads"):
        prove_case(cluster, Case("as given", SMALL | {"tensor_model_parallel_size": 3}, 3), tmp_path, 600.0)


class Failing(WorkerPool):
    """Processes of which one fails in every run with sequence parallelism."""

    def run(
        self, world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 180.0, output: Path | None = None
    ) -> list[Any]:
        """See WorkerPool."""
        if args[0].options.get("sequence_parallel"):
            raise WorkerError("a run failed", {1: "Traceback\n  File\nValueError: 3 is no 4\n" + PRINTED_LAST + "rank1.txt:\n epoch 1"})
        return super().run(world_size, function, *args, timeout=timeout, output=output)


@pytest.mark.long
def test_a_run_that_ends_with_an_error_is_a_finding(tmp_path: Path) -> None:
    case = Case("as given", SMALL | {"tensor_model_parallel_size": 2, "sequence_parallel": True}, 2)
    with Failing() as pool:
        proof = prove_case(pool, case, tmp_path, 600.0, checks=("one process", "data"), steps=2)
    assert not proof.holds
    (row,) = proof.rows
    assert (row.what, row.check, row.note) == ("the run", "one process", "rank 1: ValueError: 3 is no 4") and not row.holds
    assert "as above" in proof.checks[-1].not_run, "it is said once"
    assert proof.location is not None
    assert proof.location.named == ("sequence parallelism", "tensor parallelism") and not proof.location.not_tried


Change = Callable[[list[RankRecord], Path], None]


class Changed:
    """A pool of which every run with the option ``option`` is changed after its end."""

    def __init__(self, pool: WorkerPool, change: Change, option: str) -> None:
        self._pool = pool
        self._change = change
        self._option = option

    def run(self, world_size: int, function: Callable[..., Any], case: Case, *, timeout: float, output: Path) -> list[Any]:
        """See WorkerPool."""
        ranks = self._pool.run(world_size, function, case, timeout=timeout, output=output)
        if case.options.get(self._option):
            self._change(ranks, output.parent)
        return ranks


def ends_early(ranks: list[RankRecord], folder: Path) -> None:
    ranks[0] = replace(ranks[0], steps=ranks[0].steps[:1])


def lacks_a_checkpoint(ranks: list[RankRecord], folder: Path) -> None:
    shutil.rmtree(checkpoint_path(folder / "saved", 1))


def has_a_damaged_checkpoint(ranks: list[RankRecord], folder: Path) -> None:
    for file in checkpoint_path(folder / "saved", 2).glob("*"):
        file.write_bytes(file.read_bytes()[:20])


def is_refused(ranks: list[RankRecord], folder: Path) -> None:
    raise WorkerError("a run failed", {0: "Traceback\nmegatron_llama.errors.ConfigError: --fp64: got True"})


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("change", "option", "said"),
    [
        (ends_early, "lr", "rank 0 has trained the steps 1 instead of 1 to 2"),
        (lacks_a_checkpoint, "lr", "it has not saved the steps 1"),
        pytest.param(
            has_a_damaged_checkpoint, "fp64", "as given, one process: its checkpoint of step 2 cannot be read: ", marks=pytest.mark.long
        ),
        pytest.param(
            is_refused, "fp64", "as given, one process: rank 0: megatron_llama.errors.ConfigError: --fp64: got True", marks=pytest.mark.long
        ),
    ],
    ids=["ends early", "lacks a checkpoint", "has a damaged checkpoint", "is refused"],
)
def test_a_run_that_is_not_what_it_was_asked_for_is_a_finding(
    change: Change, option: str, said: str, cluster: Cluster, tmp_path: Path
) -> None:
    """Whether that of the case, or that of one process in fp64, which is named."""
    pool = cast(WorkerPool, Changed(cluster, change, option))
    said_of: list[str] = []
    case = Case("as given", SMALL, 1)
    proof = prove_case(pool, case, tmp_path, 600.0, checks=("one process",), steps=2, axes=False, say=said_of.append)
    (row,) = proof.rows
    assert row.what == "the run" and row.note.startswith(said) and not proof.holds
    assert proof.location is not None and row.note in proof.location.where
    assert finding_of(proof).verdict == "failed", "the case itself could begin"
    assert said_of[0] == "one process ..." and said_of[1].startswith("one process: DIFFERS, ")


@pytest.mark.long
def test_a_twin_that_is_refused_before_it_runs_is_a_finding(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolved(case: Case) -> Config:
        raise ConfigError("--on-bad-step", got="rollback", expected="a folder", do="give one")

    monkeypatch.setattr("megatron_llama.prove.resume._resolved", resolved)
    proof = prove_case(
        cluster, Case("as given", SMALL | {"train_samples": 8}, 1), tmp_path, 600.0, checks=("reshard",), axes=False, steps=2
    )
    (row,) = proof.rows
    assert row.what == "the run" and "it is refused: --on-bad-step: got rollback" in row.note and not proof.holds


def test_the_worst_of_each_kind_is_that_which_has_used_most_of_its_bound() -> None:
    rows = (
        Row("one process", "loss", 1e-7, 1e-6, 1),
        Row("one process", "loss", 2e-6, 1e-5, 2),
        Row("one process", "gradient", float("nan"), 1e-5, 1, "a"),
        Row("one process", "gradient", 5.0, 1e-5, 1, "b"),
    )
    found = CheckResult("one process", rows, 1.0)
    assert found.worst["loss"] == rows[1] and found.worst["gradient"] == rows[2] and not found.holds
