"""The real launchers, plans without a run, and looking at files."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from megatron_llama.cli import main
from megatron_llama.metrics.events import FAULT
from megatron_llama.planner.run.folder import read_run

from tests.e2e.product import MIXED, TP2, VOCAB_SIZE, ZB_H1, Product, exact_curve, steps, words
from tests.e2e.test_restarts import rank_of
from tests.launcher import LAUNCHERS, ROOT, TIMEOUT

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def environment() -> dict[str, str]:
    """That of a shell in which the package can be imported."""
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    return environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.mark.long
def test_torchrun_reports_a_refused_run_once(product: Product, straight: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(straight("one"), tmp_path / "run")
    command = [*TORCHRUN, "-m", "megatron_llama", *product.command(save="run")]
    ended = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=TIMEOUT)
    assert ended.returncode == 1
    says = "--save run: got iter_0000006, expected no checkpoint"
    assert ended.stderr.count(f"error: {says}") == 1
    *_, last, border = ended.stderr.splitlines()
    assert last.startswith(f"  traceback : {says}") and set(border) == {"="}, "and it is what torchrun's report ends with"
    assert len(ended.stderr.splitlines()) <= 45, ended.stderr


def torchrun_until_it_trains(product: Product, folder: Path, end: Callable[[int], object]) -> str:
    """Start a run under a real torchrun, call ``end`` with torchrun's process when three steps are done, and give what all have printed."""
    command = [*TORCHRUN, "-m", "megatron_llama", *product.command(save="run", train_iters=100_000, **TP2.options)]
    with (folder / "output").open("w") as output:
        agent = subprocess.Popen(command, cwd=folder, env=environment(), stdout=output, stderr=output)
        try:
            deadline = time.monotonic() + TIMEOUT
            while len(steps(folder / "run")) < 3 and time.monotonic() < deadline:
                assert agent.poll() is None, (folder / "output").read_text()
                time.sleep(0.01)
            end(agent.pid)
            agent.wait(timeout=TIMEOUT)
        finally:
            agent.kill()
    return (folder / "output").read_text()


@pytest.mark.long
def test_sigterm_to_torchrun_saves(product: Product, tmp_path: Path) -> None:
    """As schedulers send it when the time is over."""
    said = torchrun_until_it_trains(product, tmp_path, lambda agent: os.kill(agent, signal.SIGTERM))
    last = steps(tmp_path / "run")[-1]["iteration"]
    assert f" stopped by SIGTERM after iteration {last}\n" in said
    assert [path.name for path in (tmp_path / "run").glob("iter_*")] == [f"iter_{last:07d}"]


@pytest.mark.long
def test_a_rank_that_torchrun_ends_says_first_which_one_died(product: Product, tmp_path: Path) -> None:
    """torchrun sends SIGTERM to the ranks of a machine as soon as one of them is gone: they are finding out which one then."""
    said = torchrun_until_it_trains(product, tmp_path, lambda agent: os.kill(rank_of(agent, 1), signal.SIGKILL))
    assert "error: rank 1: got no answer, expected all ranks at work; look at what that rank printed last" in said, said
    [told] = [event.details["words"] for event in read_run(str(tmp_path / "run")).events if event.what == FAULT]
    assert told.startswith("rank 1: got no answer, ") and "; rank 1 was last seen in " in told


@pytest.mark.long
def test_a_yaml_file_is_the_command_line(product: Product, straight: Callable[[str], Path], tmp_path: Path) -> None:
    """Flat keys, sections, Megatron's names; flags win over the file, and folders are those of the caller."""
    (tmp_path / "run.yaml").write_text(
        "model:\n  hidden_size: 64\n  intermediate_size: 128\n  num_hidden_layers: 4\nnum_attention_heads: 4\nnum-query-groups: 2\n"
        "training: {seq_length: 32, micro_batch_size: 2, global_batch_size: 8, train_iters: 6}\n"
        "optimizer:\n  lr: 1e-5  # a flag says otherwise\n  lr_decay_iters: 6\n"
        f"data:\n  data_path: {product.data}\n  split: 90,10,0\nlog_interval: 1\neval_interval: 3\neval_iters: 2\n"
    )
    ended = product.launcher.run(["pretrain", "--config", "run.yaml", "--lr=3e-3", "--save", "run"], cwd=tmp_path).ok()
    assert " iteration 6/6 " in ended.out
    assert exact_curve(tmp_path / "run") == exact_curve(straight("one"))


