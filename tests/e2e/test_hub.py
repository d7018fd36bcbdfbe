"""Names of the hub in the place of folders, with the hub's own client and a server that speaks its routes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.e2e.product import SHAPELESS, TP2, Product, exact_curve, words
from tests.hub_server import Hub, hub
from tests.launcher import Finished, free_port, torchrun

PICKLE = b"no test may fetch this"


@pytest.fixture
def served(exported: Path, tmp_path: Path) -> Iterator[Hub]:
    """The hub, with the model, and what must not be fetched beside it."""
    with hub(tmp_path / "hub") as server:
        files = {path.name: path.read_bytes() for path in exported.iterdir() if path.is_file()}
        weights = json.dumps({"weight_map": {"x": "model.safetensors"}}).encode()
        more = {"pytorch_model.bin": PICKLE, "original/consolidated.00.pth": PICKLE, "consolidated.safetensors": PICKLE}
        server.add("org/tiny", {**files, **more})
        server.add("org/indexed", {**files, **more, "model.safetensors.index.json": weights})
        server.add("org/pickled", {"config.json": files["config.json"], **more})
        yield server


def environ(server: Hub, home: Path, **more: str) -> Mapping[str, str]:
    return {"HF_ENDPOINT": server.url, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **more}


def evaluated(product: Product, where: Mapping[str, str], model: object, **more: object) -> Finished:
    options = {"init_from_hf": model, "data_path": product.data, "seq_length": 32, "eval_iters": 1, **more}
    return product.launcher.run(["evaluate", *words(options)], environ=where)


@pytest.mark.long
def test_a_model_by_its_name(product: Product, exported: Path, served: Hub, tmp_path: Path) -> None:
    """Ranks fetch it once, train as from its folder, and go on without the hub; another revision is another model."""
    home = tmp_path / "home"
    where = environ(served, home)
    options = {"train_iters": 2, **SHAPELESS}
    product.train(TP2, init_from_hf=exported, save=tmp_path / "folder", **options)
    argv = product.command(**TP2.options, **options, init_from_hf="org/tiny", tokenizer_model="org/tiny", save=tmp_path / "name")
    said = product.launcher.run(argv, 2, environ=where)
    assert said.codes == (0, 0), said.err
    assert exact_curve(tmp_path / "name") == exact_curve(tmp_path / "folder")
    commit = served.branches["org/tiny", "main"]
    assert f"--init-from-hf org/tiny: commit {commit}, in {home}" in said.out
    assert served.fetched["model.safetensors"] == 1 and served.fetched["config.json"] == 1
    assert not {"pytorch_model.bin", "original/consolidated.00.pth", "consolidated.safetensors"} & served.fetched.keys()

    loss = [line for line in evaluated(product, where, exported).out.splitlines() if "lm loss value" in line]
    served.add("org/tiny", {"config.json": (exported / "config.json").read_bytes()})  # the branch moves on: no weights there
    for model, more in (("org/tiny", {"HF_HUB_OFFLINE": "1"}), (f"org/tiny@{commit}", {})):
        again = evaluated(product, {**where, **more}, model)
        assert again.codes == (0,) and [line for line in again.out.splitlines() if "lm loss value" in line] == loss, again.err
    moved = evaluated(product, where, "org/tiny")
    assert moved.codes == (2,) and "got a snapshot without model.safetensors" in moved.err
    served.fetched.clear()
    assert evaluated(product, where, "org/indexed").codes == (0,)
    assert "consolidated.safetensors" not in served.fetched


@pytest.mark.long
def test_what_cannot_be_fetched(product: Product, exported: Path, served: Hub, tmp_path: Path) -> None:
    """Each is one line that says what to do."""
    served.add("org/gated", {"config.json": b"{}"})
    served.gated.add("org/gated")
    where = environ(served, tmp_path / "home")
    dead = {**where, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "empty")}
    for model, there, got in (
        ("org/none", where, f"got no such path, and no such repository at {served.url}"),
        ("org/gated", where, f"got a gated repository, expected one that you have access to; accept its terms at {served.url}/org/gated"),
        ("org/tiny@v9", where, "got no such revision"),
        ("org/pickled", where, "got a snapshot without model.safetensors"),
        ("org/tiny", {**dead, "HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ("org/tiny", dead, f"got no such path, and not in the cache {tmp_path / 'empty' / 'hub'}; "),
    ):
        said = evaluated(product, there, model)
        [line] = [line for line in said.err.splitlines() if line.startswith("error: ")]
        assert said.codes == (2,) and line.startswith(f"error: --init-from-hf {model}: ") and got in line, said.err
        assert "Traceback" not in said.err
    assert "pytorch_model.bin" not in served.fetched and not (tmp_path / "empty" / "hub" / "models--org--tiny" / "snapshots").exists()
    said = product.launcher.run(product.command(init_from_hf="org/none", **SHAPELESS), 2, environ=where)
    assert set(said.codes) == {2} and "error: --init-from-hf org/none: " in said.errs[0]


def test_a_plan_does_without_weights(product: Product, served: Hub, tmp_path: Path) -> None:
    """A preset has the shapes of a run that is only planned; without one the model's fields are fetched."""
    where = environ(served, tmp_path / "home")
    argv = [
        "pretrain",
        *words(
            {
                "model": "llama-7b", "init_from_hf": "org/tiny", "vocab_size": 32000, "micro_batch_size": 1, "train_iters": 1,
                "data_path": product.data,
            }
        ),
        "--dry-run",
    ]
    said = product.launcher.run(argv, environ=where)
    assert "--init-from-hf: org/tiny is not on this machine" in said.out, said.err
    assert not served.fetched
    said = product.launcher.run(
        ["plan", "--init-from-hf", "org/tiny", "--gpus", "2", "--seq-length", "32", "--global-batch-size", "8"], environ=where
    )
    assert said.codes == (0,) and served.fetched["config.json"] == 1 and not served.fetched["model.safetensors"], said.err


