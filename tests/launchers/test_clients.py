"""The files of examples/launch, read by the clients of their platforms, which say what they would start.

The clients bring hundreds of packages, so they live in an environment of their own (``tests/launchers.sh``), which imports
neither torch nor this package, and every other test shows that nothing needs them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.launchers
ROOT = Path(__file__).parent.parent.parent
LAUNCH = ROOT / "examples" / "launch"
TIMEOUT = 900.0
"""Where other tests use all cores, the processes of Ray itself have little time: 1:10 alone, over five minutes then."""


def unknown(given: Any, kept: Any, path: str = "") -> list[str]:
    """What the file says and the client's own objects do not hold: clients drop names that they do not know."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [
            problem
            for name, value in given.items()
            for problem in (unknown(value, kept[name], f"{path}.{name}") if name in kept else [f"{path}.{name}"])
        ]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [problem for i, (ours, theirs) in enumerate(zip(given, kept, strict=True)) for problem in unknown(ours, theirs, f"{path}[{i}]")]
    return [] if given == kept else [f"{path}: {given!r} became {kept!r}"]


def trainjob() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((LAUNCH / "kubeflow_trainjob.yaml").read_text()))


def check_trainjob(runtime: dict[str, Any], job: dict[str, Any]) -> list[str]:
    from kubeflow_trainer_api import models

    kept = [
        models.TrainerV1alpha1TrainingRuntime.from_dict(runtime).to_dict(),  # type: ignore[union-attr]
        models.TrainerV1alpha1TrainJob.from_dict(job).to_dict(),  # type: ignore[union-attr]
    ]
    return unknown([runtime, job], kept)


def test_trainjob() -> None:
    runtime, job = trainjob()
    assert check_trainjob(runtime, job) == []
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    [replicated] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    # Trainer patches the container `node` of the replicated job `node` that has this label.
    assert replicated["name"] == replicated["template"]["spec"]["template"]["spec"]["containers"][0]["name"] == "node"
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    reserved = {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"}
    assert reserved.isdisjoint(entry["name"] for entry in job["spec"]["trainer"]["env"])


def test_a_trainjob_with_a_name_that_trainer_does_not_know_is_found() -> None:
    runtime, job = trainjob()
    job["spec"]["trainer"]["numProcs"] = 8
    assert check_trainjob(runtime, job) == ["[1].spec.trainer.numProcs"]


def test_pytorchjob() -> None:
    from kubeflow.training import models
    from kubeflow.training.api_client import ApiClient

    given = yaml.safe_load((LAUNCH / "kubeflow_pytorchjob.yaml").read_text())

    class Response:
        data = json.dumps(given)

    client = ApiClient()
    job = client.deserialize(Response, models.KubeflowOrgV1PyTorchJob)
    assert unknown(given, client.sanitize_for_serialization(job)) == []
    assert {spec.restart_policy for spec in job.spec.pytorch_replica_specs.values()} == {"OnFailure"}
    assert [c.name for spec in job.spec.pytorch_replica_specs.values() for c in spec.template.spec.containers] == ["pytorch"] * 2


def test_skypilot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    monkeypatch.chdir(ROOT)
    import sky
    from sky.utils import common_utils, schemas, validator

    given = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    validator.get_schema_validator()(schemas.get_task_schema()).validate(given)
    common_utils.validate_schema(given["resources"], schemas.get_resources_schema(), "resources: ")
    task = sky.Task.from_yaml(str(LAUNCH / "skypilot.yaml"))
    [resources] = task.resources
    assert task.num_nodes == 4 and resources.accelerators == {"H100": 8}
    assert resources.job_recovery["max_restarts_on_errors"] == 10
    known = {"SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_GPUS_PER_NODE", "SKYPILOT_NODE_IPS"}
    from sky.skylet import constants

    assert known <= {value for value in vars(constants).values() if isinstance(value, str)}
    assert all(f"${name}" in task.run for name in known)


def test_what_skypilot_installs_can_be_installed(tmp_path: Path) -> None:
    """Each line of the setup, resolved by pip in an environment that has nothing yet."""
    lines = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())["setup"].splitlines()
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    environ = {**os.environ, "PATH": f"{tmp_path / 'venv' / 'bin'}:{os.environ['PATH']}"}
    for line in lines:
        assert line.startswith("pip install ")
        command = line.replace("pip install", "pip install --quiet --dry-run", 1)
        subprocess.run(["bash", "-c", command], cwd=ROOT, env=environ, check=True, timeout=TIMEOUT)


