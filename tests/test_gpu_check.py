"""tools/gpu_check.sh where there is no GPU: its command line, its one error, the parts it would run, and how it runs and reports them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_llama.memory import USABLE, MemoryPlan
from megatron_llama.presets import PRESETS
from tools import bench_links
from tools.gpucheck.__main__ import EXAMPLE_MEMORY, check, main, parse
from tools.gpucheck.parts import Part, Setting, all_parts, configuration, layers_that_fit
from tools.gpucheck.report import Outcome, markdown, read, rows_of, write

ROOT = Path(__file__).parent.parent
MACHINE = {"device": "GPU of a test", "torch": "2"}


def test_without_a_gpu_there_is_one_error(tmp_path: Path) -> None:
    """Of the script itself, before anything is written."""
    command = ["bash", str(ROOT / "tools" / "gpu_check.sh"), "--out", str(tmp_path / "reports")]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "VIRTUAL_ENV": ""})
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and "sees no GPU" in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "reports").exists()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--only", "tests,nothing"], "--only: no part begins with nothing; there are tests, kernels, step-7b-4096"),
        (["--rounds", "0"], "--rounds and --steps are at least 1"),
        (["--minutes", "-1"], "--minutes is positive"),
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
    assert [line.partition(":")[0] for line in lines] == ["step-8b-4096", "step-8b-4096-dp8", "step-8b-8192", "step-8b-8192-dp8", "links"]
    assert all(f"--model llama3-8b --seq-length {length} " in line for line, length in zip(lines, (4096, 4096, 8192, 8192), strict=False))
    assert all("--num-layers 4 " in line and "--rounds 1 " in line for line in lines[:4])
    assert "--global-batch-size 8 " in lines[0] and lines[0].count("hf-compile") == 1
    assert "--global-batch-size 64 " in lines[1] and "--emulate-dp 8 --contenders ours --json" in lines[1]


def test_whole_models_are_trained_as_one_of_eight_ranks() -> None:
    parts = {part.name: part for part in all_parts(Setting(Path("out"), EXAMPLE_MEMORY))}
    assert [name for name in parts if name.startswith("step-7b")] == ["step-7b-4096", "step-7b-4096-dp8", "step-7b-8192", "step-7b-8192-dp8"]
    assert "--num-layers" not in parts["step-7b-4096-dp8"].command and "32 of 32 layers" in parts["step-7b-4096-dp8"].title
    assert all(part.json == f"out/{name}.json" and part.command[-1] == part.json for name, part in parts.items() if name != "tests")
    assert parts["tests"].command[-2:] == ("-m", "gpu or kernels")


@pytest.mark.parametrize("memory", [8 * 2**30, 80 * 10**9, EXAMPLE_MEMORY])
@pytest.mark.parametrize(("preset", "length"), [("llama2-7b", 4096), ("llama3-8b", 8192)])
def test_as_many_layers_as_fit(preset: str, length: int, memory: int) -> None:
    """By the plan: one more would not."""
    layers = layers_that_fit(preset, length, memory)
    needed = [MemoryPlan(configuration(preset, length, layers=n, dp=1), 1).needed("none", 0) for n in (layers, layers + 1)]
    assert layers == 1 or needed[0] <= USABLE * memory
    assert layers == PRESETS[preset].num_hidden_layers or needed[1] > USABLE * memory


def script(tmp_path: Path, name: str, code: str) -> Part:
    """A part that runs some Python."""
    report = str(tmp_path / f"{name}.json")
    return Part(name, f"the part {name}", (sys.executable, "-c", code, report), report)


ROWS = '[{"name": "ours", "tokens_per_second": 12345.6, "mfu": 0.625, "peak_memory_bytes": 1610612736, "ratio": null}]'


def test_a_part_that_fails_does_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One fails behind its rows, one before them, one takes too long and leaves a process, one is not there, and the last one passes."""
    folder, left = tmp_path / "reports", tmp_path / "left"
    (tmp_path / "early.json").write_text(ROWS)  # an earlier check's
    child = f"import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid, file=open({str(left)!r}, 'w'), flush=True); time.sleep(600)"
    parts = [
        script(tmp_path, "late", f"import sys; open(sys.argv[1], 'w').write('''{ROWS}'''); sys.exit(3)"),
        script(tmp_path, "early", "raise RuntimeError('nothing yet')"),
        script(tmp_path, "slow", child),
        script(tmp_path, "last", f"import sys; open(sys.argv[1], 'w').write('''{ROWS}''')"),
    ]
    assert check(parts, folder, 5.0, MACHINE) == 1
    said = capsys.readouterr()
    assert said.err == f"error: 3 of 4 parts failed: late, early, slow; see {folder}/NAME.log\n"
    assert "nothing yet" in (folder / "early.log").read_text()
    machine, outcomes = read(folder / "gpu_check.json")
    assert machine == MACHINE
    assert [(one.name, one.status, len(one.rows)) for one in outcomes] == [
        ("late", "failed with 3", 1),
        ("early", "failed with 1", 0),
        ("slow", "took too long", 0),
        ("last", "passed", 1),
    ]
    state = Path(f"/proc/{left.read_text().strip()}/stat")
    assert not state.exists() or state.read_text().split()[2] in "ZX"
    assert check(parts[3:], folder, 60.0, MACHINE) == 0


def test_tables_for_the_documentation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = (*json.loads(ROWS), {"name": "hf-compile", "tokens_per_second": 1.5, "mfu": 0.5, "peak_memory_bytes": 0, "ratio": 1.0})
    outcomes = [Outcome("a", "7B", "bench --json a", "passed", 61.4, rows), Outcome("b", "8B", "bench b", "failed with 1", 2.0, rows[:1])]
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
        "8B (failed with 1):",
        "",
        "| name | tokens per second | mfu | peak memory, GiB | ratio |",
        "|---|---|---|---|---|",
        "| ours | 12346 | 62.5% | 1.50 |  |",
    ]


def test_what_is_no_report_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("[]", "no json", '{"machine": {}, "parts": [{"name": 1}]}'):
        (tmp_path / "report.json").write_text(text)
        assert main(["--table", str(tmp_path / "report.json")]) == 2
        assert capsys.readouterr().err.startswith("error: --table: ")
    assert main(["--table", str(tmp_path / "none.json")]) == 2
    part = script(tmp_path, "report", "")
    assert rows_of(part) == ()
    for text, count in (("3", 0), ('{"rows": 3}', 0), ("[1]", 0), ('{"machine": {}, "rows": [{"name": "exact"}]}', 1), ('[{"name": "ours"}]', 1)):
        (tmp_path / "report.json").write_text(text)
        assert len(rows_of(part)) == count


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


def test_kernels_are_compared_on_a_host_with_torch_alone(tmp_path: Path) -> None:
    """The tool runs to its end; there are no figures of a GPU to be had."""
    command = [sys.executable, "-m", "tools.bench_kernels", "--tokens", "8", "--scale", "64", "--rounds", "1", "--json", str(tmp_path / "rows")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows").read_text())
    names = {(row["name"], row["contender"]) for row in rows}
    assert names >= {(name, "torch") for name in ("residual + RMSNorm", "RoPE", "SwiGLU", "cross entropy", "AdamW", "weight gradient")}
    assert all(row["ms"] > 0 for row in rows)
