"""The recipes under examples/: each is a plan that fits the machines it names, and the launchers start, stop and resume runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from megatron_llama.cli import main

from tests.e2e.product import VOCAB_SIZE, Product, column, steps, words
from tests.launcher import ROOT, TIMEOUT, quiet_port

pytestmark = pytest.mark.long
EXAMPLES = ROOT / "examples"

RECIPES = sorted(EXAMPLES.glob("*.yaml"))
GPU_GIB = 80e9 / 2**30
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_a_plan_that_fits(recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """From the root, offline; the only things that are missing are this machine's. On GPUs of 80 GB a tenth is left to spare."""
    monkeypatch.chdir(ROOT)
    name = str(recipe.relative_to(ROOT))
    command = "align" if "align" in name else "sft" if re.search("sft|lora", name) else "pretrain"
    assert main([command, "--config", name, "--dry-run"]) == 0
    said = capsys.readouterr().out
    here = ("--data-path", "--train-data", "devices: ", "memory: ", "--save-interval", "--vocab-size", "--init-from-hf")
    assert [
        line for line in said.splitlines() if line.startswith("warning: ") and not line.startswith(tuple(f"warning: {w}" for w in here))
    ] == []
    needed = [float(sized) for sized in re.findall(r"with the state (\S+) GiB", said)]
    assert all(sized < 0.93 * GPU_GIB for sized in needed)
    assert "###" in recipe.read_text(), "a recipe has commented sections"


@pytest.mark.parametrize(
    "recipe", [path for path in RECIPES if path.stem != "guide"], ids=lambda path: path.stem
)  # docs/guide starts that one
def test_a_script_starts_each_on_its_machines(recipe: Path) -> None:
    script = recipe.with_suffix(".sh")
    # The command "quickstart" brings its recipe along.
    named = "megatron_llama quickstart " if recipe.stem == "quickstart" else recipe.name
    assert named in script.read_text()
    nodes = re.search(r"^nodes: (\d+)$", recipe.read_text(), re.MULTILINE)
    if nodes is not None and int(nodes[1]) > 1:
        assert f"sbatch --nodes={nodes[1]} " in script.read_text()
    subprocess.run(["bash", "-n", str(script)], check=True)


SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": VOCAB_SIZE, "seq_length": 32, "micro_batch_size": 2, "global_batch_size": 4, "lr_warmup_iters": 0, "split": "90,10,0",
}


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def test_the_launcher_of_one_machine(product: Product, tmp_path: Path) -> None:
    """A recipe shrunk by options, which win over its file; its paths are relative to where it is started."""
    options = words({**SMALL, "data_path": product.data, "train_iters": 3, "log_interval": 1})
    command = ["bash", str(EXAMPLES / "llama2_7b.sh"), "--train-iters", "7", "--log-interval", "5", *options]
    ended = subprocess.run(command, cwd=tmp_path, env=environment(PROCESSES="1"), capture_output=True, text=True, timeout=TIMEOUT)
    assert ended.returncode == 0, ended.stderr
    assert column(tmp_path / "runs" / "llama2_7b", "iteration") == [1, 2, 3] and " job llama2_7b\n" in ended.stdout
    for name, last, first in (("train-iters", 3, 7), ("log-interval", 1, 5)):
        assert f" --{name} {last} replaces --{name} {first}, which stands before it\n" in ended.stdout


SLURM = {
    "srun": """
while [[ $1 == --* ]]; do shift; done
pids=()
for rank in $(seq 0 $((SLURM_NTASKS - 1))); do SLURM_STEP_ID=0 SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" & pids+=($!); done
echo "${pids[@]}" > "$SCRATCH/pids"
for pid in "${pids[@]}"; do wait "$pid" || exit; done
""",
    "scancel": 'echo "$@" > "$SCRATCH/scancel"; kill -TERM $(cat "$SCRATCH/pids")',
    "scontrol": 'echo "$@" > "$SCRATCH/scontrol"',
}
"""What stands for Slurm's programs: processes of this machine."""


@pytest.mark.parametrize(
    ("words_of_run", "in_place", "options"),
    [
        (["pretrain", "--lr", "1"], None, "--kill-on-bad-exit=1"),
        (["pretrain", "--max-restarts-in-place", "3"], None, "--kill-on-bad-exit=0 --no-kill"),
        (["sft", "--lr=1", "--max-restarts-in-place=3"], None, "--kill-on-bad-exit=0 --no-kill"),
        (["pretrain", "--config", "run.yaml"], "yes", "--kill-on-bad-exit=0 --no-kill"),
        (["pretrain", "--config", "run.yaml"], "no", "--kill-on-bad-exit=1"),
    ],
)
def test_slurm_lets_ranks_go_on_that_begin_again_in_place(words_of_run: list[str], in_place: str | None, options: str, tmp_path: Path) -> None:
    (tmp_path / "srun").write_text('#!/usr/bin/env bash\necho "$@"\nexit 7\n')
    (tmp_path / "srun").chmod(0o755)
    said = {} if in_place is None else {"IN_PLACE": in_place}
    command = ["bash", str(EXAMPLES / "launch" / "slurm.sbatch"), *words_of_run]
    ended = subprocess.run(
        command, env=environment(PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_JOB_ID="7", **said), capture_output=True, text=True, timeout=TIMEOUT
    )
    assert ended.stdout == f"{options} {sys.executable} -u -m megatron_llama {' '.join(words_of_run)}\n" and ended.returncode == 7


def test_a_slurm_job_is_queued_again_behind_a_checkpoint(product: Product, tmp_path: Path) -> None:
    for name, text in SLURM.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (tmp_path / name).chmod(0o755)
    port = quiet_port()
    path = f"{tmp_path}:{os.environ['PATH']}"
    job = {"SLURM_JOB_ID": str(port - 20000), "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "localhost", "WORLD_SIZE": "7"}
    run = {**SMALL, "data_path": product.data, "save": tmp_path / "run", "load": "auto", "log_interval": 1, "lr_decay_iters": 9}
    command = ["bash", str(EXAMPLES / "launch" / "slurm.sbatch"), "pretrain", *words({**run, "train_iters": 10**6})]
    batch = subprocess.Popen(command, env=environment(PATH=path, SCRATCH=str(tmp_path), **job), stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + TIMEOUT
    while not steps(tmp_path / "run"):
        assert batch.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    batch.send_signal(signal.SIGTERM)
    said = batch.communicate(timeout=TIMEOUT)[0]
    assert batch.returncode == 143 and f"queueing job {job['SLURM_JOB_ID']} again" in said
    assert (tmp_path / "scancel").read_text() == f"--signal=TERM {job['SLURM_JOB_ID']}.0\n"
    assert (tmp_path / "scontrol").read_text() == f"requeue {job['SLURM_JOB_ID']}\n"
    last = steps(tmp_path / "run")[-1]["iteration"]
    product.launcher.run(["pretrain", *words({**run, "train_iters": last + 1})]).ok()
    assert column(tmp_path / "run", "iteration") == [*range(1, last + 2)]
