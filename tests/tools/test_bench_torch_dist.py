"""Both ways from a source of holes write the same model, and what they take is printed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron_llama.checkpoint.model_folders.formats import open_model
from megatron_llama.model.presets import PRESETS
from safetensors.torch import load_file
from tools.bench_torch_dist import main, write_source


@pytest.mark.long
def test_both_ways_end_alike(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    work = tmp_path / "work"
    main([str(work), "--preset", "qwen3-0.6b", "--layers", "2", "--other-way"])
    said = capfd.readouterr().out
    assert re.findall(r"^(\w+): [\d,]+ MB resident, [\d.]+ s of processor, [\d.]+ s$", said, re.M) == [
        "source",
        "torch_dist",
        "dcp_to_torch",
        "megatron",
    ]
    ours, theirs = (work / name / "model.safetensors" for name in ("hf", "other"))
    assert ours.read_bytes() == theirs.read_bytes() and len(load_file(ours)) == 24


def test_a_source_takes_no_disk(tmp_path: Path) -> None:
    sizes = {"vocab_size": 1000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
    model = replace(PRESETS["llama-7b"], num_attention_heads=8, num_key_value_heads=4, head_dim=64, **sizes)
    write_source(tmp_path / "run", model, 2, torch.bfloat16)
    files = list((tmp_path / "run").glob("*.distcp"))
    assert len(files) == 2 and sum(file.stat().st_size for file in files) > 8_000_000 > 8 * sum(
        file.stat().st_blocks * 512 for file in files
    )
    assert open_model(tmp_path / "run").model.hidden_size == 512
