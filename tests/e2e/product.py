"""What the end-to-end tests share: a tiny model's options, and readers of what runs leave behind."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from tests.launcher import Finished, Launcher, Run

VOCAB_SIZE, SEQ_LENGTH, GLOBAL_BATCH_SIZE, ITERS = 512, 32, 8, 6
TINY: Mapping[str, object] = {
    "hidden_size": 64, "intermediate_size": 128, "num_layers": 4, "num_attention_heads": 4, "num_query_groups": 2, "seq_length": SEQ_LENGTH,
    "micro_batch_size": 2, "global_batch_size": GLOBAL_BATCH_SIZE, "train_iters": ITERS, "lr_decay_iters": ITERS, "lr": 3e-3,
    "split": "90,10,0", "log_interval": 1,
}
SHAPELESS: Mapping[str, object] = dict.fromkeys(("hidden_size", "intermediate_size", "num_layers", "num_attention_heads", "num_query_groups"))
"""Changes of TINY that leave the model's shape to the weights with which a run begins."""
EVALUATED: Mapping[str, object] = {"eval_interval": 3, "eval_iters": 2}


@dataclass(frozen=True)
class Layout:
    """How a run is spread."""

    processes: int
    options: Mapping[str, object]


ONE = Layout(1, {})
TP2 = Layout(2, {"tensor_model_parallel_size": 2, "sequence_parallel": True})
PP2 = Layout(2, {"pipeline_model_parallel_size": 2})
DP2 = Layout(2, {"data_parallel_sharding_strategy": "optim_grads", "reduce_bucket_size": 20000})
DP2_PARAMS = Layout(2, {"data_parallel_sharding_strategy": "optim_grads_params"})
HYBRID = Layout(4, {**DP2_PARAMS.options, "data_parallel_shard_size": 2, "param_slots": 3, "grad_slots": 1})
TP2_PP2 = Layout(4, {**TP2.options, **PP2.options})
CP2 = Layout(2, {"context_parallel_size": 2})
CP2_RING = Layout(2, {"context_parallel_size": 2, "cp_comm_type": "ring"})
CP2_A2A = Layout(2, {"context_parallel_size": 2, "cp_comm_type": "a2a"})
ZB_H1 = Layout(2, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-h1"})
ZB_V = Layout(2, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-v"})
INTERLEAVED = Layout(2, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "interleaved", "virtual_pipeline_model_parallel_size": 2})
MIXED = Layout(
    8,
    {
        "tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2, "cp_comm_type": "ring",
        "pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-v", "data_parallel_sharding_strategy": "optim_grads",
    },
)
LAYOUTS: Mapping[str, Layout] = {
    "one": ONE, "tp2 sp": TP2, "dp2 optim_grads": DP2, "dp4 optim_grads_params in shards of 2": HYBRID, "cp2": CP2, "cp2 ring": CP2_RING,
    "cp2 a2a": CP2_A2A,
    "tp2 sp cp2 ring pp2 zb-v optim_grads": MIXED,
}
SPREAD = ("tp2 sp cp2 ring pp2 zb-v optim_grads", "dp4 optim_grads_params in shards of 2")
"""Layouts that together have everything, the first nearly alone. ``tests/parallel`` and ``tests/checkpoint`` compare many more, without
the command line."""


def words(options: Mapping[str, object]) -> list[str]:
    """Options as they are written on a command line. None leaves one out, True writes the flag alone,
    a tuple several words."""
    line = []
    for name, value in options.items():
        if value is not None:
            given = value if isinstance(value, tuple) else () if value is True else (value,)
            line += ["--" + name.replace("_", "-"), *map(str, given)]
    return line


class Refuse(Protocol):
    """The fixture of this name."""

    def __call__(self, argv: Sequence[object], *, code: int, processes: int = 1) -> str:
        """What is said about a command that ends with this exit status, on every rank."""


@dataclass(frozen=True)
class Product:
    """The command line, and the dataset it is tried on."""

    launcher: Launcher
    data: Path
    """Prefix of the dataset."""
    texts: tuple[str, ...]
    """Its documents."""

    def command(self, **changes: object) -> list[str]:
        """The command line of a small training run."""
        return ["pretrain", *words({**TINY, "data_path": self.data, **changes})]

    def start(self, layout: Layout = ONE, **changes: object) -> Run:
        """Start a small training run."""
        return self.launcher.start(self.command(**layout.options, **changes), layout.processes)

    def train(self, layout: Layout = ONE, **changes: object) -> Finished:
        """Run one to its end, which is to be a good one."""
        return self.start(layout, **changes).wait().ok()

    def run(self, *argv: object) -> Finished:
        """Any other command, in one process."""
        return self.launcher.run(argv)


def copy_tokens(source: Path | str, prefix: Path) -> None:
    """Copy a dataset without all that says what its tokens are."""
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{source}{suffix}", f"{prefix}{suffix}")


def copy_dataset(source: Path | str, prefix: Path) -> Path:
    """Copy the files of a dataset without its tokenizer and its sums, so that tokens can be changed on purpose."""
    copy_tokens(source, prefix)
    meta = json.loads(Path(f"{source}.meta.json").read_text())
    meta.pop("sums", None)
    Path(f"{prefix}.meta.json").write_text(json.dumps(meta))
    return prefix


def log(folder: Path) -> list[dict[str, Any]]:
    """Complete lines of a run's log.jsonl; none before it is there."""
    path = folder / "log.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def steps(folder: Path) -> list[dict[str, Any]]:
    """Those of training steps."""
    return [entry for entry in log(folder) if "lm_loss" in entry]


def column(folder: Path, name: str) -> list[Any]:
    """One column of the steps."""
    return [entry[name] for entry in steps(folder)]


def checkpoints(folder: Path) -> list[int]:
    """The iterations of a run's checkpoints that are whole."""
    return sorted(int(path.name.removeprefix("iter_")) for path in folder.glob("iter_*[0-9]"))


def events(folder: Path, what: str) -> list[dict[str, Any]]:
    """What a run has noted of one kind."""
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [entry for entry in lines if entry["event"] == what]


def exact_curve(folder: Path) -> list[tuple[object, ...]]:
    """What must not change by a bit when a run is interrupted, lines of evaluations included."""
    keys = ("iteration", "consumed_samples", "lm_loss", "grad_norm", "learning_rate", "validation_loss", "validation_tokens")
    return [tuple(entry.get(key) for key in keys) for entry in log(folder)]


def assert_same_curve(found: Path, expected: Path) -> None:
    """Equal but for the order of fp32 sums: the loss to 1e-6, the norm of its gradient to 2e-5."""
    assert len(log(found)) == len(log(expected))
    for ours, theirs in zip(log(found), log(expected), strict=True):
        assert ours.keys() == theirs.keys()
        assert (ours["iteration"], ours["consumed_samples"]) == (theirs["iteration"], theirs["consumed_samples"])
        for key, bound in (("lm_loss", 1e-6), ("validation_loss", 1e-6), ("grad_norm", 2e-5), ("learning_rate", 0.0)):
            if key in theirs:
                assert abs(ours[key] - theirs[key]) <= bound * theirs[key], (key, ours, theirs)


def state(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, read with torch alone."""
    reader = FileSystemReader(checkpoint)
    entries = reader.read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size) for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def assert_same_state(found: Path, expected: Path) -> None:
    """Bit for bit the same weights and moments."""
    ours, theirs = state(found), state(expected)
    assert ours.keys() == theirs.keys() and len(theirs) > 30
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def contents(folder: Path) -> dict[str, tuple[int, str]]:
    """Every file with its time and hash: equal when nobody touched anything."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files}
