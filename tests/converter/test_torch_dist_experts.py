"""Models of experts in torch_dist folders: Megatron-Core's own, with its modules on CPUs, are read bit for bit, and it loads and goes on from those
that are written here."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron_llama as ml
import pytest
import torch
from megatron_llama.converter.torch_dist.optimizer import open_optimizer
from megatron_llama.converter.torch_dist.reader import TorchDistReader
from megatron_llama.launch.launcher import Place
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.checkpoint.model_folders.test_hf import tensors
from tests.converter.converting import assert_same, convert, loaded, refusal
from tests.converter.mcore import Run, megatron
from tests.converter.test_convert_families import SIZES, saved
from tests.converter.test_torch_dist_optimizer import STATES, assert_same as assert_same_state
from tests.converter.test_torch_dist_writer import goes_on, options, tokens  # noqa: F401
from tests.e2e.product import state
from tests.harness import Cluster

Capture = pytest.CaptureFixture[str]
SMALL = {**SIZES, "vocab_size": 256, "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {**SMALL, "model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": 4},
    "qwen3_moe": {
        **SMALL, "model_type": "qwen3_moe", "num_hidden_layers": 3, "num_experts": 4, "moe_intermediate_size": 40, "head_dim": 16,
        "mlp_only_layers": [1], "norm_topk_prob": False,
    },
}  # fmt: skip
"""Of the second one layer is dense: each layer has tensors of its own."""
MIXED = [1, 0, 1]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: saved(fields, folder / name) for name, fields in MODELS.items()}


def saves(place: Place, runs: Sequence[Run], samples: list[Tensor], folder: Path) -> list[dict[str, dict[str, Tensor]]]:
    """Train on the samples, where that is possible, and save under ``folder/N``. On rank 0 what all ranks hold then."""
    found = []
    for number, run in enumerate(runs):
        with megatron(place, run) as trainer:
            if run.tp == 1:
                trainer.train(samples)
            trainer.save(folder / f"{number}", weights_only=run.tp > 1)
            found.append({what: trainer.tensors(what) for what in (STATES if run.tp == 1 else STATES[:1])})
    return found


def test_megatrons_folders_are_read(cluster: Cluster, models: dict[str, Path], tmp_path: Path, capsys: Capture) -> None:
    """One optimizer, and one for experts beside the other; in fp32 and bf16; keys of layers, of experts, of halves; names of local modules; experts
    that tensor ranks share. The flat buckets of the distributed optimizer are refused, and their weights are read."""
    mixtral, qwen = Run(models["mixtral"], micro_batch_size=1), Run(models["qwen3_moe"], layer_freq=MIXED)
    runs = [
        mixtral,
        replace(mixtral, ep=2, sharding="fully_reshardable", bf16=True),
        replace(qwen, ep=2),
        replace(qwen, sharding="fully_reshardable", own_norm_key=False),
        replace(mixtral, singleton=True, ep=2),
        replace(qwen, sharding="dp_reshardable", ep=2),
        replace(mixtral, sharding="dp_reshardable"),
        replace(qwen, tp=2, etp=2),
    ]
    torch.manual_seed(1)
    samples = list(torch.randint(0, 250, (3, 2, 33)))
    everything = cluster.run(2, saves, runs, samples, tmp_path / "runs")[0]
    for number, (run, states) in enumerate(zip(runs, everything, strict=True)):
        folder = tmp_path / "runs" / f"{number}"
        back = convert(folder, tmp_path / f"{number}", "--to", "hf")
        torch.testing.assert_close(tensors(back), states["weight"], rtol=0, atol=0)
        reader = TorchDistReader(folder, None, 0)
        if run.sharding == "dp_reshardable":
            said = refusal(capsys, folder, tmp_path / "out", "--to", "native")
            assert "expected fully_reshardable, of a model with experts; save it with --dist-ckpt-optim-fully-reshardable" in said
        elif run.tp == 1:
            opened = open_optimizer(reader)
            assert (opened.step, opened.iteration) == (3, 3)
            assert_same_state(opened, reader, states)
