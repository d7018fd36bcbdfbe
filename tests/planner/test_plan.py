"""The planner against the plans that it reads: passes, bytes, FLOPs, memory; its search and its command."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from megatron_llama.cli import main
from megatron_llama.config.schema import Config
from megatron_llama.errors import ConfigError
from megatron_llama.metrics.flops import flops_per_token
from megatron_llama.model.presets import PRESETS
from megatron_llama.planner.candidate import Candidate
from megatron_llama.planner.context_traffic import context_traffic
from megatron_llama.planner.fitted import FITTED
from megatron_llama.planner.hardware import CPU, GPUS, gpu_named, gpu_of_device
from megatron_llama.planner.inputs import layout_named
from megatron_llama.planner.kernels import GRAPH, Kernels
from megatron_llama.planner.links import rank_group, rank_groups
from megatron_llama.planner.report import command, label
from megatron_llama.planner.search import candidates, enough_gpus, search
from megatron_llama.planner.simulate import StageTimes, simulate, tail
from megatron_llama.planner.steps import block_time, estimate
from megatron_llama.planner.training_job import Machine, job_of
from megatron_llama.schedule import Costs, Op, schedule_named
from megatron_llama.schedule import simulate as replayed
from megatron_llama.train.setup.graph_memory import graph_bytes
from megatron_llama.train.setup.memory import MemoryPlan
from megatron_llama.train.setup.resolve import problems, resolve

from tests.oracle.flops import planned_flops

H100 = gpu_named("h100")


def machine(gpus: int) -> Machine:
    return Machine(H100, gpus, 8, 8, H100.nic)


def config(model: str, batch: int, micro: int = 1, seq: int = 4096, **parallel: object) -> Config:
    whole = Config(model=replace(PRESETS[model], preset=model))
    training = replace(whole.training, bf16=True, global_batch_size=batch, micro_batch_size=micro, seq_length=seq, train_iters=1)
    return replace(whole, parallel=replace(whole.parallel, **parallel), training=training)  # type: ignore[arg-type]


def plan_command(model: str, gpus: int, batch: int, seq: int) -> list[str]:
    """The command for the same."""
    return ["plan", "--model", model, "--gpus", f"{gpus}", "--global-batch-size", f"{batch}", "--seq-length", f"{seq}"]


LAYOUTS = {
    "1f1b": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4, "sequence_parallel": True},
    "interleaved": {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2, "pipeline_schedule": "interleaved"},
    "zb-h1": {"pipeline_model_parallel_size": 4, "pipeline_schedule": "zb-h1"},
    "gpipe": {"pipeline_model_parallel_size": 4, "pipeline_schedule": "gpipe"},
    "zb-v": {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zb-v"},
    "grads": {"tensor_model_parallel_size": 2, "data_parallel_sharding_strategy": "optim_grads", "sequence_parallel": True},
    "layers": {"data_parallel_sharding_strategy": "optim_grads_params", "recompute_granularity": "full"},
    "long": {"context_parallel_size": 2, "recompute_granularity": "selective"},
}


def planned(name: str, batch: int = 256) -> Candidate:
    chosen = config("llama2-7b", batch, seq=8192 if name == "long" else 4096, **LAYOUTS[name])
    assert problems(chosen, 16) == []
    return Candidate(resolve(chosen, 16), machine(16), FITTED)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_the_simulator_walks_a_schedule_as_the_replay_does(name: str) -> None:
    schedule = schedule_named(name, ranks=4, microbatches=8, virtual=2 if name == "interleaved" else 1)
    times = [StageTimes(1.0, 2.0, 3.0)] * schedule.stages
    assert simulate(schedule, times, 0.0) == replayed(schedule, Costs(1.0, 2.0, 3.0))
    assert simulate(schedule, times, 0.5).makespan > simulate(schedule, times, 0.0).makespan


def test_passes_wait_for_what_travels_beside_them() -> None:
    times = StageTimes(1.0, 1.0, 1.0, gather_forward=3.0, gather_backward=1.5, reduce=4.0, slowdown=0.1)
    assert [times.of(op) for op in (Op.FORWARD, Op.BACKWARD)] == pytest.approx([3.1, 4.2])
    # Ready after half of the pass and at its end: the first hides, the second follows.
    assert tail([(0.0, 10.0)], [(0.5, 3.0), (1.0, 2.0)]) == pytest.approx(2.0)
    assert tail([(0.0, 10.0)], [(0.5, 8.0), (1.0, 2.0)]) == pytest.approx(5.0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_flops_and_memory_are_those_of_the_plans(name: str) -> None:
    plan = planned(name, 64)
    model = plan.config.model
    assert planned_flops(plan) == flops_per_token(model, plan.job.seq, causal=False)
    granularity = plan.config.parallel.recompute_granularity
    whole = MemoryPlan(plan.config, 16)
    chosen = whole.recompute_layers() if granularity != "none" else 0
    assert sum(plan.fullest.values()) == whole.needed(granularity, chosen)
    assert [traffic.shards for traffic in plan.traffic] == [layout.shards for layout in whole.bucket_plans]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_simulated_step_is_near_the_closed_form(name: str) -> None:
    plan = planned(name)
    assert plan.seconds == pytest.approx(estimate(plan.job, FITTED).seconds, rel=0.05)
    parts = plan.step_time
    assert parts.compute > 0.6 * plan.seconds
    assert (parts.bubble > 0) == (plan.job.pp > 1) and (parts.tensor > 0) == (plan.job.tp > 1) and (parts.context > 0) == (plan.job.cp > 1)


def test_messages_of_blocks_grow_with_the_batch() -> None:
    small = config("llama3-8b", 16, tensor_model_parallel_size=4, context_parallel_size=2)
    large = replace(small, training=replace(small.training, global_batch_size=3 * small.training.global_batch_size))
    parts, more = (Candidate(resolve(chosen, 16), machine(16), FITTED).step_time for chosen in (small, large))
    assert more.tensor / parts.tensor == pytest.approx(3) == more.context / parts.context


def test_graphs_of_blocks_take_memory_and_save_the_host_time() -> None:
    plain = config("llama3-8b", 8, tensor_model_parallel_size=8)
    graphs = replace(plain, training=replace(plain.training, cuda_graph_scope="block"))
    without, with_graphs = (Candidate(resolve(chosen, 8), machine(8), FITTED) for chosen in (plain, graphs))
    added = graph_bytes(without.short, 0, "none", 0)
    assert added > 0 and with_graphs.needed - without.needed == added
    launches = [Kernels(plan.job, FITTED).forward().launch for plan in (without, with_graphs)]
    assert launches[1] == GRAPH * launches[0] and with_graphs.seconds < without.seconds


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("comm", [("all_gather",), ("a2a",), ("a2a+p2p", 2, 2)], ids=str)
@pytest.mark.parametrize(("model", "window"), [("llama2-7b", 0), ("llama2-7b", 1024), ("llama2-7b", 9000), ("gemma3-1b", 512)])
def test_context_parallelism_takes_the_time_of_its_bytes(model: str, window: int, recompute: str, comm: tuple[Any, ...]) -> None:
    """Of the rank that sends most, in all layers, with and without windows: bytes that real runs send (tests/parallel/test_traffic.py)."""
    kind, *groups_of = comm
    spread = {"cp_comm_type": kind, "hierarchical_context_parallel_sizes": tuple(groups_of), "recompute_granularity": recompute}
    chosen = config(model, 16, seq=16384, context_parallel_size=4, **spread)
    chosen = replace(chosen, model=replace(chosen.model, sliding_window=window))
    chosen = resolve(chosen, 8)
    fit = replace(FITTED, latency=0.0, latency_across=0.0, hop=0.0, hop_inside=0.0, cp_exposed=1.0)
    job = job_of(chosen, machine(8))
    groups = rank_groups(job, fit)
    block = block_time(job, groups, Kernels(job, fit), fit)
    layers = range(chosen.model.num_hidden_layers)
    ranks = [context_traffic(chosen, layers, rank=rank) for rank in range(4)]
    key_values, gradients = (max(getattr(rank, name) for rank in ranks) for name in ("passes", "gradients"))
    seconds = len(layers) * groups.cp.rate
    assert block.forward.context * seconds == pytest.approx(key_values)
    passes = 2 if recompute == "full" else 1
    assert block.backward.context * seconds == pytest.approx(passes * key_values + gradients)


def test_a_few_microbatches_show_what_all_do() -> None:
    for name in ("1f1b", "interleaved", "layers"):
        short, whole = planned(name, 512), planned(name, 512)
        whole.__dict__["few"] = whole.config
        assert short.few.training.global_batch_size < 512
        assert sum(short.fullest.values()) == sum(whole.fullest.values())
        assert short.seconds == pytest.approx(whole.seconds, rel=0.03)


def test_a_ring_uses_the_cards_of_all_its_ranks_in_a_node() -> None:
    node = replace(machine(64), nic=12.5e9)
    inside, across, strided = (rank_group(node, size, stride, FITTED) for size, stride in ((8, 1), (64, 1), (8, 8)))
    assert inside.rate > across.rate > strided.rate
    assert across.rate == pytest.approx(min(inside.rate, 8 * strided.rate))
    assert inside.gather(1e9) < across.gather(1e9) < strided.gather(1e9) and rank_group(node, 1, 1, FITTED).gather(1e9) == 0


def test_an_exchange_leaves_a_node_by_the_card_of_its_rank() -> None:
    """Inside a node it takes as long as a gather of as many bytes. Of two nodes half of the parts are in the other one."""
    node = replace(machine(64), nic=12.5e9)
    fit = replace(FITTED, latency=0.0, latency_across=0.0, hop=0.0, hop_inside=0.0)
    inside, across = (rank_group(node, size, 1, fit) for size in (8, 16))
    assert inside.exchange(1e9) == inside.gather(1e9) > 0 == rank_group(node, 1, 1, fit).exchange(1e9)
    assert across.exchange(1e9) == pytest.approx(0.5e9 / (12.5e9 * fit.nic)) and across.exchange(1e9) > across.gather(1e9)


def test_a_search_tries_an_exchange_of_heads_where_they_suffice() -> None:
    base, cluster = config("llama2-7b", 64, seq=131072), machine(64)
    tried = list(candidates(base, cluster, {"context_parallel_size": 16, "recompute_granularity": "full"}))
    found = {(one.parallel.tensor_model_parallel_size, one.parallel.cp_comm_type) for one in tried}
    assert {tp for tp, comm in found if comm == "a2a"} == {1, 2} < {tp for tp, comm in found if comm == "all_gather"}
    pinned = {"context_parallel_size": 16, "cp_comm_type": "ring", "recompute_granularity": "full"}
    assert {one.parallel.cp_comm_type for one in candidates(base, cluster, pinned)} == {"ring"}
    word = label(Candidate(next(one for one in tried if one.parallel.cp_comm_type == "a2a"), cluster, FITTED))
    named = layout_named(base, cluster, FITTED, word)
    assert label(named) == word and "/cp16/" in word and "/a2a/" in word and named.config.parallel.cp_comm_type == "a2a"


def test_every_candidate_divides_what_it_has_to() -> None:
    tried = list(candidates(config("llama2-7b", 64), machine(8), {"recompute_granularity": "full"}))
    assert len(tried) > 100 and len(set(map(str, tried))) == len(tried)
    wrong = [problem for one in tried[::20] for problem in problems(one, 8)]
    assert wrong == [] and {one.parallel.recompute_granularity for one in tried} == {"full"}


def test_embedding_and_head_count_where_blocks_cannot_be_shared_out(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = {
        (one.parallel.pipeline_model_parallel_size, one.parallel.account_for_loss_in_pipeline_split)
        for one in candidates(config("llama3.1-405b", 128), machine(128), {"tensor_model_parallel_size": 8})
    }
    assert (16, True) in shapes and (2, False) in shapes and (4, True) in shapes and (16, False) not in shapes
    assert main([*plan_command("llama3.1-405b", 128, 32, 8192), "--explain", "tp8/pp16/1f1b/recompute-full"]) == 0
    assert "--account-for-loss-in-pipeline-split" in capsys.readouterr().out


def test_the_search_finds_the_fastest_that_fits() -> None:
    whole = resolve(config("llama2-7b", 64), 1)
    found = search(whole, machine(8), FITTED, top=3, pinned={"pipeline_model_parallel_size": 1})
    seconds = [plan.seconds for plan in found.best]
    assert len(seconds) == 3 and seconds == sorted(seconds) and all(plan.oom_probability < 0.5 for plan in found.best)
    # Nothing of the same search that is faster by the closed form fits.
    faster = [
        one
        for one in candidates(whole, machine(8), {"pipeline_model_parallel_size": 1})
        if estimate(job_of(one, machine(8)), FITTED).seconds < 0.9 * seconds[0]
    ]
    assert all(Candidate(one, machine(8), FITTED).oom_probability > 0.5 for one in faster)


def test_a_model_that_fits_nowhere_and_the_cluster_it_needs() -> None:
    pinned = {"pipeline_model_parallel_size": 1, "micro_batch_size": 1, "recompute_granularity": "full", "optimizer_offload": "none"}
    whole = resolve(config("llama2-13b", 64), 1)
    found = search(whole, machine(1), FITTED, top=3, pinned=pinned)
    assert found.best == () and found.smallest is not None and found.smallest.oom_probability > 0.99
    enough = enough_gpus(whole, machine(1), FITTED, pinned)
    assert enough is not None and enough.machine.gpus in (2, 4) and enough.oom_probability < 0.5


def test_gpus_by_other_names() -> None:
    assert gpu_named("A100-80GB") is GPUS["a100"] and gpu_named("GB200-186GB").domain == 72 and gpu_named("CPU") == CPU
    with pytest.raises(ConfigError, match="did you mean h200"):
        gpu_named("h200x")
    devices = {"NVIDIA H100 80GB HBM3": 80, "NVIDIA A100-SXM4-40GB": 40, "Tesla V100-SXM2-32GB": 32, "NVIDIA GB200": 185}
    found = [gpu_of_device(name, memory << 30) for name, memory in devices.items()]
    assert [gpu.name for gpu in found if gpu is not None] == ["h100", "a100-40", "v100", "gb200"]
    assert gpu_of_device("NVIDIA GeForce RTX 4090", 24 << 30) is None


SMALL = [*plan_command("llama2-7b", 8, 64, 4096), "--pipeline-model-parallel-size", "1"]
AUTO = ["pretrain", "--model", "llama2-7b", "--global-batch-size", "64", "--seq-length", "4096", "--train-iters", "1", "--bf16"]
AUTO += ["--dry-run", "--pipeline-model-parallel-size", "1", "--recompute-granularity", "none", "--auto-parallel"]


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([*SMALL, "--top", "3", "--json", str(tmp_path / "plan.json"), "--micro-batch-size", "1"]) == 0
    text = capsys.readouterr().out
    written = json.loads((tmp_path / "plan.json").read_text())
    assert "layouts tried" in text and "why the others are slower" in text and "nearest published runs" in text
    assert len(written["layouts"]) == 3 and written["layouts"][0]["layout"] in text
    first = written["layouts"][0]
    assert first["step_seconds_low"] < first["step_seconds"] < first["step_seconds_high"]
    assert first["step_seconds"] == pytest.approx(sum(first["seconds"].values()))
    assert first["command"] in text and "torchrun --nnodes 1 --nproc-per-node 8 -m megatron_llama pretrain --model llama2-7b" in text
    left_open = ["--data-parallel-sharding-strategy", "auto", "--param-slots", "auto", "--micro-batch-size", "1"]
    assert main([*SMALL[:-2], "--top", "1", *left_open]) == 0
    assert first["layout"] in capsys.readouterr().out
    assert main([*SMALL[:-2], "--explain", first["layout"]]) == 0
    assert f"{first['layout']}: {first['step_seconds']:.2f} s a step" in capsys.readouterr().out


def test_the_shortest_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What the overview shows is enough; what nobody gave is said. A recipe's machines count as --gpus."""
    one = ["--explain", "tp1/pp1/mbs1/optim/recompute-full"]
    assert main(["plan", "--model", "llama2-7b", "--gpus", "24", *one]) == 0
    taken, title, *lines = capsys.readouterr().out.splitlines()
    assert taken == "not given, so planned with --gpu h100, --seq-length 2048, --global-batch-size 2064 (4,227,072 tokens a step)"
    assert title.startswith("24 x h100 (8 in a node, ") and title.endswith("2064 samples of 2048 tokens a step")
    head = next(line for line in lines if "layout" in line)
    assert [column for column in ("step (s)", "80 % between (s)", "tokens/s/GPU", "memory/GPU") if column not in head] == []
    assert any("exposed communication" in line for line in lines)
    (tmp_path / "run.yaml").write_text("model: llama2-7b\nseq_length: 4096\nglobal_batch_size: 64\nlaunch: {nodes: 2, gpus_per_node: 8}\n")
    assert main(["plan", "--config", str(tmp_path / "run.yaml"), "--gpu", "a100", *one]) == 0
    assert capsys.readouterr().out.startswith("16 x a100 (8 in a node, ")


