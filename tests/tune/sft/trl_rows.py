"""What TRL's trainers make of examples: token ids, and which of them are labels.

``rows_of_trl`` asks for them in a process of its own: transformers' Trainer leaves its marks in the environment of the process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.launcher import ROOT

Group = tuple[Sequence[Mapping[str, Any]], int | None]
"""Rows with the same fields, and the length at which they are cut, if they are. With ``prompt`` and ``completion`` they go to SFTTrainer,
with ``chosen`` and ``rejected`` to DPOTrainer, which makes two examples of each, first the chosen one."""


class Labelled(NamedTuple):
    """An example as tokens."""

    ids: list[int]
    labels: list[bool]
    """Whether each token is in the loss."""


def rows_of_trl(folder: Path, tokenizer: Path, groups: Sequence[Group]) -> list[list[Labelled]]:
    """Tokenize the rows of each group."""
    (folder / "job.json").write_text(json.dumps({"tokenizer": str(tokenizer), "groups": groups}))
    environ = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "HF_HOME": str(folder / "home")}
    command = [sys.executable, "-m", "tests.tune.sft.trl_rows", str(folder)]
    ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return [[Labelled(*row) for row in group] for group in json.loads((folder / "found.json").read_text())]


def _main(folder: Path) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    job = json.loads((folder / "job.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(job["tokenizer"])
    tokenizer.pad_token = tokenizer.eos_token
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(str(folder / "model"))
    shared: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": [], "output_dir": str(folder / "out")}
    found: list[list[tuple[list[int], list[bool]]]] = []
    for rows, max_length in job["groups"]:
        options: dict[str, Any] = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}
        if "chosen" in rows[0]:
            made = DPOTrainer(model, args=DPOConfig(max_length=None, **shared), **options).train_dataset
            found.append([_half(row["prompt_ids"], row[name]) for row in made for name in ("chosen_ids", "rejected_ids")])
        else:
            made = SFTTrainer(model, SFTConfig(max_length=max_length, **shared), **options).train_dataset
            found.append([_cut(row["input_ids"], row["labels"], max_length) for row in made])
    (folder / "found.json").write_text(json.dumps(found))


def _half(prompt: list[int], completion: list[int]) -> tuple[list[int], list[bool]]:
    return [*prompt, *completion], [*[False] * len(prompt), *[True] * len(completion)]


def _cut(ids: list[int], labels: list[int], max_length: int | None) -> tuple[list[int], list[bool]]:
    """As the collator of the trainer does."""
    return ids[:max_length], [label != -100 for label in labels[:max_length]]


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
