"""Runs that go on from Megatron-Core's checkpoints: with its masters, moments, counts, learning rates and samples."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import megatron_llama as ml
import numpy as np
import pytest
import torch
from megatron_llama.checkpoint.container import Container
from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.data.indexed import IndexedDatasetWriter
from megatron_llama.engine.mesh import Mesh
from megatron_llama.errors import CheckpointError, DataError
from megatron_llama.launch.launcher import Place
from torch import Tensor

from tests.converter.converting import hf_folder
from tests.converter.mcore import SHARDINGS, Run, megatron, options_of
from tests.data.test_megatron_order import megatron_dataset
from tests.harness import Cluster
from tests.ready import ready_for

pytestmark = pytest.mark.long
VOCAB, SEQ, BATCH, STEPS, SAVED = 256, 32, 4, 6, 3


def six_steps(place: Place, runs: list[Run], samples: list[Tensor], folder: Path) -> list[list[float]]:
    """Train for all steps, and save on the way under ``folder/N``. Returns the losses of each run."""
    found = []
    for number, run in enumerate(runs):
        with megatron(place, run) as trainer:
            before = trainer.train(samples[:SAVED])
            trainer.save(folder / f"{number}")
            found.append(before + trainer.train(samples[SAVED:]))
    return found


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    random = np.random.default_rng(1)
    prefix = tmp_path_factory.mktemp("corpus") / "text"
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for length in random.integers(1, 90, 40):
            writer.add(random.integers(0, VOCAB, length, np.uint16))
    return str(prefix)


def read_by_megatron(corpus: str) -> list[Tensor]:
    """The samples of each step, [batch, sequence + 1], of Megatron's own GPTDataset."""
    samples = megatron_dataset([corpus], "100,0,0", [STEPS * BATCH, 0, 0], SEQ, 1234)
    whole = [torch.cat((sample["tokens"], sample["labels"][-1:])) for sample in (samples[position] for position in range(STEPS * BATCH))]
    return [torch.stack(whole[step * BATCH : (step + 1) * BATCH]) for step in range(STEPS)]


@dataclass(frozen=True)
class Made:
    """What Megatron-Core has done: runs of six steps that were saved after the third."""

    runs: list[Run]
    folders: list[Path]
    losses: list[list[float]]
    corpus: str


def made(cluster: Cluster, folder: Path, corpus: str, runs: list[Run], processes: int) -> Made:
    losses = cluster.run(processes, six_steps, runs, read_by_megatron(corpus), folder)[0]
    return Made(runs, [folder / f"{number}" for number in range(len(runs))], losses, corpus)


