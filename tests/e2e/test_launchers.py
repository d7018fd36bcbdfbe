"""The files of examples/launch on processes of this machine: started as their platforms start them, with the variables that those set,
killed, and started again by their own policies. Each run goes on from its newest checkpoint and ends with the curve of an unbroken one.
``tests/launchers`` has the platforms' own clients read the files, and real Ray."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from pyroute2 import IPRoute

from tests.e2e.product import VOCAB_SIZE, Product, assert_same_state, exact_curve, steps, words
from tests.e2e.test_restarts import quiet_port
from tests.launcher import LAUNCHERS, ROOT, TIMEOUT

pytestmark = pytest.mark.long
LAUNCH = ROOT / "examples" / "launch"
NODES, ITERS = 2, 60
SMALL: Mapping[str, object] = {
    "hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": VOCAB_SIZE, "seq_length": 32, "global_batch_size": 8, "train_iters": ITERS, "lr_decay_iters": ITERS, "lr_warmup_iters": 0,
    "tensor_model_parallel_size": 1, "sequence_parallel": "false", "split": "90,10,0", "eval_interval": 1000, "save_interval": 8,
    "save_retain": 20, "log_interval": 1,
}


@dataclass(frozen=True)
class Platform:
    """How a platform starts the machines of a file."""

    command: Sequence[str]
    environ: Callable[[int, str], Mapping[str, str]]
    """The variables of a machine, by its number and the port of the job."""
    restarts: int
    """How often it starts what has failed."""
    together: bool
    """Whether it starts all machines again when one fails, or this one alone."""


def address() -> str:
    """An address of this machine that others could reach: the machines of a job refuse 127.0.0.1, which each of them has."""
    with IPRoute() as network:
        [first, *_] = network.get_addr(family=socket.AF_INET, scope=0)
    return str(first.get_attr("IFA_ADDRESS"))


def pet(node: int, port: str) -> dict[str, str]:
    """What Kubeflow says to torchrun."""
    counts = {"PET_NNODES": str(NODES), "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(node)}
    return {**counts, "PET_MASTER_ADDR": address(), "PET_MASTER_PORT": port}


def trainjob() -> Platform:
    """Trainer 2: JobSet makes all pods anew when one has failed."""
    runtime, job = yaml.safe_load_all((LAUNCH / "kubeflow_trainjob.yaml").read_text())
    trainer = job["spec"]["trainer"]
    given = {entry["name"]: entry["value"] for entry in trainer["env"]}
    restarts = runtime["spec"]["template"]["spec"]["failurePolicy"]["maxRestarts"]
    assert any(word.startswith("--max-restarts=") for word in trainer["args"]), "for a rank that dies: see test_restarts.py"
    return Platform([*trainer["command"], *trainer["args"]], lambda node, port: {**given, **pet(node, port)}, restarts, True)


def pytorchjob() -> Platform:
    """The training operator: the kubelet starts a container again that has failed. RANK and WORLD_SIZE are those of pods, and
    not of processes."""
    spec = yaml.safe_load((LAUNCH / "kubeflow_pytorchjob.yaml").read_text())["spec"]
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    [container] = worker["template"]["spec"]["containers"]
    assert worker["restartPolicy"] == "OnFailure"
    given = {entry["name"]: entry["value"] for entry in container["env"]}

    def environ(node: int, port: str) -> dict[str, str]:
        pods = {"RANK": str(node), "WORLD_SIZE": str(NODES), "MASTER_ADDR": address(), "MASTER_PORT": port, "PYTHONUNBUFFERED": "1"}
        return {**given, **pods, **pet(node, port)}

    return Platform([*container["command"], *container["args"]], environ, spec["runPolicy"]["backoffLimit"], False)


def skypilot() -> Platform:
    """A managed job: all machines start again when one has failed."""
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    restarts = task["resources"]["job_recovery"]["max_restarts_on_errors"]

    def environ(node: int, port: str) -> dict[str, str]:
        here = {"SKYPILOT_NUM_NODES": str(NODES), "SKYPILOT_NODE_RANK": str(node), "SKYPILOT_NUM_GPUS_PER_NODE": "1"}
        return {**task["envs"], **here, "SKYPILOT_NODE_IPS": f"{address()}\n{address()}"}

    return Platform(["bash", "-c", task["run"]], environ, restarts, True)


def dstack() -> Platform:
    """A task with ``retry`` on errors: all its jobs start again when one has failed. Its commands are joined in one shell."""
    task = yaml.safe_load((LAUNCH / "task.dstack.yml").read_text())
    assert "error" in task["retry"]["on_events"]
    given = dict(entry.split("=", 1) for entry in task["env"])

    def environ(node: int, port: str) -> dict[str, str]:
        here = {"DSTACK_NODES_NUM": str(NODES), "DSTACK_NODE_RANK": str(node), "DSTACK_GPUS_PER_NODE": "1"}
        return {**given, **here, "DSTACK_MASTER_NODE_IP": address(), "DSTACK_NODES_IPS": f"{address()}\n{address()}"}

    return Platform(["bash", "-c", " && ".join(task["commands"])], environ, 10, True)


def with_options(command: Sequence[str], options: Sequence[str], port: str) -> list[str]:
    """The command of a file with a test's options behind its own, on a port that is free here."""
    if command[0] != "bash":
        return [*command, *options]
    script = command[2].replace("--master-port 29500", f"--master-port {port}").rstrip()
    assert script != command[2].rstrip() and script.endswith("--load auto")
    return ["bash", "-c", f'{script} "$@"', "task", *options]