def test_dstack() -> None:
    from dstack._internal.core.models.configurations import TaskConfiguration, parse_run_configuration

    given = yaml.safe_load((LAUNCH / "task.dstack.yml").read_text())
    task = parse_run_configuration(given)
    assert isinstance(task, TaskConfiguration) and task.nodes == 4 and len(task.commands) == 2
    assert [event.value for event in task.retry.on_events] == ["no-capacity", "interruption", "error"]
    with pytest.raises(Exception, match="node_count"):
        parse_run_configuration({**given, "node_count": 4})


def logged(folder: Path) -> list[dict[str, Any]]:
    path = folder / "log.jsonl"
    text = path.read_text() if path.exists() else ""
    return [entry for line in text.splitlines(keepends=True) if line.endswith("\n") and "lm_loss" in (entry := json.loads(line))]


def command_of(rank: int, folder: Path) -> int:
    """The process of a rank of the run that saves into a folder."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                ours = words[1:4] == [b"-u", b"-m", b"megatron_llama"] and str(folder).encode() in words
                if ours and f"RANK={rank}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    return int(entry.name)
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    raise AssertionError(f"rank {rank} is not there")


def test_ray_starts_all_workers_again(tmp_path: Path) -> None:
    """Real Ray on this machine: a rank is killed, its worker fails, and the next attempt goes on from the newest checkpoint."""
    python = os.environ["PYTHON"]
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": page}) + "\n" for page in [(ROOT / "README.md").read_text()] * 4))
    data = ["--input", text, "--output-prefix", tmp_path / "data", "--train-tokenizer", "--vocab-size", 400]
    subprocess.run([python, "-m", "megatron_llama", "preprocess", *map(str, data)], env=environ, cwd=ROOT, check=True)
    options = {
        **{"hidden-size": 32, "intermediate-size": 64, "num-layers": 2, "num-attention-heads": 4, "seq-length": 32},
        **{"micro-batch-size": 2, "global-batch-size": 4, "train-iters": 60, "lr-decay-iters": 60, "log-interval": 1},
        **{"save-interval": 8, "load": "auto", "data-path": tmp_path / "data", "split": "90,10,0"},
    }
    run = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    folder = tmp_path / "run"
    argv = [sys.executable, str(LAUNCH / "ray_train.py"), "--workers", "2", "--no-gpu", "--storage", str(tmp_path / "ray"), "--"]
    with (tmp_path / "out").open("wb") as out:
        ray = subprocess.Popen([*argv, "pretrain", *run, "--save", str(folder)], env=environ, cwd=ROOT, stdout=out, stderr=out)
        deadline = time.monotonic() + TIMEOUT
        killed = False
        while ray.poll() is None and time.monotonic() < deadline:
            if not killed and len(logged(folder)) >= 20:
                os.kill(command_of(1, folder), signal.SIGKILL)
                killed = True
            time.sleep(0.01)
        if ray.poll() is None:
            ray.kill()
    said = (tmp_path / "out").read_text(errors="replace")
    assert killed and ray.returncode == 0, said[-5000:]
    taken = [int(number) for number in re.findall(r" iteration +(\d+)/ *60", said)]
    back = [after for before, after in pairwise(taken) if after <= before]
    assert len(back) == 1 and back[0] > 16 and back[0] % 8 == 1, f"goes on behind a checkpoint: {taken}"
    straight = tmp_path / "straight"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    ranks = [
        subprocess.Popen(
            [python, "-m", "megatron_llama", "pretrain", *run, "--save", str(straight)],
            env={**environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    assert [rank.wait(TIMEOUT) for rank in ranks] == [0, 0]
    keys = ("iteration", "lm_loss", "grad_norm")
    assert [[entry[key] for key in keys] for entry in logged(folder)] == [[entry[key] for key in keys] for entry in logged(straight)]
