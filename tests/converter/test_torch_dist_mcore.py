"""Models that Megatron-Core has trained and saved come out of its torch_dist folders bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from megatron_llama.launch.launcher import Place
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.checkpoint.model_folders.test_hf import tensors
from tests.converter.converting import convert, hf_folder, identical
from tests.converter.mcore import SHARDINGS, Run, megatron
from tests.harness import Cluster

Saved = list[tuple[dict[str, Tensor], Tensor | None]]


def saved(place: Place, runs: list[Run], samples: list[Tensor], folder: Path) -> Saved:
    """Train and save each run; its weights, on rank 0, and the logits of its model, on the last stage."""
    found = []
    for number, run in enumerate(runs):
        with megatron(place, run) as trainer:
            trainer.train(samples)
            trainer.save(folder / f"{number}")
            found.append((trainer.tensors("weight"), trainer.logits(samples[0][:, :-1])))
    return found


@pytest.mark.long
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_what_megatron_core_saves_becomes_its_model(cluster: Cluster, tmp_path: Path, tp: int, pp: int) -> None:
    """All three shapes of the optimizer's state, with a vocabulary that is padded, in one layout with a tied head, in another in bf16."""
    source = hf_folder(tmp_path / "hf", tie_word_embeddings=tp < pp)
    torch.manual_seed(1)
    samples = list(torch.randint(0, 300, (2, 2, 33)))
    runs = [Run(source, tp, pp, sharding, bf16=tp > pp) for sharding in SHARDINGS]
    ranks = cluster.run(tp * pp, saved, runs, samples, tmp_path)
    for number, run in enumerate(runs):
        weights, logits = ranks[0][number][0], ranks[-1][number][1]
        assert not identical(weights["model.norm.weight"], tensors(source)["model.norm.weight"])
        folder = convert(tmp_path / f"{number}", tmp_path / f"hf {number}", "--to", "hf")
        found = tensors(folder)
        assert found.keys() == weights.keys()
        assert [name for name in found if not identical(found[name], weights[name])] == []
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        # bf16 rounds what Megatron computes, not what it saves.
        if not run.bf16:
            torch.testing.assert_close(logits, model(samples[0][:, :-1]).logits, rtol=0, atol=1e-4)
