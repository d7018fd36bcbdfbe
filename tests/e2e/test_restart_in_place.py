"""Ranks that begin again in their job: nothing of it is lost, and nothing of it is left."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import pytest
from megatron_llama import train
from megatron_llama.config.megatron_names import MEGATRON
from megatron_llama.config.parse import parse
from megatron_llama.errors import ConfigError
from megatron_llama.launch.keeper import OVER
from megatron_llama.train.commands.common.restarts import plan_of
from megatron_llama.train.commands.pretrain import SECTIONS
from tools.restart_trials import training_process
from torch.distributed import TCPStore

from tests.e2e.product import DP2, ONE, Product, Refuse, assert_same_state, events, exact_curve, steps, words
from tests.e2e.test_launchers import address, end, family
from tests.e2e.test_orphans import SOON, until_trained
from tests.e2e.test_orphans import torchrun as real_torchrun
from tests.e2e.test_restarts import rank_of
from tests.launcher import POLL, TIMEOUT, Run, free_port, quiet_port, torchrun

ITERS = 16
SMALL: Mapping[str, object] = {
    "train_iters": ITERS, "lr_decay_iters": ITERS, "num_layers": 2, "seq_length": 8, "micro_batch_size": 1, "global_batch_size": 6,
    "save_interval": 4, **DP2.options,
}
RESTARTS = {**SMALL, "load": "auto", "max_restarts_in_place": 2}


def until_logged(run: Run, folder: Path, count: int) -> None:
    run.until(lambda: len(steps(folder)) >= count)


def rank_process(run: Run, rank: int) -> int:
    """The process that trains for a rank."""
    found: list[int] = []

    def is_there() -> bool:
        found[:] = [pid for pid in (training_process(run.pids[rank], holds_store=rank == 0),) if pid is not None]
        return bool(found)

    run.until(is_there)
    return found[0]


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def begins_from(folder: Path, other: Path, iteration: int) -> None:
    """Make a folder from which a run goes on that has come so far in another one."""
    checkpoint = f"iter_{iteration:07d}"
    shutil.copytree(other / checkpoint, folder / checkpoint)
    shutil.copy(other / "log.jsonl", folder)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def slurm(processes: int, port: int) -> Callable[[int], dict[str, str]]:
    """What srun says to a task."""
    common = {"SLURM_NTASKS": str(processes), "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_NODEID": "0"}
    common |= {"SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_STEP_TASKS_PER_NODE": str(processes), "MASTER_PORT": str(port)}
    return lambda rank: {**common, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}


@pytest.mark.tries("max_restarts_in_place")
@pytest.mark.parametrize("launched", [torchrun, pytest.param(slurm, marks=pytest.mark.long)])
def test_a_killed_process_is_replaced(launched: Callable[[int, int], Callable[[int], dict[str, str]]], product: Product, tmp_path: Path) -> None:
    """The job goes on with as many ranks from its newest checkpoint, and has the curve of one that was not interrupted."""
    folder, straight = tmp_path / "killed", tmp_path / "straight"
    run = product.launcher.start(product.command(save=folder, **RESTARTS), 2, place=launched(2, free_port()))
    until_logged(run, folder, 6)
    os.kill(rank_process(run, 1), signal.SIGKILL)
    ended = run.wait()
    assert ended.codes == (0, 0), ended.err
    told = re.findall(r" restart 1 of 2 in place: rank 1: was killed by SIGKILL; dp 2 -> 2, 2 of 2 processes train; goes on from iteration (\d+)", ended.out)
    assert len(told) == 1 and int(told[0]) >= 4 and int(told[0]) % 4 == 0
    assert any("restart 1 of 2" in event["words"] for event in events(folder, "fault")), "the page of the run tells it too"
    product.launcher.run(product.command(save=straight, **SMALL), 2).ok()
    assert exact_curve(folder) == exact_curve(straight)
    assert_same_state(folder / f"iter_{ITERS:07d}", straight / f"iter_{ITERS:07d}")


@pytest.mark.long
def test_a_lost_rank_leaves_a_smaller_dp(product: Product, tmp_path: Path) -> None:
    """Of three ranks two go on, with more microbatches. What its keeper has started ends with it."""
    folder, unbroken = tmp_path / "killed", tmp_path / "unbroken"
    run = product.launcher.start(product.command(save=folder, **RESTARTS), 3)
    until_logged(run, folder, 6)
    orphan = rank_process(run, 2)
    os.kill(run.pids[2], signal.SIGKILL)
    ended = run.wait()
    assert ended.codes == (0, 0, -9), ended.err
    [told] = re.findall(r" restart 1 of 2 in place: .*no sign of rank 2; dp 3 -> 2, 2 of 2 processes train; goes on from iteration (\d+)", ended.out)
    assert is_gone(orphan)
    begins_from(unbroken, folder, int(told))
    product.launcher.run(product.command(save=unbroken, load="auto", **SMALL), 2).ok()
    assert exact_curve(folder) == exact_curve(unbroken)
    assert_same_state(folder / f"iter_{ITERS:07d}", unbroken / f"iter_{ITERS:07d}")


@pytest.mark.parametrize("model", [{"model": "qwen3-30b-a3b"}, {"model_type": "mixtral", "num_layers": 2, "num_experts": 6}])
def test_ranks_that_go_on_still_divide_the_experts(model: Mapping[str, object]) -> None:
    """Also those of a preset, which only the run reads."""
    options = {**model, "expert_model_parallel_size": 2, "micro_batch_size": 1, "global_batch_size": 24, "load": "auto", "save": "run", "max_restarts_in_place": 2}
    plan, hybrid = (
        plan_of(parse(words({**options, **more}), SECTIONS, aliases=MEGATRON)) for more in ({}, {"data_parallel_shard_size": 4})
    )
    assert plan is not None and hybrid is not None
    assert [plan.fitting(present) for present in range(1, 9)] == [0, 2, 2, 4, 4, 6, 6, 8] and hybrid.fitting(7) == 4
    assert plan.needs() == "at least 2 processes (tp 1 x cp 1 x pp 1 x ep 2)"


@pytest.mark.long
def test_a_rank_that_is_lost_while_it_starts_is_not_waited_for(product: Product, tmp_path: Path) -> None:
    """The others wait for it to come, and no message of theirs fails; the time for that is ten minutes."""
    folder = tmp_path / "run"
    run = product.launcher.start(product.command(save=folder, **RESTARTS), 3)
    rank_process(run, 2)
    run.signal(signal.SIGKILL, [2])
    ended = run.wait(120.0)
    assert ended.codes == (0, 0, -9), ended.err
    assert " restart 1 of 2 in place: no sign of rank 2; dp 3 -> 2, 2 of 2 processes train; goes on from iteration 0\n" in ended.out
    assert [entry["iteration"] for entry in steps(folder)] == list(range(1, ITERS + 1))


@pytest.mark.long
def test_a_spare_takes_the_place_of_a_faulty_rank(product: Product, tmp_path: Path) -> None:
    """Four ranks came, and three divide the batch: the fourth waits, and then the killed one does."""
    folder, straight = tmp_path / "killed", tmp_path / "straight"
    run = product.launcher.start(product.command(save=folder, **RESTARTS), 4)
    until_logged(run, folder, 6)
    assert training_process(run.pids[3], holds_store=False) is None
    os.kill(rank_process(run, 1), signal.SIGKILL)
    rank_process(run, 3)
    ended = run.wait()
    assert ended.codes == (0,) * 4, ended.err
    assert "dp 3 -> 3, 3 of 4 processes train; " in ended.out
    product.launcher.run(product.command(save=straight, **SMALL), 3).ok()
    assert exact_curve(folder) == exact_curve(straight)


@pytest.mark.long
def test_a_rank_that_stands_still_is_replaced(product: Product, tmp_path: Path) -> None:
    """The watch finds it, and the others kill it."""
    folder = tmp_path / "run"
    options = {**RESTARTS, "distributed_timeout_minutes": 0.1, "save": folder}
    run = product.launcher.start(product.command(**options), 2)
    until_logged(run, folder, 6)
    os.kill(rank_process(run, 1), signal.SIGSTOP)
    ended = run.wait()
    assert ended.codes == (0, 0), ended.err
    assert "rank 1 does not answer" in ended.err and " restart 1 of 2 in place: rank 1: was killed by SIGKILL; " in ended.out
    assert [entry["iteration"] for entry in steps(folder)] == list(range(1, ITERS + 1))


@pytest.mark.long
def test_real_torchrun_sees_nothing_of_it(product: Product, tmp_path: Path) -> None:
    """It holds the store, and its ranks are keepers, which do not end."""
    folder = tmp_path / "run"
    with real_torchrun(tmp_path, 2, ["-m", "megatron_llama", *product.command(save=folder, **RESTARTS)]) as process:
        until_trained(process, folder, 6)
        children = family(rank_of(process.pid, 1))
        os.kill(children[1], signal.SIGKILL)
        deadline = time.monotonic() + TIMEOUT
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL)
        printed = (tmp_path / "torchrun.out").read_text()
        assert process.returncode == 0, printed
    assert " restart 1 of 2 in place: rank 1: was killed by SIGKILL; dp 2 -> 2, " in printed and "exitcode" not in printed
    assert [entry["iteration"] for entry in steps(folder)] == list(range(1, ITERS + 1))


@pytest.mark.long
def test_keepers_end_with_their_launcher(product: Product, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = product.command(**{**RESTARTS, "train_iters": 100_000, "save": folder})
    with real_torchrun(tmp_path, 2, ["-m", "megatron_llama", *command]) as process:
        until_trained(process, folder, 3)
        everything = {pid: os.pidfd_open(pid) for pid in family(process.pid)[1:]}
        assert len(everything) == 4
        process.kill()
        deadline = time.monotonic() + SOON
        for pid, descriptor in everything.items():
            ended = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]
            os.close(descriptor)
            assert ended, f"process {pid} still runs"


@pytest.mark.long
def test_a_machine_of_torchrun_is_lost(product: Product, tmp_path: Path) -> None:
    """The agent of the other one does not notice; its rank goes on alone."""
    folder, port = tmp_path / "run", str(quiet_port())
    nodes = []
    for node in range(2):
        (tmp_path / str(node)).mkdir()
        place = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", address(), "--master-port", port]
        command = [*place, "-m", "megatron_llama", *product.command(save=folder, **RESTARTS)]
        nodes.append(real_torchrun(tmp_path / str(node), 1, command))
    with nodes[0] as kept, nodes[1] as lost:
        until_trained(kept, folder, 6)
        end(lost)
        deadline = time.monotonic() + TIMEOUT
        while not (folder / f"iter_{ITERS:07d}").is_dir() and time.monotonic() < deadline:
            assert kept.poll() is None, (tmp_path / "0/torchrun.out").read_text()
            time.sleep(POLL)
        printed = (tmp_path / "0/torchrun.out").read_text()
    assert "no sign of rank 1; dp 2 -> 1, 1 of 1 processes train; " in printed
    assert [entry["iteration"] for entry in steps(folder)] == list(range(1, ITERS + 1))


@pytest.mark.long
def test_the_loss_of_the_store_ends_the_job(product: Product, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = product.launcher.start(product.command(**{**RESTARTS, "train_iters": 100_000, "save": folder}), 2)
    until_logged(run, folder, 3)
    run.signal(signal.SIGKILL, [0])
    ended = run.wait(SOON)
    assert ended.codes == (-9, 1)
    assert "error on rank 1: the store of --max-restarts-in-place: got no answer, " in ended.err


@pytest.mark.long
def test_one_failure_too_many_ends_the_job_with_all_reasons(product: Product, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = {**RESTARTS, "max_restarts_in_place": 1, "train_iters": 100_000, "save": folder}
    run = product.launcher.start(product.command(**options), 2)
    until_logged(run, folder, 6)
    os.kill(rank_process(run, 1), signal.SIGKILL)
    run.until(lambda: " restart 1 of 1 in place" in run.text())
    os.kill(rank_process(run, 0), signal.SIGKILL)
    ended = run.wait()
    assert 0 not in ended.codes
    reasons = "rank 1: was killed by SIGKILL; rank 0: was killed by SIGKILL"
    assert f"error: the job: got 2 failures with --max-restarts-in-place 1 ({reasons}), expected at least 1 process (" in ended.err


@pytest.mark.long
def test_too_few_ranks_end_the_job(product: Product, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = {**RESTARTS, "tensor_model_parallel_size": 2, "data_parallel_sharding_strategy": None, "reduce_bucket_size": None}
    run = product.launcher.start(product.command(**{**options, "save": folder, "train_iters": 100_000}), 2)
    until_logged(run, folder, 3)
    os.kill(run.pids[1], signal.SIGKILL)
    ended = run.wait()
    assert ended.codes == (1, -9)
    assert "the job: got 1 process at the meeting (" in ended.err and "expected at least 2 processes (tp 2 x cp 1 x pp 1)" in ended.err


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_what_would_come_again_ends_the_job_at_once(processes: int, product: Product, tmp_path: Path) -> None:
    """A loss that is not finite, on all ranks: said once, and nothing begins again."""
    options = {**RESTARTS, "lr": 1e30, "clip_grad": 0, "save": tmp_path / "run"}
    ended = product.launcher.run(product.command(**options), processes)
    assert set(ended.codes) == {1} and "in place" not in "".join(ended.outs)
    assert ended.err.count("error") == 1 and ended.err.startswith("error: gradient norm at iteration 2: got nan, "), ended.err


@pytest.mark.long
def test_a_signal_stops_a_run_that_may_begin_again(product: Product, tmp_path: Path) -> None:
    """Sent to one keeper, as a launcher does: all ranks save and end, and none begins again."""
    folder = tmp_path / "run"
    run = product.launcher.start(product.command(**{**RESTARTS, "train_iters": 100_000, "save": folder}), 2)
    until_logged(run, folder, 3)
    run.signal(signal.SIGTERM, [1])
    ended = run.wait().ok(143)
    last = steps(folder)[-1]["iteration"]
    assert f" stopped by SIGTERM after iteration {last}\n" in ended.out and (folder / f"iter_{last:07d}").is_dir()


@pytest.mark.long
def test_the_store_waits_for_a_keeper_that_is_late(product: Product, tmp_path: Path) -> None:
    """A rank that ends the job closes the meeting at once. Who was on the way to it finds the store and the roster there."""
    port = free_port()
    options = {**RESTARTS, "lr": 1e30, "clip_grad": 0, "save": tmp_path / "run"}
    run = product.launcher.start(product.command(**options), 2, place=torchrun(2, port))
    rank_process(run, 1)
    os.kill(run.pids[1], signal.SIGSTOP)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=TIMEOUT))
    run.until(lambda: any(key.endswith(f"/{OVER}") for key in store.list_keys()))  # the first keeper would go now, and the store with it
    os.kill(run.pids[1], signal.SIGCONT)
    ended = run.wait()
    assert ended.codes == (1, 1) and ended.err.count("error") == 1, ended.err


@pytest.mark.long
def test_one_process_begins_again(product: Product, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = {**RESTARTS, "data_parallel_sharding_strategy": None, "reduce_bucket_size": None, "save": folder}
    run = product.launcher.start(product.command(**options), ONE.processes)
    until_logged(run, folder, 6)
    found = training_process(run.pids[0], holds_store=False)
    assert found is not None
    os.kill(found, signal.SIGKILL)
    assert " restart 1 of 2 in place: rank 0: was killed by SIGKILL; dp 1 -> 1, " in run.wait().ok().out
    assert [entry["iteration"] for entry in steps(folder)] == list(range(1, ITERS + 1))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"load": None}, "--max-restarts-in-place: got no --save with --load auto, "),
        ({"global_batch_size": None}, "--max-restarts-in-place: got no --global-batch-size, "),
        ({"finetune": True}, "--max-restarts-in-place: got --finetune, "),
        (
            {"auto_parallel": True, "data_parallel_sharding_strategy": None, "reduce_bucket_size": None},
            "--max-restarts-in-place: got --auto-parallel, expected a layout whose dp alone may change; ",
        ),
        ({"load_optim": "false"}, "--max-restarts-in-place: got --no-load-optim, "),
    ],
    ids=str,
)
def test_what_cannot_begin_again_is_refused(changes: Mapping[str, object], said: str, product: Product, refuse: Refuse, tmp_path: Path) -> None:
    assert said in refuse(product.command(**{**RESTARTS, "save": tmp_path / "run", **changes}), code=2)


def test_a_program_is_refused(product: Product, tmp_path: Path) -> None:
    """The process that a keeper would replace is the user's program."""
    options = {**RESTARTS, "data_path": str(product.data), "save": str(tmp_path / "run")}
    with pytest.raises(ConfigError, match="max_restarts_in_place: got a run of a program, expected a command, "):
        train(options)
