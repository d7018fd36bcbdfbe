"""Both ways from a source of holes write the same model, and what they take is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tools.bench_torch_dist import main


@pytest.mark.long
def test_both_ways_end_alike(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    work = tmp_path / "work"
    main([str(work), "--preset", "qwen3-0.6b", "--layers", "2", "--other-way"])
    said = capfd.readouterr().out
    assert re.findall(r"^(\w+): [\d,]+ MB resident, [\d.]+ s of processor, [\d.]+ s$", said, re.M) == [
        "source", "torch_dist", "dcp_to_torch", "megatron",
    ]
    ours, theirs = (work / name / "model.safetensors" for name in ("hf", "other"))
    assert ours.read_bytes() == theirs.read_bytes() and len(load_file(ours)) == 24
