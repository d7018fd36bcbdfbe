"""What `prove --fuzz` has found, each in its smallest form."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from megatron_llama.launch.launcher import Place
from megatron_llama.model.nn.lora import ColumnAdapters
from megatron_llama.prove.given import SECTIONS
from megatron_llama.prove.materials import make_materials
from megatron_llama.prove.pool import WorkerPool
from megatron_llama.prove.proof import prove_case
from megatron_llama.prove.shrink import shrink
from megatron_llama.train.api.common.options import read_options
from torch import Tensor

from tests.harness import Cluster

SMALL: dict[str, object] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300, "seq_length": 16,
}  # fmt: skip
REFUSED: dict[str, dict[str, object]] = {
    "it rolls back to checkpoints that nobody had named": {"on_bad_step": "rollback"},
    "its length is given in passes": {"epochs": 0.5},
    "its columns are selected once an epoch, which became a step": {
        "optimizer_offload": "zenflow",
        "zenflow_select_strategy": "epoch",
        "zenflow_select_interval": "1",
        "train_samples": 96,
    },
}
"""Cases that a user could run, and `prove` refused."""


@pytest.mark.parametrize("what", REFUSED)
def test_what_can_run_can_be_proven(what: str, tmp_path: Path) -> None:
    (case,) = shrink(read_options(None, {**SMALL, **REFUSED[what]}, SECTIONS), 1, 8)
    assert make_materials(case, tmp_path, 3).model.exists()


@pytest.mark.long
def test_both_ends_of_a_pipeline_offload_a_tied_embedding(cluster: Cluster, tmp_path: Path) -> None:
    """One end chose its columns, a collective of the two, and the other had it on the device: both waited for ever."""
    options = {**SMALL, "pipeline_model_parallel_size": 2, "tie_word_embeddings": True}
    options |= {"optimizer_offload": "zenflow", "optimizer_offload_fraction": 0.5, "zenflow_select_strategy": "step"}
    options |= {"zenflow_select_interval": "4", "zenflow_full_warm_up_rounds": 0, "zenflow_update_interval": "1"}
    (case,) = shrink(read_options(None, options, SECTIONS), 2, 8)
    proof = prove_case(cluster, case, tmp_path, 120.0, checks=("one process",), axes=False)
    assert proof.holds, [row for row in proof.rows if not row.holds]


@pytest.mark.long
def test_steps_that_overflow_are_no_difference_and_the_gradients_are_compared(cluster: Cluster, tmp_path: Path) -> None:
    options = {**SMALL, "fp16": True, "initial_loss_scale": 2.0**32, "min_loss_scale": 16.0}
    (case,) = shrink(read_options(None, options, SECTIONS), 1, 8)
    proof = prove_case(cluster, case, tmp_path, 120.0, checks=("precision", "resume"), steps=2, axes=False)
    assert proof.holds, [row for row in proof.rows if not row.holds]
    (precision, resume) = (check for check in proof.checks if not check.not_run)
    assert "steps 1, 2 overflow" in precision.partly and "--initial-loss-scale 4096" in precision.partly
    assert {(row.what, row.step) for row in precision.rows} >= {("gradient", 1), ("gradient", 2), ("loss", 2), ("unchanged weight", 2)}
    assert any(row.what == "gradient norm" for row in resume.rows), "no number in either run: equal"


LOW_RANK: dict[str, object] = {**SMALL, "fp16": True, "lora_rank": 2, "lr": 1e-3}


@pytest.mark.long
def test_low_rank_additions_in_fp16_hold_and_nothing_else_is_printed(
    cluster: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    """Frozen weights are kept in fp16, and their sums with the additions are exported in fp32."""
    (case,) = shrink(read_options(None, LOW_RANK, SECTIONS), 1, 8)
    proof = prove_case(cluster, case, tmp_path, 120.0, checks=("transformers", "precision", "export"), steps=2, axes=False)
    assert proof.holds, [row for row in proof.rows if not row.holds]
    compared = [row for row in proof.rows if row.check == "precision" and row.step == 2 and "lora_A" in str(row.tensor)]
    assert {row.what for row in compared} >= {"gradient", "second moment", "update"}
    fine = [row.bound < 0.2 for row in compared if row.what == "gradient"]
    assert sum(fine) > len(fine) / 2, fine
    assert capfd.readouterr() == ("", "") and not recwarn.list, "what libraries say is none of a proof"


def with_half_gradients(place: Place, function: Callable[..., Any], *args: Any) -> Any:
    """Call a job of the pool; the first half of low-rank additions has half its gradient where numbers are no fp32 ones."""
    correct = ColumnAdapters.low

    def low(self: ColumnAdapters, x: Any) -> Tensor:
        found = correct(self, x)
        return found if found.dtype == torch.float32 else found.detach() + (found - found.detach()) * 0.5

    with patch.object(ColumnAdapters, "low", low):
        return function(place, *args)


class Halving:
    """A pool with this fault."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """See WorkerPool."""
        return self._pool.run(world_size, with_half_gradients, function, *args, **options)


@pytest.mark.long
def test_a_first_half_of_additions_that_is_wrong_in_half_precision_alone_is_found(cluster: Cluster, tmp_path: Path) -> None:
    """One process has the fault, too: no rounding that it measures makes a bound of 1."""
    (case,) = shrink(read_options(None, LOW_RANK, SECTIONS), 1, 8)
    pool = cast(WorkerPool, Halving(cluster))
    proof = prove_case(pool, case, tmp_path, 120.0, checks=("precision",), steps=2, axes=False)
    wrong = {(row.what, row.step, str(row.tensor).split(".")[-2]) for row in proof.rows if not row.holds}
    assert ("gradient", 2, "lora_A") in wrong and ("gradient", 2, "lora_B") not in wrong
