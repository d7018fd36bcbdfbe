"""What ``quickstart`` decides; that it runs, where it is installed, is tested with the wheel in ``tests/tools/test_package.py``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from megatron_llama.cli import main
from megatron_llama.config.parse import parse
from megatron_llama.config.schema import TrainingConfig
from megatron_llama.config.sections import config_sections
from megatron_llama.train.commands.quickstart import GLOBAL_BATCH, RECIPE, next_steps, processes_for

from tests.launcher import ROOT


def test_the_example_is_the_recipe_of_the_package() -> None:
    assert (ROOT / "examples" / "quickstart.yaml").samefile(RECIPE)
    recipe = parse(["--config", str(RECIPE)], config_sections(), aliases={}).get(TrainingConfig)
    assert (recipe.global_batch_size, recipe.micro_batch_size) == (GLOBAL_BATCH, GLOBAL_BATCH)


def test_every_number_of_gpus_is_used_as_far_as_it_can_be() -> None:
    found = {gpus: processes_for(gpus) for gpus in range(17)}
    for gpus, layout in found.items():
        assert layout.count <= (gpus or 2) and layout.count % layout.tensor == 0
        assert GLOBAL_BATCH % (layout.micro_batch * layout.count // layout.tensor) == 0
    assert {gpus: layout.count for gpus, layout in found.items() if layout.count != gpus} == {
        **{0: 2, 3: 2, 5: 4, 6: 4, 7: 4, 9: 8, 10: 8, 11: 8, 12: 8, 13: 8, 14: 8, 15: 8}
    }


@pytest.mark.parametrize("gpus", [0, 8])
def test_its_layouts_are_valid(gpus: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = processes_for(gpus)
    axes = ["--tensor-model-parallel-size", layout.tensor, "--sequence-parallel", "--micro-batch-size", layout.micro_batch]
    words = ["pretrain", "--config", RECIPE, *axes, "--data-path", tmp_path / "docs", "--dry-run", "--world-size", layout.count]
    assert main([str(word) for word in words]) == 0
    said = capsys.readouterr().out
    assert f"\nvalid for {layout.count} process" in said and f"dp {layout.count // layout.tensor}" in said


@pytest.mark.parametrize(
    ("gpus", "where", "begins", "launches"),
    [
        (0, "found", "export OMP_NUM_THREADS=1", "torchrun"),
        (0, "activated", "source {bin}/activate && export OMP_NUM_THREADS=1", "torchrun"),
        (0, "bare", "export OMP_NUM_THREADS=1", "{bin}/python3 -m torch.distributed.run"),
        (2, "found", "# the same run", None),
        (4, "activated", "source {bin}/activate", "torchrun"),
    ],
)
def test_what_comes_next_can_be_typed(
    gpus: int, where: str, begins: str, launches: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a shell that finds this Python, beside an environment that has to be activated, and without one."""
    bin = tmp_path / "env" / "bin"
    bin.mkdir(parents=True)
    for name in ("python", "python3"):
        (bin / name).symlink_to(sys.executable)
    if where == "activated":
        (bin / "activate").touch()
    monkeypatch.setattr(sys, "executable", str(bin / "python3"))
    monkeypatch.setenv("PATH", str(bin) if where == "found" else "/nowhere")
    title, *lines = next_steps(Path("a run"), gpus).splitlines()
    assert title == "Next:" and lines[0].strip().startswith(begins.format(bin=bin))
    commands = [shlex.split(line) for line in lines if "megatron_llama" in line]
    python = [str(bin / "python3")] if where == "bare" else ["python"]
    assert [words[: len(python)] for words in commands if "--nproc-per-node" not in words] == [python] * 3
    launched = [line.strip() for line in lines if "--nproc-per-node" in line]
    assert [line.startswith(f"{(launches or '').format(bin=bin)} --nproc-per-node 4 ") for line in launched] == [True] * bool(launches)
    for words in commands[:1]:  # as far as a parser can see; the wheel's test types them
        at = words.index("pretrain")
        assert words[at + 2 : at + 5] == ["a run/quickstart.yaml", "--data-path", "a run/docs"]


def test_under_a_launcher_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    assert main(["quickstart", "--output", str(tmp_path / "out")]) == 1
    assert "quickstart: got 2 processes, expected one; start quickstart by itself" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["quickstart", "--output", str(tmp_path / "file")]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path}/file: got File exists, expected a folder; give another --output\n"


def test_a_changed_recipe_that_cannot_be_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A recipe that somebody has changed is the one that is read, before processes start, and is left as it is."""
    (tmp_path / "quickstart.yaml").write_text("lr: fast\n")
    (tmp_path / "docs.meta.json").touch()
    assert main(["quickstart", "--output", str(tmp_path)]) == 2
    said = capfd.readouterr()
    assert "== 1 of" not in said.out and "torchrun" not in said.out and "== 4 of" not in said.out
    assert f"{tmp_path}/quickstart.yaml:1 lr: got fast, expected " in said.err
    assert (tmp_path / "quickstart.yaml").read_text() == "lr: fast\n"


@pytest.mark.long
def test_a_step_that_fails_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Here the tokens that an earlier call should have made are not there."""
    (tmp_path / "docs.meta.json").touch()
    assert main(["quickstart", "--output", str(tmp_path)]) == 1
    said = capfd.readouterr()
    assert "== 3 of" in said.out and "== 4 of" not in said.out
    line = "error: quickstart: pretrain: got status 1, expected 0; mend what it said, and start quickstart again: it goes on here\n"
    assert line in said.err


def test_the_environment_is_named_as_it_lies_below_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bin = tmp_path / ".venv" / "bin"
    bin.mkdir(parents=True)
    (bin / "activate").touch()
    monkeypatch.setattr(sys, "executable", str(bin / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(tmp_path)
    assert next_steps(Path("runs/quickstart"), 1).splitlines()[1] == "  source .venv/bin/activate"
