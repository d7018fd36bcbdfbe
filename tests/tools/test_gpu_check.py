"""tools/gpu_check.sh where there is no GPU: its command line, its one error, the parts it would run, how it runs and reports them, and
whole parts with tiny models."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron_llama.config.schema import Config
from megatron_llama.engine.plan.memory import sized
from megatron_llama.errors import ConfigError
from megatron_llama.model.presets import PRESETS
from megatron_llama.train.setup.memory import MemoryPlan
from tools.gpucheck import ab, use
from tools.gpucheck.__main__ import EXAMPLE_MEMORY, check, main, parse
from tools.gpucheck.figures import UNMEASURED
from tools.gpucheck.parts import DECISIVE, FULL, ORACLES, Part, Setting, all_parts, configuration, layers_that_fit, marked
from tools.gpucheck.report import BEGUN, Outcome, markdown, read, rows_of, write
from tools.step.contenders import Entry
from tools.step.worker import Sample, Task, _measure

from tests.train.run.rerun_graphs import rerunning
from tools import bench_links

ROOT = Path(__file__).parents[2]
MACHINE = {"device": "GPU of a test", "torch": "2"}
LACKING = (
    "transformers",
    "peft",
    "megatron",
    "liger_kernel",
    "deepspeed",
    "torchao",
    "pyarrow",
    "zstandard",
    "tiktoken",
    "tensorboard",
    "wandb",
    "upath",
)
"""What a machine with a GPU need not have."""


def script(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command, python = (["bash", str(ROOT / "tools" / "gpu_check.sh"), *words], str(Path(sys.executable).parent))
    return subprocess.run(
        command, capture_output=True, text=True, env={"PATH": f"{python}:/usr/bin:/bin", "VIRTUAL_ENV": "", **environment}
    )


@pytest.mark.long
def test_without_a_gpu_there_is_one_error(tmp_path: Path) -> None:
    """Of the script itself, before anything is written."""
    done = script("--out", str(tmp_path / "reports"))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and "sees no GPU" in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "reports").exists()


@pytest.mark.soak
def test_tiny_parts_where_packages_are_lacking(tmp_path: Path) -> None:
    """The script, its processes and its reports, on a host, where nothing can be imported that training does not need."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules |= dict.fromkeys({LACKING!r})")
    folder, parts = tmp_path / "reports", "tests,kernels,ab-deterministic,step-8b-4096-dp8,links"
    done = script("--tiny", "--steps", "1", "--only", parts, "--out", str(folder), PYTHONPATH=str(tmp_path), OMP_NUM_THREADS="1")
    machine, outcomes = read(folder / "gpu_check.json")
    found = {one.name: one for one in outcomes}
    assert {name: one.status for name, one in found.items()} == {
        "tests": "passed",
        "kernels": "passed",
        "ab-deterministic": "passed",
        "step-8b-4096-dp8": "passed",
        "links": "did not run: needs a GPU",
    }, done.stdout
    assert done.returncode == 1 and done.stderr == f"error: 1 of 5 parts did not pass: links; see {folder}/NAME.log\n"
    assert machine == {"device": "none: no figure below means anything"}
    assert [(row["name"], row["dtype"]) for row in found["step-8b-4096-dp8"].rows] == [("ours", "bf16")]
    assert [(row["variant"], row["same_losses"]) for row in found["ab-deterministic"].rows] == [("off", "yes"), ("on", "yes")]
    assert found["tests"].absent == tuple(f"{file}: {package} is not installed" for file, package in ORACLES.items())
    assert " tests collected" in done.stdout and "- absent: tests/kernels/test_liger.py" in (folder / "gpu_check.md").read_text()
    torchs = {(row["name"], row["ms"] > 0) for row in found["kernels"].rows if row["contender"] == "torch"}
    assert torchs >= {(name, True) for name in ("residual + RMSNorm", "RoPE", "SwiGLU", "cross entropy", "AdamW", "weight gradient", "FP8 codes, input", "FP8 product")}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--only", "tests,nothing"], "--only: no part begins with nothing; there are correct, use, step-7b-4096, step-8b-4096, kernels"),
        (["--rounds", "0"], "--rounds and --steps are at least 1"),
        (["--minutes", "0"], "--minutes is positive"),
        (["--jobs", "2"], "--jobs: at least 1, and with --tiny alone"),
        (["--jobs", "0", "--tiny"], "--jobs: at least 1, and with --tiny alone"),
        (["--layer", "3"], "unrecognized arguments: --layer"),
    ],
)
def test_wrong_words_are_refused(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2 and complaint in capsys.readouterr().err


def test_parts_can_be_listed_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--only", "step-8b,links", "--layers", "4", "--rounds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["step-8b-4096", "step-8b-4096-dp8", "links", "step-8b-8192", "step-8b-8192-dp8"]
    steps = [line for line in lines if line.startswith("step")]
    assert all(f"--model llama3-8b --seq-length {length} " in line for line, length in zip(steps, (4096, 4096, 8192, 8192), strict=True))
    assert all("--num-layers 4 " in line and "--rounds 1 " in line for line in steps)
    assert "--global-batch-size 8 " in steps[0] and steps[0].count("hf-compile") == 1
    assert "--global-batch-size 64 " in steps[1] and "--emulate-dp 8 --contenders ours --json" in steps[1]


def test_whole_models_are_trained_as_one_of_eight_ranks() -> None:
    parts = {part.name: part for part in all_parts(Setting(Path("out"), EXAMPLE_MEMORY))}
    assert [name for name in parts if name.startswith("step-7b")] == [
        "step-7b-4096",
        "step-7b-4096-dp8",
        "step-7b-8192",
        "step-7b-8192-dp8",
    ]
    assert list(parts)[:5] == ["correct", "use", "step-7b-4096", "step-8b-4096", "kernels"] and "--rounds 1 " in " ".join(parts["offload"].command)
    assert "--num-layers" not in parts["step-7b-4096-dp8"].command and "32 of 32 layers" in parts["step-7b-4096-dp8"].title
    planned = MemoryPlan(configuration("llama2-7b", 4096, layers=32, dp=8), 8).needed("none", 0)
    assert f", {sized(planned)} planned" in parts["step-7b-4096-dp8"].title
    assert all(
        part.json == f"out/{name}.json" and part.command[-1] == part.json
        for name, part in parts.items()
        if name not in ("correct", "tests")
    )


def test_only_files_with_tests_for_a_gpu_are_read() -> None:
    """None of them needs a package to be read that training does not, which the tiny check shows; others do, and pytest would stop there."""
    parts = {part.name: part.command for part in all_parts(Setting(Path("out"), EXAMPLE_MEMORY))}
    files = marked(ROOT)
    for name in ("correct", "tests"):
        assert parts[name][1:5] == ("-m", "pytest", "-m", "gpu or kernels")
    assert parts["correct"][5:] == DECISIVE
    named = [*parts["correct"][5:], *parts["tests"][5:]]
    assert sorted(named) == sorted(set(files) - {file for file, package in ORACLES.items() if find_spec(package) is None})
    assert {"tests/parallel/test_device.py", "tests/kernels/test_ops.py", "tests/engine/test_offload_device.py"} <= set(files)
    assert "tests/train/test_lr.py" not in files


def test_who_is_missing_is_replaced_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.gpucheck.parts.find_spec", lambda name: None)
    parts = {part.name: part for part in all_parts(Setting(Path("out"), EXAMPLE_MEMORY))}
    assert parts["step-7b-8192"].command[-5:-2] == ("--contenders", "ours", "torch-compile")
    assert parts["step-7b-8192"].absent == ("hf-compile: transformers is not installed",)
    assert parts["tests"].obstacle == "pytest is not installed" and parts["kernels"].obstacle is None


@pytest.mark.parametrize("memory", [8 * 2**30, 80 * 10**9, EXAMPLE_MEMORY])
@pytest.mark.parametrize(("preset", "length"), [("llama2-7b", 4096), ("llama3-8b", 8192)])
def test_as_many_layers_as_fit(preset: str, length: int, memory: int) -> None:
    """By the plan: one more would not."""
    layers = layers_that_fit(preset, length, memory)
    needed = [MemoryPlan(configuration(preset, length, layers=n, dp=1), 1).needed("none", 0) for n in (layers, layers + 1)]
    assert layers == 1 or needed[0] <= FULL * memory
    assert layers == PRESETS[preset].num_hidden_layers or needed[1] > FULL * memory


def part_of(tmp_path: Path, name: str, code: str, seconds: float = 60.0) -> Part:
    """That runs some Python."""
    report = str(tmp_path / f"{name}.json")
    return Part(name, f"the part {name}", (sys.executable, "-S", "-c", code, report), seconds, report)


ROWS = '[{"name": "ours", "tokens_per_second": 12345.6, "mfu": 0.625, "peak_memory_bytes": 1610612736, "ratio": null}]'


WRITES = f"open(sys.argv[1], 'w').write({ROWS!r})"
SLOW = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
open(LEFT, "w").write(str(child.pid))
try:
    time.sleep(600)
except KeyboardInterrupt:
    {WRITES}
"""


@pytest.mark.long
def test_a_part_that_fails_does_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One fails behind its rows, one before them, one takes too long and leaves a process, one cannot run, and the last one passes."""
    folder, left = tmp_path / "reports", tmp_path / "left"
    (tmp_path / "early.json").write_text(ROWS)  # an earlier check's
    parts = [
        part_of(tmp_path, "late", f"import sys; {WRITES}; sys.exit(3)"),
        part_of(tmp_path, "early", "raise RuntimeError('nothing yet')"),
        part_of(tmp_path, "slow", SLOW.replace("LEFT", repr(str(left))), seconds=12.0),
        replace(part_of(tmp_path, "never", "raise RuntimeError('never')"), obstacle="needs something"),
        replace(part_of(tmp_path, "last", f"import sys; {WRITES}"), absent=("hf: not here",)),
    ]
    assert check(parts, folder, 120.0, MACHINE) == 1
    said = capsys.readouterr()
    assert said.err == f"error: 4 of 5 parts did not pass: late, early, slow, never; see {folder}/NAME.log\n"
    assert "nothing yet" in (folder / "early.log").read_text() and "of 2 minutes" in said.out
    machine, outcomes = read(folder / "gpu_check.json")
    assert machine == MACHINE
    assert [(one.name, one.status, len(one.rows)) for one in outcomes] == [
        ("late", "failed with 3", 1),
        ("early", "failed with 1", 0),
        ("slow", "took too long", 1),  # asked to end, it wrote what it had
        ("never", "did not run: needs something", 0),
        ("last", "passed", 1),
    ]
    assert outcomes[1].tail.endswith("RuntimeError: nothing yet\n") and outcomes[4].absent == ("hf: not here",) and outcomes[4].tail == ""
    state = Path(f"/proc/{left.read_text().strip()}/stat")
    assert not state.exists() or state.read_text().split()[2] in "ZX"
    assert check(parts[4:], folder, 120.0, MACHINE, outcomes[:1]) == 1, "what ran earlier is in the report"
    assert [one.name for one in read(folder / "gpu_check.json")[1]] == ["late", "last"]
    assert check(parts[4:], folder, 120.0, MACHINE) == 0
    assert check(parts[4:], folder, 40.0, MACHINE) == 1
    assert read(folder / "gpu_check.json")[1][0].status == "did not run: no time was left"


def test_parts_that_give_no_figures_run_at_once(tmp_path: Path) -> None:
    """Each of two waits for the other at the ends of a pipe."""
    pipe = str(tmp_path / "pipe")
    os.mkfifo(pipe)
    parts = [part_of(tmp_path, name, f"open({pipe!r}, {mode!r})") for name, mode in (("one", "r"), ("other", "w"))]
    assert check(parts, tmp_path / "reports", 120.0, MACHINE, jobs=2) == 0
    assert sorted(one.name for one in read(tmp_path / "reports" / "gpu_check.json")[1]) == ["one", "other"]


def logged(run: Path, losses: list[float]) -> None:
    """A run's log, with a line of another kind."""
    run.mkdir(parents=True)
    lines = [{"validation_loss": 9.0}, *({"iteration": index, "lm_loss": loss} for index, loss in enumerate(losses))]
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


FALLING = [8.0 - index / 8 for index in range(use.STEPS)]


@pytest.mark.parametrize(
    ("losses", "kind", "plain", "said"),
    [
        (FALLING, "same", FALLING, ""),
        ([*FALLING[:-1], FALLING[-1] * 1.019], "same", FALLING, ""),
        ([*FALLING[:-1], FALLING[-1] * 1.03], "same", FALLING, "without the option"),
        (FALLING[:-1], "same", FALLING, "losses ["),
        ([*FALLING[:-1], float("nan")], "falling", None, "losses ["),
        (FALLING[::-1], "falling", None, "the loss went from"),
        (FALLING, "falling", None, ""),
    ],
)
def test_losses_of_a_small_run_are_judged(tmp_path: Path, losses: list[float], kind: use.Losses, plain: list[float] | None, said: str) -> None:
    logged(tmp_path / "run", losses)
    found = use.judged(use.Case(("pretrain",), kind), tmp_path, plain)
    assert said in found and bool(found) is bool(said)


def test_a_resumed_run_is_judged_by_its_bits(tmp_path: Path) -> None:
    logged(tmp_path / "run", FALLING)
    logged(tmp_path / "resumed", FALLING[use.STEPS // 2 :])
    assert not use.judged(use.CASES["resumed"], tmp_path, FALLING)
    logged(tmp_path / "other" / "run", FALLING)
    logged(tmp_path / "other" / "resumed", [loss * (1 + 1e-12) for loss in FALLING[use.STEPS // 2 :]])
    assert use.judged(use.CASES["resumed"], tmp_path / "other", FALLING).startswith("resumed losses")


@pytest.mark.long
def test_small_runs_as_users_type_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One that passes, one that is resumed, and one that cannot run here."""
    rows = tmp_path / "rows.json"
    words = ["--tiny", "--jobs", "2", "--seconds", "400", "--only", "plain,resumed,graphs", "--json", str(rows)]
    assert use.main(words) == 1
    found = {row["name"]: row for row in json.loads(rows.read_text())}
    assert {name: row["result"] for name, row in found.items()} == {"plain": "passed", "resumed": "passed", "graphs": "pretrain ended with 2"}
    assert 0 < found["plain"]["last_loss"] < 8.4 and found["graphs"]["last_loss"] is None
    assert "--cuda-graph-scope block: got a machine without a GPU" in capfd.readouterr().err


KILLER = """
import json, os, signal, sys
[found] = [part for part in json.load(open(REPORT))["parts"] if part["name"] == "killer"]
open(SEEN, "w").write(found["status"])
os.kill(os.getppid(), signal.SIGKILL)
"""


def test_what_ends_the_check_itself_leaves_its_report(tmp_path: Path) -> None:
    """The part that was under way is named, with what came before it: a machine may be taken back, or lock up."""
    folder, seen = tmp_path / "reports", tmp_path / "seen"
    code = KILLER.replace("REPORT", repr(str(folder / "gpu_check.json"))).replace("SEEN", repr(str(seen)))
    first, killer = (part_of(tmp_path, "first", f"import sys; {WRITES}"), part_of(tmp_path, "killer", code))
    whole = f"""
from pathlib import Path
from tools.gpucheck.__main__ import check
from tools.gpucheck.parts import Part
check([{first!r}, {killer!r}], Path({str(folder)!r}), 120.0, {MACHINE!r})
"""
    ended = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == -9, ended.stderr
    assert seen.read_text() == BEGUN
    machine, outcomes = read(folder / "gpu_check.json")
    assert machine == MACHINE and [(one.name, one.status, len(one.rows)) for one in outcomes] == [
        ("first", "passed", 1),
        ("killer", BEGUN, 0),
    ]
    assert not list(folder.glob("*.new"))


@pytest.mark.long
def test_what_has_passed_is_not_run_again(tmp_path: Path) -> None:
    folder = tmp_path / "reports"
    words = ("--tiny", "--steps", "1", "--out", str(folder), "--resume")
    environ = {"OMP_NUM_THREADS": "1"}
    first = script(*words, "--only", "kernels", **environ)
    assert first.returncode == 0, first.stderr
    again = script(*words, "--only", "kernels,links", **environ)
    assert "== kernels:" not in again.stdout
    assert [(one.name, one.passed) for one in read(folder / "gpu_check.json")[1]] == [("kernels", True), ("links", False)]
    _, outcomes = read(folder / "gpu_check.json")
    write(folder / "gpu_check.json", {"device": "another"}, outcomes)
    refused = script(*words, "--only", "kernels", **environ)
    assert refused.returncode == 2 and "is of another machine or commit" in refused.stderr


PAGE = ROOT / "docs" / "performance.md"


def rows_of_page(text: str) -> dict[str, str]:
    """The line of each part in the page's table: its first of three cells is the part's name and nothing else."""
    lines = (re.fullmatch(r"\| `([\w-]+)` \|[^|]+\|[^|]+\|", line) for line in text.splitlines())
    return {line[1]: line[0] for line in lines if line is not None}


def test_every_part_has_its_row_in_the_documentation() -> None:
    parts = [part.name for part in all_parts(Setting(Path("out"), EXAMPLE_MEMORY))]
    assert list(rows_of_page(PAGE.read_text())) == parts


def test_parts_that_need_several_gpus_are_named_where_there_is_one() -> None:
    one, eight = (all_parts(Setting(Path("out"), EXAMPLE_MEMORY, gpus=gpus)) for gpus in (1, 8))
    assert [part.name for part in one if part.obstacle == "needs 2 GPUs or more, and 1 is here"] == [
        *("ab-priority", "ab-tp-comm-overlap", "ab-tp-symm-mem", "ab-pp-ctas", "ab-attention-cp", "ab-grad-reduce-in-bf16-dp")
    ]
    assert all(part.obstacle is None for part in eight)
    [command] = [part.command for part in eight if part.name == "ab-pp-ctas"]
    assert command[1:6] == ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8")
    assert command[6:9] == ("-m", "tools.gpucheck.ab", "pp-ctas")


@pytest.mark.few(1, all=2)
@pytest.mark.long
@pytest.mark.parametrize("name", ["ab-priority", "ab-tp-comm-overlap", "ab-pp-ctas", "ab-attention-cp", "ab-grad-reduce-in-bf16-dp"])
def test_switches_between_processes(name: str, tmp_path: Path) -> None:
    """Two processes over gloo, where these options decide nothing or little: both variants train, in turns."""
    [part] = [part for part in all_parts(Setting(tmp_path, EXAMPLE_MEMORY, tiny=True, gpus=2)) if part.name == name]
    done = subprocess.run(part.command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = json.loads(Path(part.json or "").read_text())
    assert len(rows) == 2 and rows[0]["ratio"] == 1.0 and all(row["same_losses"] == "yes" and row["step_ms"] > 0 for row in rows)


@pytest.mark.long
def test_graphs_of_one_of_eight_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The tiny part, whose turns replay by running again, in this process: on a host nothing else replays."""
    [whole] = [part for part in all_parts(Setting(tmp_path, EXAMPLE_MEMORY)) if part.name == "ab-graphs"]
    assert "--tensor-model-parallel-size 8 --emulate-dp 8 " in " ".join(whole.command) and whole.obstacle is None
    [part] = [part for part in all_parts(Setting(tmp_path, EXAMPLE_MEMORY, tiny=True, gpus=0)) if part.name == "ab-graphs"]
    assert part.obstacle == "needs a GPU"
    replays = []

    def alone(config: Config, options: ab.AbConfig) -> Sample:
        torch.manual_seed(0)  # as a process begins with one seed
        with rerunning() as told:
            measure = _measure(Task(Entry("ours", "bf16"), config, 0, options.emulate_dp))
            before = measure(options.warmup).losses
            sample = measure(options.steps)
        dist.destroy_process_group()
        gc.unfreeze()
        replays.append(told.count("replay"))
        return replace(sample, losses=before + sample.losses)

    monkeypatch.setattr(ab, "alone", alone)
    place = part.command.index("graphs")
    assert ab.main([*part.command[place:]]) == 0
    assert replays == [0, 4, 0, 4], "one step of one microbatch through two blocks, forward and backward, in each of two rounds"
    rows = json.loads((tmp_path / "ab-graphs.json").read_text())
    assert [(row["variant"], row["same_losses"]) for row in rows] == [("off", "yes"), ("on", "yes")]
    assert "graphs: on: " in capsys.readouterr().out


def test_what_is_no_switch_is_refused() -> None:
    with pytest.raises(ConfigError, match="SWITCH: got nothing, expected one of attention, flash-attention-3, graphs, deterministic"):
        ab.main(["nothing"])


def test_rows_of_a_switch() -> None:
    samples = [Sample(seconds, seconds, (1.0, loss), 7) for seconds, loss in ((2.0, 3.0), (1.0, 3.0), (4.0, 3.0), (3.0, 3.5))]
    rows = ab.rows_of("deterministic", {"off": samples[:2], "on": samples[2:], "never": []})
    assert [(row.variant, row.step_ms, row.ratio, row.same_losses) for row in rows] == [
        ("off", 1500.0, 1.0, "yes"),
        ("on", 3500.0, 2.5, "no"),
    ]
    assert [row.same_losses for row in ab.rows_of("attention", {"flash": samples[:1]})] == ["one turn"]
    other = [replace(sample, losses=(2.0, 3.0)) for sample in samples[:2]]
    for switch, alike in (("attention", "yes"), ("graphs", "no")):
        assert [row.same_losses for row in ab.rows_of(switch, {"off": samples[:2], "on": other})] == ["yes", alike], switch


def test_figures_become_rows_of_the_documentation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By one command. It replaces what says that nothing was measured, of parts that passed, and nothing else; twice is once."""
    page, report = tmp_path / "page.md", tmp_path / "report.json"
    before = PAGE.read_text()
    measured = rows_of_page(before)["kernels"].replace(f"| {UNMEASURED} |", "| measured before |")
    before = before.replace(rows_of_page(before)["kernels"], measured)
    page.write_text(before)
    rows = tuple(json.loads(ROWS))
    command = f"{sys.executable} -m tools.bench_step --model llama2-7b"
    outcomes = [
        Outcome("step-7b-4096", "7B | 20 layers", command, "passed", 61.4, rows, absent=("liger: not here",)),
        Outcome("correct", "tests", f"{sys.executable} -m pytest", "passed", 61.4),
        Outcome("kernels", "kernels", "bench", "passed", 1.0, rows),
        Outcome("step-8b-4096", "8B", "bench b", "failed with 1", 2.0, rows),
        Outcome("links", "links", "bench c", "did not run: no time was left", 0.0),
    ]
    write(report, {"device": "GPU of a test", "torch": "2.11", "cuDNN": "91900"}, outcomes)
    assert main(["--into", str(page), str(report)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == [one.name for one in outcomes]
    assert said[2:] == [
        "kernels: has a figure already, left as it is",
        "step-8b-4096: failed with 1: no figure",
        "links: did not run: no time was left: no figure",
    ]
    after = page.read_text()
    found = rows_of_page(after)
    where = "(GPU of a test, torch 2.11, cuDNN 91900; 7B / 20 layers; `python -m tools.bench_step --model llama2-7b`)"
    figure = f"ours: 12346 tokens per second, 62.5% mfu, 1.50 GiB peak memory; absent: liger: not here {where}"
    assert found["step-7b-4096"].endswith(f" | {figure} |")
    assert found["correct"].endswith(" | passed (GPU of a test, torch 2.11, cuDNN 91900; tests; `python -m pytest`) |")
    changed = [(old, new) for old, new in zip(before.splitlines(), after.splitlines(), strict=True) if old != new]
    assert [new for _, new in changed] == [found["correct"], found["step-7b-4096"]]
    assert all(old.endswith(f"| {UNMEASURED} |") for old, _ in changed)
    write(report, {"device": "another GPU"}, outcomes)
    assert main(["--into", str(page), str(report)]) == 0 and page.read_text() == after


def test_without_a_gpu_there_are_no_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, report = tmp_path / "page.md", tmp_path / "report.json"
    page.write_text(PAGE.read_text())
    write(report, {"device": "none: no figure below means anything"}, [Outcome("correct", "", "x", "passed", 1.0)])
    assert main(["--into", str(page), str(report)]) == 2 and page.read_text() == PAGE.read_text()
    assert capsys.readouterr().err == "error: --into: the report is of a machine without a GPU: it has no figures\n"
    write(report, MACHINE, [Outcome("unknown", "", "x", "passed", 1.0)])
    assert main(["--into", str(page), str(report)]) == 2 and page.read_text() == PAGE.read_text()
    assert "the page has no row | `unknown` |" in capsys.readouterr().err
    assert main(["--into", str(page), str(tmp_path / "none.json")]) == 2


def test_tables_for_the_documentation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = (*json.loads(ROWS), {"name": "hf-compile", "tokens_per_second": 1.5, "mfu": 0.5, "peak_memory_bytes": 0, "ratio": 1.0})
    outcomes = [
        Outcome("a", "7B", "bench --json a", "passed", 61.4, rows, absent=("liger: not here",)),
        Outcome("b", "8B", "bench b", "failed with 1", 2.0, rows[:1], tail="one\ntwo\n"),
    ]
    write(tmp_path / "report.json", MACHINE, outcomes)
    assert read(tmp_path / "report.json") == (MACHINE, outcomes)
    assert main(["--table", str(tmp_path / "report.json")]) == 0
    text = capsys.readouterr().out
    assert text.splitlines() == list(markdown(MACHINE, outcomes))
    assert text.splitlines() == [
        "device GPU of a test; torch 2.",
        "",
        "| part | result | seconds | command |",
        "|---|---|---|---|",
        "| 7B | passed | 61 | `bench --json a` |",
        "| 8B | failed with 1 | 2 | `bench b` |",
        "",
        "7B:",
        "",
        "| name | tokens per second | mfu | peak memory, GiB | ratio |",
        "|---|---|---|---|---|",
        "| ours | 12346 | 62.5% | 1.50 |  |",
        "| hf-compile | 1.5 | 50.0% | 0.00 | 1 |",
        "",
        "- absent: liger: not here",
        "",
        "8B (failed with 1):",
        "",
        "| name | tokens per second | mfu | peak memory, GiB | ratio |",
        "|---|---|---|---|---|",
        "| ours | 12346 | 62.5% | 1.50 |  |",
        "",
        "    one",
        "    two",
    ]
    second = [Outcome("c", "links", "bench c", "passed", 1.0)]
    write(tmp_path / "more.json", {"device": "another"}, second)
    assert main(["--table", str(tmp_path / "report.json"), str(tmp_path / "more.json")]) == 0
    assert capsys.readouterr().out.splitlines() == list(markdown(MACHINE, [*outcomes, *second]))


def test_what_is_no_report_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("[]", "no json", '{"machine": {}, "parts": [{"name": 1}]}'):
        (tmp_path / "report.json").write_text(text)
        assert main(["--table", str(tmp_path / "report.json")]) == 2
        assert capsys.readouterr().err.startswith("error: --table: ")
    assert main(["--table", str(tmp_path / "none.json")]) == 2
    part = part_of(tmp_path, "report", "")
    assert rows_of(part) == ((), ())
    absent = '{"rows": [{"name": "exact"}], "absent": {"torchao": "not installed"}}'
    for text, count, missing in (("3", 0, 0), ('{"rows": 3}', 0, 0), ("[1]", 0, 0), (absent, 1, 1), ('[{"name": "ours"}]', 1, 0)):
        (tmp_path / "report.json").write_text(text)
        assert [len(found) for found in rows_of(part)] == [count, missing]


def test_links_are_modelled_on_a_gpu_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_links.main([]) == 2
    assert capsys.readouterr().err.startswith("error: no GPU here")
    with pytest.raises(SystemExit):
        bench_links.parse(["--gigabytes-per-second", "fast"])
    assert bench_links.hidden_share(100.0, 110.0, 150.0) == pytest.approx(0.8)
    assert bench_links.hidden_share(100.0, 100.1, 100.5) is None
    options = bench_links.parse(["--layers", "2", "--ranks", "4", "--microbatches", "3"])
    config = bench_links.configuration(options, "optim_grads_params")
    assert (config.model.num_hidden_layers, config.training.global_batch_size) == (2, 12)
    assert config.parallel.data_parallel_sharding_strategy == "optim_grads_params"
