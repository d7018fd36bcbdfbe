"""Models for the tests of conversion, and the command itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_llama.cli import main
from megatron_llama.model.hf import read_hf_config
from torch import Tensor

from tests.checkpoint.model_folders.test_hf import LLAMA3, tensors, written

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
LLAMA31 = LLAMA3 | {"original_max_position_embeddings": 8192}


def hf_folder(folder: Path, dtype: torch.dtype = torch.float32, **fields: Any) -> Path:
    """A small model as transformers saves it, in several files: grouped heads and a vocabulary that needs padding."""
    return written(folder, dtype, max_shard_size="100KB", **{**SIZES, **fields})


def convert(source: Path, target: Path, *words: str) -> Path:
    """Run the command, which has to succeed."""
    assert main(["convert", str(source), str(target), *words]) == 0
    return target


def refusal(capsys: pytest.CaptureFixture[str], source: Path, target: Path, *words: str, status: int = 1) -> str:
    """What the command says when it fails with ``status``; it must not have left anything of its target."""
    before = listing(target)
    capsys.readouterr()
    assert main(["convert", str(source), str(target), *words]) == status
    assert listing(target) == before and not list(target.parent.glob("*.incomplete"))
    return capsys.readouterr().err


def listing(folder: Path) -> dict[str, bytes]:
    """Every file under a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def rank_file(folder: Path, tp: int = 0, pp: int | None = None) -> Path:
    """A file of a Megatron checkpoint."""
    return folder / "release" / f"mp_rank_{tp:02d}{'' if pp is None else f'_{pp:03d}'}" / "model_optim_rng.pt"


def loaded(path: Path) -> Any:
    """A file's content as the program that it is made for loads it."""
    return torch.load(path, weights_only=False)


def config(folder: Path) -> dict[str, Any]:
    """A folder's config.json without what says nothing about the model."""
    content = json.loads((folder / "config.json").read_text())
    return {name: value for name, value in content.items() if name not in ("transformers_version", "pretraining_tp")}


def assert_same(found: Path, expected: Path) -> None:
    """Two HuggingFace folders: every tensor bit for bit, every field of the config that transformers wrote."""
    ours, theirs = tensors(found), tensors(expected)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not identical(ours[name], theirs[name])] == []
    assert config(found) == {**config(found), **config(expected)}


def assert_same_model(found: Path, expected: Path, *, but: tuple[str, ...] = ()) -> None:
    """Two HuggingFace folders: every tensor bit for bit, and every field of the model ``but`` some."""
    ours, theirs = tensors(found), tensors(expected)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not identical(ours[name], theirs[name])] == []
    one, other = (replace(read_hf_config(folder), **dict.fromkeys(but)) for folder in (found, expected))
    assert one == other


def rewrite(path: Path, change: Callable[[Any], object]) -> None:
    """Change the content of a file, as somebody does who knows of the list of checksums."""
    for folder in list(path.parents)[:3]:
        (folder / "SHA256SUMS").unlink(missing_ok=True)
    content = loaded(path)
    change(content)
    torch.save(content, path)


def identical(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
