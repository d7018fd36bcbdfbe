"""Dispatch, help and exit status, without a run behind them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest
from megatron_llama import __version__, cli
from megatron_llama.cli import COMMANDS, main
from megatron_llama.config.parse import flag, options_of
from megatron_llama.config.sections import config_sections
from megatron_llama.converter.configs import ConvertConfig
from megatron_llama.data.preprocess_config import PreprocessConfig
from megatron_llama.errors import UserError
from megatron_llama.planner.configs import ScheduleConfig
from megatron_llama.train.api.common import hub
from megatron_llama.train.api.common.configs import GenerateConfig
from megatron_llama.train.commands.common.configs import EvaluateConfig, ExportConfig

ROOT = Path(__file__).parent.parent


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit status, output and complaints of a command."""
    status = main(argv)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize("argv", [(), ("--help",), ("-h",), ("help",)])
def test_the_overview_names_every_command(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = said(capsys, *argv)
    assert (status, err) == (0, "")
    for name, command in COMMANDS.items():
        assert f"  {name:<11}{command.summary}\n" in out
        assert "--" not in command.words or "--config" in command.words or f"  {name} {command.words}\n" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--version") == (0, f"{__version__}\n", "")


@pytest.mark.parametrize(
    ("command", "sections"),
    [
        ("pretrain", config_sections()),
        ("evaluate", [EvaluateConfig]),
        ("preprocess", [PreprocessConfig]),
        ("generate", [GenerateConfig]),
        ("export", [ExportConfig]),
        ("convert", [ConvertConfig]),
        ("schedule", [ScheduleConfig]),
    ],
)
def test_help_names_every_option(command: str, sections: list[type], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = said(capsys, command, "--help")
    assert (status, err) == (0, "")
    assert out.startswith(f"usage: python -m megatron_llama {command} ")
    for section in sections:
        for item in fields(section):
            assert f"\n  {flag(item.name)} " in out


def test_help_of_every_command_imports_nothing_heavy() -> None:
    calls = [[name, "--help"] for name in COMMANDS] + [["--help"], ["--version"], ["pretrain", "-h"], ["pretrian"]]
    heavy = ("torch", "numpy", "yaml", "tokenizers", "sentencepiece", "safetensors", "tqdm")
    code = f"import sys\nfrom megatron_llama.cli import main\nfor argv in {calls}: main(argv)\nassert not set({heavy}) & set(sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_a_usage_line_can_be_typed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its flags are options of the command, and what stands before them is read without a flag."""
    status, out, _ = said(capsys, name, "--help")
    usage = out.splitlines()[0].removeprefix(f"usage: python -m megatron_llama {name}")
    command = COMMANDS[name]
    known = {"--config", "--option", *(option.flag for option in options_of(command.options()).values())}
    flags = set(re.findall(r"--[a-z-]+", usage))
    assert status == 0 and (name == "inspect" or flags - known <= {"--model"})
    leading = [word for word in usage.split(" [")[0].split(" --")[0].split() if not word.startswith("[")]
    assert name == "inspect" or len(leading) == len(command.positional) * (name != "plan") + bool(command.rest)
    assert "()" not in out and "('" not in out and "(default: )" not in out


def test_notes_are_said_by_every_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What a repeated flag replaced, on the side of the errors: the output may be read by a program."""
    argv = ["schedule", "--num-microbatches", "8", "--num-microbatches", "4"]
    status, out, err = said(capsys, *argv)
    assert status == 0 and "4 microbatches (validated)" in out and "replaces" not in out
    assert err == "note: --num-microbatches 4 replaces --num-microbatches 8, which stands before it\n"
    monkeypatch.setenv("RANK", "1")
    assert said(capsys, *argv)[2] == ""


ALL = "expected one of quickstart, preprocess, pretrain, sft, align, evaluate, data, generate, chat, export, convert, merge, verify, inspect, schedule, plan, prove, report, doctor, env"
UNKNOWN = "got an unknown flag, expected an option of this command"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["pretrian"], f"error: command: got pretrian, {ALL}; did you mean pretrain?\n"),
        (["zzz"], f"error: command: got zzz, {ALL}; see --help\n"),
        (["env", "--all"], f"error: These options cannot be used:\n  - --all: {UNKNOWN}; --help lists the options\n"),
        (
            ["generate", "--train-iters", "1"],
            f"--train-iters: {UNKNOWN}; quickstart, pretrain, sft, align, plan and prove have --train-iters\n",
        ),
        (["preprocess", "--num-workers", "4"], f"--num-workers: {UNKNOWN}; --help lists the options\n"),
        (["generate", "--promt", "x"], f"--promt: {UNKNOWN}; did you mean --prompt?\n"),
        (["inspect"], "error: inspect: got nothing, expected one of config, checkpoint, dataset, presets; write inspect KIND PATH\n"),
        (["inspect", "dataset"], "error: inspect dataset: got nothing, expected one path; write inspect dataset PATH\n"),
        (
            ["inspect", "config", "x", "--verify"],
            "inspect config: got --verify, expected --verify at most, with a checkpoint or a dataset; leave it out\n",
        ),
        (["inspect", "presets", "x"], "error: inspect presets: got x, expected no path; write inspect presets\n"),
    ],
)
def test_wrong_command_lines_exit_with_2(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = said(capsys, *argv)
    assert (status, out) == (2, "") and err.endswith(says)


def test_other_errors_exit_with_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, err = said(capsys, "inspect", "dataset", str(tmp_path / "none"))
    assert (status, out) == (1, "")
    assert err.startswith(f"error: {tmp_path}/none.idx: got no such file")


@pytest.mark.parametrize("launcher", [("RANK", "TORCHELASTIC_RUN_ID"), ("SLURM_PROCID", "SLURM_STEP_ID")], ids=["torchrun", "srun"])
def test_what_every_rank_sees_is_said_by_rank_0_alone(launcher: tuple[str, str]) -> None:
    """The others wait to be ended: torchrun ends rank 0 as soon as one has ended before it."""
    rank, job = launcher
    waiting = "wait = signal.sigtimedwait; signal.sigtimedwait = lambda *given: print('waits', flush=True) or wait(*given)"
    code = f"import signal, sys; {waiting}; from megatron_llama.cli import main; sys.exit(main(['pretrain', '--lr', 'fast']))"
    rank3 = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, rank: "3", job: "1"}, stdout=subprocess.PIPE, text=True
    )
    assert rank3.stdout is not None and rank3.stdout.readline() == "waits\n"
    rank0 = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, rank: "0", job: "1"}, capture_output=True, text=True)
    assert (rank0.returncode, rank0.stdout) == (2, "") and "--lr: got fast, expected a number" in rank0.stderr
    rank3.terminate()
    assert (rank3.wait(), rank3.stdout.read()) == (2, "")


def test_what_one_rank_sees_is_said_by_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    status, out, err = said(capsys, "inspect", "dataset", "none")
    assert (status, out) == (1, "") and err.startswith("error on rank 3: none.idx: got no such file")


def test_a_reader_who_leaves_early_is_no_error() -> None:
    """``pretrain --help | head -1``, on the reader's side closed before the first line."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-u", "-m", "megatron_llama", "pretrain", "--help"]
    ended = subprocess.run(command, cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_option_names_are_unique_within_a_command() -> None:
    from megatron_llama.train.commands.pretrain import SECTIONS

    assert len(options_of(SECTIONS)) == sum(len(fields(section)) for section in SECTIONS)


def test_presets_can_be_inspected(capsys: pytest.CaptureFixture[str]) -> None:
    from megatron_llama.model.presets import PRESETS

    status, out, _ = said(capsys, "inspect", "presets")
    assert status == 0 and [line.split()[0] for line in out.splitlines()] == list(PRESETS)
    assert "llama3-8b            8,030,261,248  32 layers, hidden 4096, heads 32/8, vocabulary 128256\n" in out


def test_env_names_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    status, out, _ = said(capsys, "env")
    rows = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert status == 0 and rows["torch"] == torch.__version__ and rows["megatron_llama"] == __version__ and "gloo" in rows["backends"]
    assert {"python", "platform", "device", "memory", "numpy", "safetensors", "transformers", "apex"} <= rows.keys()


@pytest.mark.parametrize(
    ("files", "said_of_it"),
    [
        ((), "not installed"),
        (
            ("apex/lib/libapex.py", "apex/views.py"),
            "0.9.10.dev0: not NVIDIA's apex but PyPI's package of that name, a toolkit for web applications; uninstall it",
        ),
        (("apex/normalization/fused_layer_norm.py",), "0.9.10.dev0, NVIDIA's, built without its kernels"),
        (("apex/normalization/fused_layer_norm.py", "amp_C.py"), "0.9.10.dev0, NVIDIA's"),
    ],
    ids=["none", "PyPI's", "NVIDIA's without kernels", "NVIDIA's"],
)
def test_which_apex_is_here(files: tuple[str, ...], said_of_it: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the files that an installation leaves."""
    from megatron_llama.train.commands.env import apex_found

    for name in (*files, *(("apex/__init__.py", "apex-0.9.10.dev0.dist-info/METADATA") if files else ())):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("Name: apex\nVersion: 0.9.10.dev0\n" if name.endswith("METADATA") else "")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert apex_found() == said_of_it


def shown_commands() -> list[tuple[str, list[str]]]:
    """The words behind ``-m megatron_llama`` in the blocks of all pages, and where they stand."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = []
    for page in pages:
        blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
        text = "".join(block for kind, block in blocks if kind in ("", "bash", "text"))
        lines = text.replace("\\\n", " ").splitlines()
        for line in (line for line in lines if re.search("(python|torchrun|srun) .*-m megatron_llama ", line)):
            behind = re.sub(r"\$\(.*?\)", "", line.split(" -m megatron_llama ")[1])
            words = shlex.split(re.split(r" # | \$[@{]|;| \|| \.\.\.", behind)[0])
            found.append((f"{page.name}: {line}", words))
    return found


def test_what_pages_show_are_commands_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that only the reader has count as empty ones."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "imported", lambda name: lambda parsed: None)
    monkeypatch.setattr(hub, "with_folders", lambda parsed, **options: parsed)
    shown = shown_commands()
    assert len(shown) > 50, shown
    wrong = []
    for where, words in shown:
        for file in (file for option, file in pairwise(words) if option == "--config"):
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).touch()
        try:
            cli.run(words)
        except UserError as error:
            wrong.append(f"{where}\n{error}")
    assert not wrong, "\n\n".join(wrong)
