"""What the other tests of this folder hold against Megatron-Core is Megatron-Core: the runs of ``mcore`` compute what transformers does, and
go on from their own checkpoints under another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_llama.launch.launcher import Place
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.converter.converting import hf_folder
from tests.converter.mcore import Run, megatron
from tests.harness import Cluster

STATES = ("weight", "master", "exp_avg", "exp_avg_sq")


def trained(place: Place, run: Run, samples: list[Tensor], folder: Path) -> tuple[Any, ...]:
    with megatron(place, run) as trainer:
        logits = trainer.logits(samples[0][:, :-1])
        before = trainer.train(samples[:2])
        trainer.save(folder)
        return logits, before, {what: trainer.tensors(what) for what in STATES}, trainer.train(samples[2:])


def gone_on(place: Place, run: Run, samples: list[Tensor], folder: Path) -> tuple[Any, ...]:
    with megatron(place, run) as trainer:
        trainer.load(folder)
        return {what: trainer.tensors(what) for what in STATES}, trainer.train(samples[2:])


@pytest.mark.long
def test_a_run_goes_on_under_another_layout(cluster: Cluster, tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", vocab_size=256)
    torch.manual_seed(1)
    samples = list(torch.randint(0, 256, (4, 2, 33)))
    whole = cluster.run(1, trained, Run(source, sharding="dp_reshardable"), samples, tmp_path / "whole")[0]
    *_, (logits, *_) = ranks = cluster.run(4, trained, Run(source, 2, 2, "fully_reshardable"), samples, tmp_path / "run")
    _, before, states, after = ranks[0]
    expected = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)(samples[0][:, :-1]).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close([*before, *after], [*whole[1], *whole[3]], rtol=1e-6, atol=0)
    loaded, losses = cluster.run(1, gone_on, Run(source, 1, 1, "fully_reshardable"), samples, tmp_path / "run")[0]
    torch.testing.assert_close(loaded, states, rtol=0, atol=0)
    torch.testing.assert_close(losses, after, rtol=1e-6, atol=0)
