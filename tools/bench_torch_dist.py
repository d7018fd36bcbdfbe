"""Memory and time of reading Megatron-Core's ``torch_dist``, and those of the way over torch's
``dcp_to_torch``.

python -m tools.bench_torch_dist WORK --preset llama2-13b
python -m tools.bench_torch_dist WORK --preset llama2-13b --layers 1 --other-way

The weights are zeros in holes of sparse files: a source of any size takes no disk. What is
converted does.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, and no other

from megatron_llama.checkpoint.chunks import Region, make_index
from megatron_llama.checkpoint.model_folders.torch_dist.files import BACKEND
from megatron_llama.checkpoint.model_folders.torch_dist.folder import COMMON, VERSIONS
from megatron_llama.checkpoint.storage import WrittenParts, write_index
from megatron_llama.checkpoint.torch_file import TorchFile
from megatron_llama.config.schema import ModelConfig
from megatron_llama.converter.megatron.args import make_args
from megatron_llama.converter.megatron.names import TE, file_tensors, partition_of, their_name
from megatron_llama.converter.torch_dist.names import LAYERS
from megatron_llama.model.presets import PRESETS

ROOT = Path(__file__).resolve().parent.parent
BY_ROWS = ("linear_qkv.weight", "linear_fc1.weight", "embeddings.weight", "output_layer.weight")
BY_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
STEP = 2**12
"""Zeros are left out of files in pieces of so many bytes."""


def regions(model: ModelConfig, tp: int, dtype: torch.dtype) -> Iterator[Region]:
    """Yield the chunks of a model that ``tp`` tensor ranks save, without values."""
    layers = model.num_hidden_layers
    padded = replace(model, make_vocab_size_divisible_by=128 * tp)
    partition = partition_of([layers], 1)
    maps = file_tensors(padded, "megatron", partition, 0, tp=1, tp_rank=0, whole_head=False)
    for own, stored in maps.items():
        key = their_name(own, TE, "megatron", tied=model.tie_word_embeddings)
        parts = [1] * len(stored.shape)
        if key.endswith(BY_ROWS):
            # Gate and up projection are chunks of their own.
            parts[0] = 2 * tp if key.endswith("linear_fc1.weight") else tp
        elif key.endswith(BY_COLUMNS):
            parts[1] = tp
        size = tuple(n // part for n, part in zip(stored.shape, parts, strict=True))
        shape = stored.shape
        stack: tuple[int, ...] = ()
        if key.startswith(LAYERS):
            number, leaf = key.removeprefix(LAYERS).split(".", 1)
            key = LAYERS + leaf
            shape = (layers, *shape)
            stack = (int(number),)
        for place in itertools.product(*map(range, parts)):
            offset = stack + tuple(n * at for n, at in zip(size, place, strict=True))
            whole = (*(1 for _ in stack), *size)
            yield Region(key, shape, offset, whole, torch.empty((), dtype=dtype).expand(whole))


@cache
def archive(size: tuple[int, ...], dtype: torch.dtype) -> tuple[int, tuple[tuple[int, bytes], ...]]:
    """Return the length of what ``torch.save`` writes for zeros, and the pieces of it that are
    not zero."""
    stream = io.BytesIO()
    torch.save(torch.zeros(size, dtype=dtype), stream)
    content = stream.getvalue()
    pieces = ((at, content[at : at + STEP]) for at in range(0, len(content), STEP))
    return len(content), tuple((at, piece) for at, piece in pieces if any(piece))


def write_source(folder: Path, model: ModelConfig, tp: int, dtype: torch.dtype) -> None:
    """Write a ``torch_dist`` checkpoint of zeros, the chunks in turn to one file for each rank."""
    folder.mkdir(parents=True)
    chunks = list(regions(model, tp, dtype))
    written = []
    for rank in range(tp):
        name = f"__{rank}_0.distcp"
        places = {}
        with (folder / name).open("wb") as file:
            for chunk in chunks[rank::tp]:
                start = file.tell()
                length, pieces = archive(chunk.size, dtype)
                for at, piece in pieces:
                    file.seek(start + at)
                    file.write(piece)
                file.seek(start + length)
                places[chunk.index] = _StorageInfo(name, start, length)
            file.truncate()
        written.append(WrittenParts(places, {}))
    write_index(folder, make_index([[chunk.write_item() for chunk in chunks]]), written)
    args = make_args(model, "megatron", dtype, tp, [model.num_hidden_layers], TE)
    torch.save({"args": argparse.Namespace(**args), "iteration": 0}, folder / COMMON)
    (folder / BACKEND).write_text(json.dumps(dict(VERSIONS)))


def take_apart(source: Path, folder: Path) -> None:
    """Make ``source`` a checkpoint of one rank of Megatron, as users do by hand."""
    whole = folder / "all.pt"
    dcp_to_torch_save(source, whole)
    model = {}
    for key, tensor in torch.load(whole, mmap=True, weights_only=True).items():
        if key.startswith(LAYERS):
            for number, layer in enumerate(tensor):
                model[f"{LAYERS}{number}.{key.removeprefix(LAYERS)}"] = layer.clone()
        else:
            model[key] = tensor
    args = TorchFile(source / COMMON).content["args"]
    args.tensor_model_parallel_size = 1
    (folder / "release" / "mp_rank_00").mkdir(parents=True)
    content = {"args": args, "checkpoint_version": 3.0, "iteration": 0, "model": model}
    torch.save(content, folder / "release" / "mp_rank_00" / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("release")


def measure(title: str, *words: str | Path) -> None:
    """Run ``python -m`` with these words and print what it took. Exits when it fails."""
    start = time.perf_counter()
    command = [sys.executable, "-W", "ignore", "-m", *map(str, words)]
    child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = status
    if status:
        sys.exit(f"{title}: failed")
    peak = usage.ru_maxrss * 1024 / 1e6
    seconds = time.perf_counter() - start
    cpu = usage.ru_utime + usage.ru_stime
    print(
        f"{title}: {peak:,.0f} MB resident, {cpu:.1f} s of processor, {seconds:.1f} s", flush=True
    )


def main(words: list[str] | None = None) -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser("python -m tools.bench_torch_dist", description=__doc__)
    parser.add_argument("work", type=Path, help="folder to make, for everything that is written")
    parser.add_argument("--preset", default="llama2-13b", choices=PRESETS)
    parser.add_argument("--layers", type=int, help="of the model; default: the preset's")
    parser.add_argument("--tp", type=int, default=2, help="tensor ranks that saved it")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--other-way", action="store_true", help="measure dcp_to_torch too")
    parser.add_argument("--step", choices=("source", "apart"), help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    work = options.work
    source = work / "source"
    if options.step == "source":
        model = PRESETS[options.preset]
        model = replace(model, num_hidden_layers=options.layers or model.num_hidden_layers)
        write_source(source, model, options.tp, getattr(torch, options.dtype))
        return
    if options.step == "apart":
        (work / "apart").mkdir()
        take_apart(source, work / "apart")
        return
    # Each step has a process of its own. Linux counts what this one needs as theirs: little.
    again = ("tools.bench_torch_dist", *(sys.argv[1:] if words is None else words), "--step")
    measure("source", *again, "source")
    convert = ("megatron_llama", "convert")
    measure("torch_dist", *convert, source, work / "hf", "--to", "hf")
    if options.other_way:
        measure("dcp_to_torch", *again, "apart")
        measure("megatron", *convert, work / "apart", work / "other", "--to", "hf")


if __name__ == "__main__":
    main()