def family(process: int) -> list[int]:
    """A process and all that came from it: what a container holds."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents.setdefault(int((entry / "stat").read_text().rpartition(")")[2].split()[1]), []).append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError):
                continue
    found = [process]
    for one in found:
        found += parents.get(one, [])
    return found


def end(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL for everything in a container."""
    if process.poll() is None:
        for one in family(process.pid):
            try:
                os.kill(one, signal.SIGKILL)
            except ProcessLookupError:
                continue
    process.wait()


class Machines:
    """The machines of a job."""

    def __init__(self, platform: Platform, options: Sequence[str], folder: Path) -> None:
        self.platform, self.folder, self.port = platform, folder, quiet_port()
        self.options, self.restarted = options, 0
        self.nodes = [self.start(node) for node in range(NODES)]

    def start(self, node: int) -> subprocess.Popen[bytes]:
        clean = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environ = {**clean, "PATH": path, "PYTHONPATH": str(ROOT), **self.platform.environ(node, self.port)}
        with (self.folder / f"{node}.out").open("ab") as out:
            argv = with_options(self.platform.command, self.options, self.port)
            return subprocess.Popen(argv, cwd=ROOT, env=environ, stdout=out, stderr=out, start_new_session=True)

    def keep(self) -> bool:
        """Do what the platform does; whether the job has ended."""
        codes = [process.poll() for process in self.nodes]
        failed = [node for node, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            self.restarted += 1
            assert self.restarted <= self.platform.restarts, self.said()
            again: Sequence[int] = range(NODES) if self.platform.together else failed
            for node in again:
                end(self.nodes[node])
            for node in again:
                self.nodes[node] = self.start(node)
        return codes == [0] * NODES

    def said(self) -> str:
        return "".join((self.folder / f"{node}.out").read_text(errors="replace") for node in range(NODES))

    def close(self) -> None:
        for process in self.nodes:
            end(process)


@pytest.fixture(scope="module")
def straight(product: Product, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody interrupted, by the same configuration."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    options: dict[str, Any] = {**SMALL, "data_path": product.data, "save": folder}
    product.launcher.run(["pretrain", "--config", "examples/llama3_8b_4nodes.yaml", *words(options)], NODES, cwd=ROOT).ok()
    return folder


@pytest.mark.parametrize("platform", [pytorchjob, *(pytest.param(each, marks=pytest.mark.soak) for each in (trainjob, skypilot, dstack))])
def test_a_machine_that_is_killed_starts_again(platform: Callable[[], Platform], product: Product, straight: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    # Checkpoints are written behind the steps: on a busy machine this one is complete long after step 16.
    second = folder / "iter_0000016"
    machines = Machines(platform(), words({**SMALL, "data_path": product.data, "save": folder}), tmp_path)
    deadline, killed = time.monotonic() + TIMEOUT, False
    try:
        while not machines.keep() and time.monotonic() < deadline:
            if not killed and second.is_dir() and len(steps(folder)) >= 20:
                end(machines.nodes[1])
                killed = True
            time.sleep(0.01)
        assert killed and time.monotonic() < deadline, machines.said()
    finally:
        machines.close()
    assert machines.restarted >= 1
    taken = [int(number) for number in re.findall(rf" iteration +(\d+)/ *{ITERS}", machines.said())]
    back = [after for before, after in pairwise(taken) if after <= before]
    assert len(back) == 1 and back[0] > 16 and back[0] % 8 == 1, f"goes on behind a checkpoint: {taken}"
    assert exact_curve(folder) == exact_curve(straight)
    assert_same_state(folder / f"iter_{ITERS:07d}", straight / f"iter_{ITERS:07d}")


def test_an_interrupt_by_dstack_reaches_the_ranks(product: Product, tmp_path: Path) -> None:
    """dstack starts an interactive shell, which hands no interrupt on (Debian's), and interrupts the process that it has started."""
    platform, port, folder = dstack(), quiet_port(), tmp_path / "run"
    options = words({**SMALL, "data_path": product.data, "save": folder, "train_iters": 100_000})
    _, *script = with_options(platform.command, options, port)
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**clean, "PATH": path, "PYTHONPATH": str(ROOT), **platform.environ(0, port), "DSTACK_NODES_NUM": "1"}
    with (tmp_path / "out").open("wb") as out:
        started = subprocess.Popen(
            ["/bin/sh", "-i", *script], cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    try:
        deadline = time.monotonic() + TIMEOUT
        while len(steps(folder)) < 3 and time.monotonic() < deadline:
            assert started.poll() is None, (tmp_path / "out").read_text()
            time.sleep(0.01)
        started.send_signal(signal.SIGINT)
        started.wait(TIMEOUT)
    finally:
        end(started)
    last = steps(folder)[-1]["iteration"]
    assert f" stopped by SIGINT after iteration {last}\n" in (tmp_path / "out").read_text()
    assert (folder / f"iter_{last:07d}").is_dir()