@pytest.fixture(scope="module")
def megatron_runs(cluster: Cluster, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A run for each shape of the optimizer's state, in one process."""
    folder = tmp_path_factory.mktemp("megatron")
    run = Run(hf_folder(folder / "hf", vocab_size=VOCAB), train_iters=STEPS, global_batch_size=BATCH, seq_length=SEQ)
    return made(cluster, folder, corpus, [replace(run, sharding=sharding) for sharding in SHARDINGS], 1)


def options(run: Run, corpus: str, **others: Any) -> dict[str, Any]:
    """The options of the run as a user gives them here: what Megatron's launch script has."""
    return options_of(run, corpus, **{"megatron_data_order": True, **others})


def go_on(made: Made, number: int = 0, **others: Any) -> ml.TrainResult:
    return ml.train(options(made.runs[number], made.corpus, **{"load": str(made.folders[number]), **others}))


def test_losses_go_on(megatron_runs: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps 4 to 6 of each run, made here: from Megatron's folder, from a checkpoint of ours that it was converted to, and from
    what that becomes as Megatron's."""
    for number, losses in enumerate(megatron_runs.losses):
        result = go_on(megatron_runs, number)
        assert (result.iteration, result.consumed_samples) == (STEPS, STEPS * BATCH)
        assert [*result.losses] == [4, 5, 6]
        torch.testing.assert_close([*result.losses.values()], losses[SAVED:], rtol=1e-6, atol=0)
        out = capsys.readouterr().out
        assert " Megatron-LM would read sample 12 of 24 next, in its order of --seed 1234 and --seq-length 32\n" in out
        assert "warning: the learning rate" not in out and " was " not in out
        converted = ml.convert(megatron_runs.folders[number], tmp_path / f"{number}", to="native")
        assert converted.notes == () and converted.bytes == 3 * 4 * sum(math.prod(shape) for shape in shapes(converted.target))
        assert go_on(megatron_runs, number, load=str(converted.target)).losses == result.losses
        assert " was " not in capsys.readouterr().out
    back = ml.convert(converted.target, tmp_path / "megatron", to="torch_dist")
    assert go_on(megatron_runs, number, load=str(back.target)).losses == result.losses
    assert " was " not in capsys.readouterr().out


def shapes(folder: Path) -> list[tuple[int, ...]]:
    """Of the weights of a checkpoint of ours."""
    tensors = Container(folder / "iter_0000003").tensors
    return [tensor.shape for name, tensor in tensors.items() if not name.startswith("optimizer.")]


def test_weights_or_position_alone(megatron_runs: Made, capsys: pytest.CaptureFixture[str]) -> None:
    """--finetune begins anew, --no-load-optim goes on with fresh moments: only its first loss is Megatron's."""
    anew = go_on(megatron_runs, finetune=True, train_iters=2)
    assert [*anew.losses] == [1, 2] and anew.consumed_samples == 2 * BATCH
    assert "the run begins at iteration 0\n" in capsys.readouterr().out
    fresh = go_on(megatron_runs, load_optim=False)
    ours, theirs = [*fresh.losses.values()], megatron_runs.losses[0][SAVED:]
    assert [*fresh.losses] == [4, 5, 6]
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=0)
    assert abs(ours[2] - theirs[2]) > 1e-4 * theirs[2]


def test_what_differs_is_said(megatron_runs: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Options of the update and of the samples, each in a line with both values."""
    go_on(megatron_runs, lr=2e-3, adam_beta2=0.999, clip_grad=0.5, train_iters=4, seed=7)
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "warning: --adam-beta2 was 0.95 in the run that goes on, and is 0.999" in lines
    assert "warning: --clip-grad was 1 in the run that goes on, and is 0.5" in lines
    assert any(line.startswith("warning: the learning rate goes on with 0.00037") for line in lines)
    assert "warning: --megatron-data-order: --seed was 1234 and is 7: the samples are others" in lines
    assert "warning: --megatron-data-order: samples of the run was 24 and is 16: the samples are others" in lines
    converted = ml.convert(megatron_runs.folders[0], tmp_path / "native", to="native").target
    go_on(megatron_runs, load=str(converted), train_iters=4)
    assert "warning: --megatron-data-order: the run was one of 24 samples when the checkpoint was saved" in capsys.readouterr().out
    go_on(megatron_runs, megatron_data_order=False)
    said = capsys.readouterr().out
    assert "--seq-length 32: --megatron-data-order reads it; without, the order is another\n" in said


def test_other_samples_are_refused_where_they_have_to_be_the_same(megatron_runs: Made) -> None:
    """Examples of `sft` are no samples of Megatron's run: it goes on only with --on-changed-data continue."""
    config = go_on(megatron_runs).config
    world = Mesh.single().world
    with pytest.raises(DataError, match=r"got other training samples than those of .*, a run of Megatron-LM, expected .* \(--finetune\)"):
        ready_for(config, world, same_data=True)
    assert ready_for(config, world).state == TrainState(SAVED, SAVED * BATCH)


def test_a_run_saves_elsewhere(megatron_runs: Made, tmp_path: Path) -> None:
    """Megatron's folder stays Megatron's; and the run goes on from there once, then from its own checkpoints."""
    with pytest.raises(CheckpointError, match="got weights of another format, expected a folder of its own"):
        go_on(megatron_runs, save=str(megatron_runs.folders[0]))
    save = str(tmp_path / "ours")
    go_on(megatron_runs, save=save, save_interval=1, exit_interval=5)
    with pytest.raises(CheckpointError, match=r"got iter_0000005, expected no checkpoint, since .* is no checkpoint of it"):
        go_on(megatron_runs, save=save)
    rest = go_on(megatron_runs, save=save, load=save)
    torch.testing.assert_close([*rest.losses.values()], megatron_runs.losses[0][5:], rtol=1e-6, atol=0)


def in_a_rank(place: Place, given: dict[str, Any]) -> dict[int, float]:
    return dict(ml.train(given).losses)


def test_every_layout_goes_on_in_another(cluster: Cluster, corpus: str, tmp_path: Path) -> None:
    """Megatron's tp 2 and pp 2 in each shape, with a tied head; here stages with sharded parameters, tensor ranks, and moments on the host."""
    model = hf_folder(tmp_path / "hf", vocab_size=VOCAB, tie_word_embeddings=True)
    run = Run(model, 2, 2, train_iters=STEPS, global_batch_size=BATCH, seq_length=SEQ)
    theirs = made(cluster, tmp_path / "runs", corpus, [replace(run, sharding=sharding) for sharding in SHARDINGS], 4)
    layouts: list[tuple[int, dict[str, Any]]] = [
        (4, {"pipeline_model_parallel_size": 2, "data_parallel_sharding_strategy": "optim_grads_params"}),
        (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        (1, {"optimizer_offload": "exact"}),
    ]
    for folder, losses, (processes, layout) in zip(theirs.folders, theirs.losses, layouts, strict=True):
        for found in cluster.run(processes, in_a_rank, options(run, corpus, load=str(folder), **layout)):
            torch.testing.assert_close([*found.values()], losses[SAVED:], rtol=1e-6, atol=0)
