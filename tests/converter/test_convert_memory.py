"""Peak anonymous memory of a conversion: a few of the largest tensors, whatever the size of the model."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch
from megatron_llama.checkpoint.model_folders.hf.writer import export_hf
from megatron_llama.config.schema import ModelConfig
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.model.plan.params import parameter_count
from torch import Tensor

from tests.checkpoint.model_folders.test_hf import tensors
from tests.converter.torch_dist import arguments, save

MODEL = ModelConfig(
    vocab_size=24_000, hidden_size=768, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=12, num_key_value_heads=12,
    head_dim=64, max_position_embeddings=4096,
)
"""A narrow LLaMA: 159 MB in bfloat16, of which the largest tensor is 37 MB."""
LARGEST = 24_000 * 768 * 2
BOUND = 3 * LARGEST
"""Far below the model, which would not fit twice, nor once with a copy of a rank's file."""
GRID = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")
CHILD = """
import os, sys, threading
from megatron_llama.cli import main
import megatron_llama.converter.convert
import megatron_llama.checkpoint.model_folders.formats, megatron_llama.checkpoint.model_folders.hf.writer, megatron_llama.converter.megatron.writer, megatron_llama.converter.meta.writer, megatron_llama.converter.native.writer, megatron_llama.converter.torch_dist.writer
def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))
def measure(words):
    peaks, over, before = [0], threading.Event(), anonymous()
    def watch():
        while not over.wait(0.002):
            peaks.append(max(peaks.pop(), anonymous()))
    watcher = threading.Thread(target=watch)
    watcher.start()
    status = main(words)
    over.set()
    watcher.join()
    print("peak", peaks[0] - before, flush=True)
    os._exit(status)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        measure(line.split())
    if os.waitpid(child, 0)[1]:
        sys.exit(1)
"""
"""Each conversion in a process of its own, forked where everything is imported."""


def fill(rectangle: Rectangle, out: Tensor) -> None:
    """Values that differ from row to row, without the cost of drawing them."""
    rows = torch.arange(rectangle.offset[0], rectangle.offset[0] + rectangle.size[0]) % 251
    out.copy_(rows.view(-1, *[1] * (out.dim() - 1)).expand(out.shape))


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large") / "hf"
    return export_hf(folder, MODEL, fill, "bfloat16")


def peaks(*conversions: str) -> list[int]:
    """Bytes of anonymous memory that conversions need beyond what the imports do."""
    done = subprocess.run([sys.executable, "-c", CHILD], input="\n".join(conversions), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("peak ")]


def digest_of_tensors(path: Path) -> str:
    """Of everything behind the header, which says of an export that it is one."""
    with path.open("rb") as file:
        file.seek(int.from_bytes(file.read(8), "little"), os.SEEK_CUR)
        return hashlib.file_digest(file, "sha256").hexdigest()


@pytest.mark.long
def test_memory_does_not_grow_with_the_model(hf: Path, tmp_path: Path) -> None:
    assert 0.7 * 2 * parameter_count(MODEL) > BOUND
    forms = {"megatron": GRID, "megatron-llama": GRID[:2], "meta": GRID[:2], "native": (), "torch_dist": GRID[:2]}
    both: list[tuple[str, ...]] = [
        (f"{hf} {tmp_path}/{form} --to {form} --workers 1 {' '.join(words)}", f"{tmp_path}/{form} {tmp_path}/{form}-back --to hf")
        for form, words in forms.items()
    ]
    # The sharded format as Megatron-Core writes it: its chunks are whole matrices.
    fields = json.loads((hf / "config.json").read_text())
    save(tmp_path / "megatron_core", tensors(hf), arguments(fields))
    forms["megatron_core"] = ()
    both.append((f"{tmp_path}/megatron_core {tmp_path}/megatron_core-back --to hf --vocab-size {MODEL.vocab_size}",))
    lines = [f"convert {words}" for words in chain(*both)]
    found = dict(zip(lines, peaks(*lines), strict=True))
    assert [(line, peak) for line, peak in found.items() if peak >= BOUND] == []
    expected = digest_of_tensors(hf / "model.safetensors")
    for form in forms:
        assert digest_of_tensors(tmp_path / f"{form}-back" / "model.safetensors") == expected
        shutil.rmtree(tmp_path / form)
        shutil.rmtree(tmp_path / f"{form}-back")