def test_kind_and_wires_of_the_gpus_matter(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def seconds(*more: str) -> float:
        words = [*plan_command("llama2-7b", 16, 16, 4096), "--explain", "tp1/pp1/optim", "--json", str(tmp_path / "one.json")]
        assert main([*words, *more]) == 0
        return float(json.loads((tmp_path / "one.json").read_text())["layouts"][0]["step_seconds"])

    usual = seconds()
    assert seconds("--nic-gbit", "10") > 1.2 * usual and seconds("--gpu", "a100") > 1.5 * usual > 2 * seconds(
        "--gpu", "b200", "--gpus-per-node", "16"
    )
    capsys.readouterr()


def test_the_planned_command_line_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    """Every option of the printed line is one of pretrain, and the layout is the planned one."""
    plan = planned("interleaved")
    words = command(plan).split(" pretrain ")[1].replace("--train-iters N", "--train-iters 1").split()
    assert main(["pretrain", *words, "--dry-run", "--world-size", "16"]) == 0
    assert "16 processes = tp 1 x cp 1 x pp 4 x dp 4" in capsys.readouterr().out
    assert label(plan) == "tp1/pp4/cp1/dp4/mbs1/interleaved/v2/optim/recompute-none"


def test_the_planned_run_has_the_optimizer_that_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--optimizer", "muon", "--lr", "0.001", "--explain", "tp1/pp1"]) == 0
    printed = capsys.readouterr().out
    assert "--optimizer muon --lr 0.001 --data-path PREFIX" in printed
    assert "update    its time is that of AdamW" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "--gpus", "8"], "--model: got nothing"),
        (["plan", "--model", "llama2-7b"], "--gpus: got nothing"),
        (["plan", "--model", "llama2-7b", "--gpus", "7", "--global-batch-size", "64"], "--global-batch-size 63 would work"),
        ([*SMALL, "--gpu", "h300"], "--gpu: got h300"),
        ([*SMALL[:-2], "--explain", "tp3/pp1"], "cannot run on 8 GPUs"),
        ([*SMALL[:-2], "--explain", "tp2/sideways"], "--explain: got sideways"),
        ([*SMALL, "--top", "0"], "--top: got 0, expected 1 or more"),
        (["plan", "--gpus", "-1", "--nic-gbit", "-3"], "--gpus: got -1, expected 1 to 262,144; correct it\n  - --nic-gbit: got -3.0, expected 0, or"),
        ([*SMALL, "--optimizer-offload", "all"], "--optimizer-offload: got all"),
        ([*SMALL, "--gpus-per-node", "3"], "--gpus: got 8, expected a multiple of 3"),
        ([*SMALL, "--head-dim", "7"], "This model cannot be trained"),
        ([*plan_command("llama2-13b", 1, 8, 2048), "--optimizer-offload", "none"], "--gpus 4 would do"),
        ([*SMALL, "--micro-batch-size", "1", "--html", "/no/a.html"], "--html: got [Errno 2]"),
        (["plan", "trace", "--gpus", "8"], "--model: got nothing"),
        (["plan", "trace", *plan_command("llama2-7b", 6, 8, 4096)[1:], "--tensor-model-parallel-size", "4"], "tensor"),
        (["plan", "trace", *SMALL[1:], "--optimizer-offload", "exact"], "--optimizer-offload"),
        ([*AUTO, "--world-size", "16", "--gpu", "h1000"], "--gpu: got h1000"),
        ([*AUTO[:3], *AUTO[5:], "--world-size", "16", "--gpu", "h100"], "--global-batch-size: got nothing, expected samples in a step"),
        ([*AUTO[:-1], "--gpu", "h100", "--nic-gbit", "5"], "--gpu --nic-gbit: got no --auto-parallel"),
        ([*AUTO, "--world-size", "16", "--gpu", "h100", "--coefficients", "file"], "leave one out"),
        ([*AUTO, "--world-size", "2", "--gpu", "v100", "--optimizer-offload", "none"], "--gpus 8 would do"),
        (["plan", "calibrate"], "got no file"),
        (["plan", "calibrate", "x.json", "--seconds", "0"], "got --seconds 0"),
        (["schedule", "--pipeline-schedule", "interleaved"], "--virtual-pipeline-model-parallel-size: got 1, expected 2 or more"),
        (["schedule", "--svg", "/absent/a.svg"], "--svg: got"),
        (["schedule", "--png", "a.png"], "--png: got a.png, expected --svg FILE; "),
    ],
)
def test_input_that_makes_no_sense(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_planning_needs_the_standard_library_only() -> None:
    code = "import sys; import megatron_llama.planner.commands.plan; print([m for m in ('torch', 'numpy', 'yaml') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
