"""The optimizer's state of Megatron-Core, as Megatron-Core has it in memory: bit for bit, in every shape and layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron_llama.checkpoint.model_folders.optimizer_state import OptimizerState
from megatron_llama.checkpoint.model_folders.torch_dist.folder import TorchDistFolder
from megatron_llama.converter.torch_dist.optimizer import open_optimizer
from megatron_llama.converter.torch_dist.reader import TorchDistReader
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.errors import CheckpointError
from megatron_llama.launch.launcher import Place
from megatron_llama.model.plan.params import hf_shapes
from torch import Tensor

from tests.converter.converting import hf_folder
from tests.converter.mcore import SHARDINGS, Run, megatron
from tests.harness import Cluster
from tests.torch_twin import drawn

STATES = ("weight", "master", "exp_avg", "exp_avg_sq")


@contextmanager
def small_buckets(elements: int | None) -> Iterator[None]:
    """Megatron cuts its buffers into buckets of about so many elements, as it does where reductions overlap."""
    from megatron.core.distributed import distributed_data_parallel as ddp

    class Buffer(ddp._ParamAndGradBuffer):  # type: ignore[misc]
        def __init__(self, *given: Any) -> None:
            super().__init__(*given[:5], elements, *given[6:])

    with mock.patch.object(ddp, "_ParamAndGradBuffer", Buffer):
        yield


def trained(
    place: Place, runs: Sequence[Run], samples: list[Tensor], folder: Path, bucket: int | None
) -> list[dict[str, dict[str, Tensor]]]:
    """Make some runs: train on the samples and save under ``folder/N``. On rank 0 what all ranks hold then."""
    found = []
    for number, run in enumerate(runs):
        with small_buckets(bucket), megatron(place, run) as trainer:
            trainer.train(samples)
            trainer.save(folder / f"{number}")
            found.append({what: trainer.tensors(what) for what in STATES})
    return found


def assert_same(saved: OptimizerState, reader: TorchDistReader, states: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Whole tensors, and boxes within them that begin anywhere."""
    sources: dict[str, WeightSource] = {"weight": reader, **saved.sources}
    for what, tensors in states.items():
        for name, shape in hf_shapes(reader.model).items():
            expected = tensors[name].float()
            assert torch.equal(drawn(sources[what], name, shape), expected), f"{what} {name}"
            box = Rectangle(name, shape, tuple(n // 3 for n in shape), tuple(n - n // 3 - n // 4 for n in shape), 0)
            if len(shape) == 2:
                box = Rectangle(name, shape, (shape[0] // 3, 0), (shape[0] - shape[0] // 3 - shape[0] // 4, shape[1]), 0)
            out = torch.full(box.size, torch.nan)
            sources[what](box, out)
            ends = zip(box.offset, box.size, strict=True)
            assert torch.equal(out, expected[tuple(slice(at, at + count) for at, count in ends)]), f"{what} {name} {box}"


def check(cluster: Cluster, folder: Path, runs: Sequence[Run], processes: int, bucket: int | None = None) -> None:
    torch.manual_seed(1)
    samples = list(torch.randint(0, 250, (3, runs[0].global_batch_size, runs[0].seq_length + 1)))
    everything = cluster.run(processes, trained, runs, samples, folder, bucket)[0]
    for number, (run, states) in enumerate(zip(runs, everything, strict=True)):
        reader = TorchDistReader(folder / f"{number}", None, 0)
        saved = open_optimizer(reader)
        assert (saved.step, saved.iteration, saved.consumed_samples) == (3, 3, 3 * run.global_batch_size)
        options = saved.config.optimizer
        assert (options.adam_beta1, options.adam_beta2) == run.adam_betas
        assert (options.adam_eps, options.weight_decay, options.clip_grad) == (run.adam_eps, run.weight_decay, run.clip_grad)
        assert_same(saved, reader, states)


@pytest.mark.long
def test_each_shape(cluster: Cluster, tmp_path: Path) -> None:
    model = hf_folder(tmp_path / "hf", vocab_size=250)
    check(cluster, tmp_path / "runs", [Run(model, sharding=sharding) for sharding in SHARDINGS], 1)


@pytest.mark.long
def test_a_deprecated_shape_is_refused_by_name(cluster: Cluster, tmp_path: Path) -> None:
    """Megatron-Core 0.16 still writes it: one object for each model-parallel rank."""
    run = Run(hf_folder(tmp_path / "hf", vocab_size=250), sharding="dp_zero_gather_scatter")
    cluster.run(2, trained, [run], [torch.ones(2, 33, dtype=torch.long)], tmp_path / "runs", None)
    with pytest.raises(CheckpointError, match="got dp_zero_gather_scatter, expected fully_reshardable, dp_reshardable"):
        open_optimizer(TorchDistReader(tmp_path / "runs" / "0", None, 0))


@pytest.mark.long
def test_each_shape_in_each_layout(cluster: Cluster, tmp_path: Path) -> None:
    """Pieces of data ranks, of tensor ranks, layers of stages, the copy of a tied head, masters that are no weights."""
    untied, tied = (hf_folder(tmp_path / f"{tie}", vocab_size=250, tie_word_embeddings=tie) for tie in (False, True))
    layouts = [Run(untied, 2, 1, bf16=True), Run(tied, 1, 2), Run(tied, 2, 2, bf16=True), Run(untied, 1, 1, global_batch_size=4)]
    check(
        cluster, tmp_path / "runs", [replace(run, sharding=sharding, global_batch_size=4) for run in layouts for sharding in SHARDINGS], 4
    )


@pytest.mark.long
def test_buckets_of_every_kind(cluster: Cluster, tmp_path: Path) -> None:
    """Several buckets of a buffer: cut behind a parameter, padded before a tied embedding, which has its own on both stages."""
    untied, tied = (hf_folder(tmp_path / f"{tie}", vocab_size=250, tie_word_embeddings=tie) for tie in (False, True))
    runs = [Run(untied, 1, 1, "dp_reshardable"), Run(tied, 1, 2, "dp_reshardable", bf16=True), Run(tied, 2, 1, "dp_reshardable")]
    check(cluster, tmp_path / "runs", [replace(run, global_batch_size=2) for run in runs], 2, bucket=5000)
    names = TorchDistFolder(tmp_path / "runs" / "1").container.tensors
    assert sum(name.endswith("exp_avg") and ".bucket_idx_" in name for name in names) > 2 * 4