def test_a_path_wins_over_a_name(product: Product, exported: Path, served: Hub, tmp_path: Path) -> None:
    """A folder of that name is read, and a path with a mistake in it, beside files that are there, is no name."""
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "tiny").symlink_to(exported)
    where = environ(served, tmp_path / "home", PYTHONPATH=str(Path(__file__).parents[2]))
    options = {"data_path": product.data, "seq_length": 32, "eval_iters": 1}
    for model, code in (("org/tiny", 0), ("org/tinny", 1)):
        said = product.launcher.run(["evaluate", *words({**options, "init_from_hf": model})], environ=where, cwd=tmp_path)
        assert said.codes == (code,), said.err
    assert not served.asked


@pytest.mark.long
def test_names_in_the_api(product: Product, exported: Path, served: Hub, tmp_path: Path) -> None:
    """``load`` and ``save_hf`` take them where they take paths."""
    code = """
import sys, torch, megatron_llama as ml
named, local = ml.load("org/tiny"), ml.load(sys.argv[1])
assert named.keys() == local.keys() and all(torch.equal(named[name], local[name]) for name in local)
ml.save_hf(named, "out", config=sys.argv[1], tokenizer_model="org/tiny")
assert ml.load("out", "trained", device="cpu").tokenizer.vocab_size
"""
    where = {**os.environ, **environ(served, tmp_path / "home"), "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run([sys.executable, "-c", code, str(exported)], cwd=tmp_path, env=where, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert served.fetched["model.safetensors"] == 1


@pytest.mark.long
def test_machines_that_saw_a_branch_at_two_times(product: Product, exported: Path, served: Hub, tmp_path: Path) -> None:
    """Ranks with caches of their own, and two commits in them: refused, as some of the weights would be the other model's."""
    commits = []
    for rank in range(2):
        commits.append(
            served.add(
                "org/moving",
                {path.name: path.read_bytes() + b"\n" * (rank if path.name == "config.json" else 0) for path in exported.iterdir()},
            )
        )
        assert evaluated(product, environ(served, tmp_path / f"home{rank}"), "org/moving").codes == (0,)
    ranks = torchrun(2, free_port())
    argv = product.command(init_from_hf="org/moving", **SHAPELESS)
    said = product.launcher.run(
        argv, 2, environ={"HF_HUB_OFFLINE": "1"}, place=lambda rank: {**ranks(rank), **environ(served, tmp_path / f"home{rank}")}
    )
    assert set(said.codes) == {1}
    first, second = sorted(commits)
    assert f"--init-from-hf: got 2 snapshots, '{first}' and '{second}', expected the same one on all machines; " in said.err
