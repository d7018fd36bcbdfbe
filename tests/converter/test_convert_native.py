"""A converted native checkpoint: training starts from it, under any layout, with a fresh optimizer."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
from megatron_llama.checkpoint import native
from megatron_llama.checkpoint.model_folders.hf.reader import HFWeights
from megatron_llama.cli import main
from megatron_llama.config.schema import Config, ParallelConfig
from megatron_llama.engine.pieces import shard_pieces, step_counts
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.model.hf import read_hf_config
from megatron_llama.model.llama import build_stages
from megatron_llama.pipeline.build import build_optimizer

from tests.checkpoint.cases import copies, renew_sums, same, state_at
from tests.checkpoint.model_folders.test_hf import tensors
from tests.converter.converting import convert, hf_folder
from tests.e2e.product import contents
from tests.harness import Cluster


def loads_like_the_import(place: Place, hf: Path, checkpoint: Path, tied: bool) -> None:
    """An engine filled from the checkpoint holds what one filled from the folder holds: weights, moments, counts."""
    parallel = ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2 if tied else 1)
    config = Config(model=read_hf_config(hf), parallel=parallel)
    mesh = build_mesh(config, rank=place.rank, world_size=place.world_size, device=torch.device("cpu"))
    imported, resumed = (build_optimizer(config, build_stages(config, mesh).values(), mesh) for _ in range(2))
    imported.load_weights(HFWeights(hf))
    for piece in shard_pieces(resumed):
        for tensor in piece.tensors.values():
            tensor.fill_(7.0)  # what is not read or cleared shows
    assert native.load(checkpoint, resumed, mesh, config.model) == state_at(0)
    found, expected = ({(p.key, p.offset): p.tensor for p in copies(engine)} for engine in (resumed, imported))
    assert same({str(k): v for k, v in found.items()}, {str(k): v for k, v in expected.items()})
    assert {float(count) for count in step_counts(resumed)} == {0.0}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied over two stages"])
def test_training_starts_from_it(cluster: Cluster, tmp_path: Path, tied: bool) -> None:
    hf = hf_folder(tmp_path / "hf", tie_word_embeddings=tied)
    checkpoint = convert(hf, tmp_path / "native", "--to", "native")
    cluster.run(4 if tied else 2, loads_like_the_import, hf, checkpoint, tied)


def test_every_command_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf = hf_folder(tmp_path / "hf", torch.bfloat16)
    checkpoint = convert(hf, tmp_path / "native", "--to", "native")
    assert main(["export", "--load", str(checkpoint), "--output", str(tmp_path / "out")]) == 0
    assert same(tensors(tmp_path / "out"), tensors(hf)) and read_hf_config(tmp_path / "out") == read_hf_config(hf)
    capsys.readouterr()
    assert main(["inspect", "checkpoint", str(checkpoint)]) == 0
    assert re.search(r"^iteration +0$", capsys.readouterr().out, re.M)
    assert main(["inspect", "checkpoint", str(checkpoint), "--verify"]) == 0


def test_an_export_replaces_no_model_of_somebody_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither one of transformers nor a conversion, unless it is asked to; and then the checksums go with the files that they belong to."""
    theirs = hf_folder(tmp_path / "theirs")
    checkpoint = convert(theirs, tmp_path / "native", "--to", "native")
    converted = convert(theirs, tmp_path / "converted", "--to", "hf")
    assert (converted / "SHA256SUMS").is_file()
    for folder in (theirs, converted):
        command = ["export", "--load", str(checkpoint), "--output", str(folder), "--dtype", "bfloat16"]
        before = contents(folder)
        capsys.readouterr()
        assert main(command) == 1 and contents(folder) == before
        said = capsys.readouterr().err
        assert (
            f"{folder}: got a model that no export of this program has written, expected no folder, an empty one or an earlier export; "
            in said
        )
        assert "give another folder; only the command export replaces this one, with --overwrite" in said
        assert main([*command, "--overwrite"]) == 0 and tensors(folder)["lm_head.weight"].dtype == torch.bfloat16
        subprocess.run(["sha256sum", "--check", "--quiet", "--strict", "SHA256SUMS"], cwd=folder, check=True)
        assert main(command) == 0, "an earlier export"
        (folder / "notes.txt").write_text("mine")
        assert main([*command, "--overwrite"]) == 1 and "got a folder with notes.txt" in capsys.readouterr().err


def test_a_trained_checkpoint_says_that_its_optimizer_state_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf = hf_folder(tmp_path / "hf")
    checkpoint = convert(hf, tmp_path / "native", "--to", "native") / "iter_0000000"
    assert "optimizer" not in capsys.readouterr().out
    meta = checkpoint / "meta.json"
    meta.write_text(meta.read_text().replace('"optimizer_step": 0', '"optimizer_step": 5'))
    renew_sums(checkpoint)
    convert(checkpoint, tmp_path / "out", "--to", "meta")
    note = "note: the optimizer state of the source is left out: it does not cross formats\n"
    assert capsys.readouterr().out.startswith(note)