@pytest.mark.parametrize("world_size", [1, 64])
def test_dry_run(world_size: int, product: Product, tmp_path: Path) -> None:
    parallel = {} if world_size == 1 else {**TP2.options, "pipeline_model_parallel_size": 2}
    command = product.command(save=tmp_path / "run", global_batch_size=128, world_size=world_size, dry_run=True, **parallel)
    planned = product.run(*command).ok().out
    tp, pp, dp = (1, 1, 1) if world_size == 1 else (2, 2, world_size // 4)
    assert f"layout          {world_size} process{'es' * (world_size > 1)} = tp {tp} x cp 1 x pp {pp} x dp {dp}" in planned
    assert f"batch           128 samples = {64 // dp} microbatches x 2 x dp {dp}; 4,096 tokens a step, 32 a sample\n" in planned
    assert "iterations      1 to 6\n" in planned
    assert len(re.findall(r"^pp rank \d ", planned, re.M)) == pp
    assert planned.endswith(f"valid for {world_size} process{'es' if world_size > 1 else ''}\n")
    assert ("warning: devices:" in planned) == (world_size > max(2, os.cpu_count() or 1))
    assert not list(tmp_path.iterdir())


def test_dry_run_of_everything(product: Product) -> None:
    """What the largest layout of the tests is planned to do, with more replicas: its parts add up to the model."""
    changes = {"world_size": 32, "fp16": True, "grad_reduce_in_bf16": True, "global_batch_size": 24, **MIXED.options}
    planned = product.run(*product.command(dry_run=True, **changes)).ok().out
    assert "layout          32 processes = tp 2 x cp 2 x pp 2 x dp 4, sequence parallel; pipeline zb-v, sharding " in planned
    assert "batch           24 samples = 3 microbatches x 2 x dp 4; " in planned
    ranks = re.findall(r"^pp rank (\d) +(.*): ([\d,]+) elements per process", planned, re.M)
    assert [(rank, held) for rank, held, _ in ranks] == [("0", "layer 0, layer 3, embedding, head"), ("1", "layer 1, layer 2")]
    assert sum(int(numel.replace(",", "")) for _, _, numel in ranks) == pytest.approx(213_568 / 2, rel=0.02)
    assert re.findall(r"each in (\d+) shards", planned) == ["8", "8"], "context-parallel ranks hold shares too"
    assert "schedule        zb-v, 4 stages, 3 microbatches (validated)\n" in planned
    passes = re.findall(r"^  pp rank \d +(.*)$", planned, re.M)
    labels = sorted(f"{letter}{microbatch}" for letter in "FBW" for microbatch in range(3))
    assert [sorted(line.split()) for line in passes] == [sorted(labels * 2)] * 2, "each pass once for each of a rank's two chunks"
    assert planned.count("\nwarning: devices: 32 processes") == 1 and planned.endswith("valid for 32 processes\n")


@pytest.mark.tries("nodes", "gpus_per_node", "world_size")
def test_dry_run_counts_what_the_launch_block_says(product: Product, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("launch:\n  nodes: 8\n  gpus_per_node: 8\nglobal_batch_size: 64\nmicro_batch_size: 1\n")
    command = product.command(config=tmp_path / "run.yaml", global_batch_size=None, micro_batch_size=None)
    assert product.run(*command, "--dry-run").ok().out.endswith("valid for 64 processes\n")
    assert product.run(*command, "--dry-run", "--world-size", 16).ok().out.endswith("valid for 16 processes\n")


@pytest.mark.tries("max_restarts_in_place")
def test_dry_run_counts_the_spares_of_a_run_that_begins_again_in_place(product: Product, tmp_path: Path) -> None:
    """Of 13 processes 12 fill tp 2 and a dp that divides the batch; without the option the same number is refused, and so are too few."""
    command = product.command(save=tmp_path / "run", load="auto", global_batch_size=12, micro_batch_size=1, **TP2.options, dry_run=True)
    planned = product.run(*command, "--world-size", 13, "--max-restarts-in-place", 2).ok().out
    assert "processes       12 of 13 train, 1 spare (--max-restarts-in-place)\n" in planned
    assert "layout          12 processes = tp 2 x cp 1 x pp 1 x dp 6" in planned and planned.endswith("valid for 12 processes and 1 spare\n")
    exact = product.run(*command, "--world-size", 12, "--max-restarts-in-place", 2).ok().out
    assert "--max-restarts-in-place)" not in exact and exact.endswith("valid for 12 processes\n")
    assert product.run(*command, "--world-size", 16, "--max-restarts-in-place", 2).ok().out.endswith("valid for 12 processes and 4 spares\n")
    for more in (["--world-size", 13], ["--world-size", 1, "--max-restarts-in-place", 2]):
        assert product.run(*command, *more).codes == (2,)


def test_dry_run_joins_nobody(product: Product) -> None:
    """It plans for the processes that its environment promises, though there is nobody at that address."""
    environ = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "9"}
    ended = product.launcher.run([*product.command(global_batch_size=16), "--dry-run"], environ=environ)
    assert ended.ok().out.endswith("valid for 8 processes\n")


@pytest.mark.tries("dry_run")
@pytest.mark.long
def test_strict_dry_run_wants_this_machine(product: Product, tmp_path: Path) -> None:
    begun = product.command(save=tmp_path / "new", load=tmp_path / "new")
    assert product.run(*begun, "--dry-run=strict").ok().out.endswith("valid for 1 process\n")
    ended = product.run(*product.command(data_path=tmp_path / "none", vocab_size=VOCAB_SIZE), "--dry-run=strict")
    assert ended.codes == (1,) and "valid for" not in ended.out
    assert ended.err.startswith(f"error: {tmp_path}/none.idx: got no such file, expected PREFIX.bin and PREFIX.idx; ")
    many = product.run(*product.command(global_batch_size=1024), "--dry-run=strict", "--world-size", 512)
    assert many.codes == (2,) and "valid for" not in many.out
    assert many.err.startswith("error: --dry-run=strict: this machine cannot run it as it is:\n  - devices: 512 processes")
    command = product.command(data_path=tmp_path / "none", vocab_size=VOCAB_SIZE)
    lenient = product.run(*command, "--dry-run").ok().out
    assert f"warning: --data-path: {tmp_path}/none.idx is not on this machine\n" in lenient


def test_dry_run_says_what_the_run_on_this_machine_would_refuse(product: Product) -> None:
    """On a GPU messages are not cut."""
    command = product.command(dry_run=True, world_size=2, exchange_chunk_bytes=4)
    planned = product.run(*command).ok().out
    assert "warning: --exchange-chunk-bytes: got 4, expected at least 16, which cuts the largest message into 32768 pieces; " in planned
    assert "chunk" not in product.run(*product.command(dry_run=True, world_size=2)).ok().out


def test_dry_run_plans_with_the_tokenizer_it_finds(product: Product) -> None:
    assert "vocabulary 512, padded to 512\n" in product.run(*product.command(), "--dry-run").ok().out
    unknown = product.run(*product.command(data_path="/nowhere"), "--dry-run").ok().out
    assert "planned with a vocabulary of 32000\n" in unknown and "vocabulary 32,000, padded to 32,000\n" in unknown


def test_dry_run_shows_the_passes_that_the_schedule_command_shows(product: Product) -> None:
    planned = product.run(*product.command(dry_run=True, world_size=2, **ZB_H1.options)).ok().out
    drawn = product.run("schedule", *words({**ZB_H1.options, "num_microbatches": 4})).ok().out
    for rank, passes in enumerate(("F0 F1 B0 W0 F2 B1 W1 F3 B2 W2 B3 W3", "F0 B0 F1 B1 W0 F2 B2 W1 F3 B3 W2 W3")):
        assert f"\n  pp rank {rank}     {passes}\n" in planned
        (row,) = re.findall(rf"^rank {rank}  (.*)$", drawn, re.M)
        assert " ".join(word for word in row.split() if word != ".") == passes


def test_schedule_writes_a_drawing(product: Product, tmp_path: Path) -> None:
    options = words({**ZB_H1.options, "num_microbatches": 4, "svg": tmp_path / "zb.svg"})
    ended = product.run("schedule", *options).ok()
    assert ended.out.startswith("zb-h1: 2 pipeline ranks, 4 microbatches (validated)\n")
    assert "bubble       7.69% of the makespan" in ended.out and ended.out.endswith(f"drawn in {tmp_path}/zb.svg\n")
    assert [path.name for path in tmp_path.iterdir()] == ["zb.svg"]
    assert (tmp_path / "zb.svg").read_text().startswith("<svg ")


@pytest.mark.long
def test_inspect(product: Product, straight: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def rows(*argv: object) -> dict[str, str]:
        assert main(["inspect", *map(str, argv)]) == 0
        lines = capsys.readouterr().out.splitlines()
        return {name: "".join(value) for name, *value in (line.split(maxsplit=1) for line in lines)}

    checkpoint = rows("checkpoint", straight("one"))
    assert checkpoint["checkpoint"] == str(straight("one") / "iter_0000006")
    assert (checkpoint["iteration"], checkpoint["consumed_samples"], checkpoint["parameters"]) == ("6", "48", "213,568")
    assert (checkpoint["num_key_value_heads"], checkpoint["lr"], checkpoint["seq_length"]) == ("2", "0.003", "32")
    assert checkpoint["make_vocab_size_divisible_by"] == "128", "a name longer than its column"
    assert rows("checkpoint", straight("one") / "iter_0000006") == checkpoint

    dataset = rows("dataset", product.data)
    assert dataset["documents"] == str(len(product.texts)) and dataset["vocab_size"] == "512"
    assert rows("dataset", f"{product.data}.bin") == rows("dataset", f"{product.data}.idx") == dataset
    assert main(["inspect", "dataset", f"{product.data}.txt"]) == 1
    assert "expected PREFIX.bin and PREFIX.idx; give the common prefix of the .bin and .idx files" in capsys.readouterr().err
    assert int(dataset["tokens"].replace(",", "")) * 2 == Path(f"{product.data}.bin").stat().st_size

    assert main(["export", "--load", str(straight("one")), "--output", str(tmp_path / "hf")]) == 0
    capsys.readouterr()
    for path in (tmp_path / "hf", tmp_path / "hf" / "config.json"):
        config = rows("config", path)
        assert (config["hidden_size"], config["vocab_size"], config["parameters"]) == ("64", "512", "213,568")
    assert rows("config", ROOT / "examples" / "quickstart.yaml")["hidden_size"] == "256"
