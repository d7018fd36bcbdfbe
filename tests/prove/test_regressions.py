"""What `prove --fuzz` has found, each in its smallest form."""

from pathlib import Path

import pytest
from megatron_llama.api.common.options import read_options
from megatron_llama.prove.given import SECTIONS
from megatron_llama.prove.materials import make_materials
from megatron_llama.prove.proof import prove_case
from megatron_llama.prove.shrink import shrink

from tests.harness import Cluster

SMALL: dict[str, object] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "seq_length": 16,
}
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
def test_steps_that_overflow_are_no_difference(cluster: Cluster, tmp_path: Path) -> None:
    options = {**SMALL, "fp16": True, "initial_loss_scale": 2.0**32}
    (case,) = shrink(read_options(None, options, SECTIONS), 1, 8)
    proof = prove_case(cluster, case, tmp_path, 120.0, checks=("precision",), steps=2, axes=False)
    assert proof.holds and any(row.what == "skipped steps" for row in proof.rows)
    assert not any(row.what == "gradient" for row in proof.rows), "no step has overflowed: this shows nothing"
