"""``doctor``: a page about this machine, whatever it is, and about machines on which something is wrong."""

from __future__ import annotations

import resource
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from megatron_llama.cli import main
from megatron_llama.train.doctor import features, machine, network
from megatron_llama.train.doctor.findings import Finding, Section, examined, page, problems
from megatron_llama.train.doctor.trials import trials

from tests.launcher import ROOT

SECTIONS = ("versions", "processor", "devices", "memory", "disk", "limits (ulimit)", "network", "trial", "features")


def named(findings: Iterator[Finding] | Sequence[Finding], name: str) -> Finding:
    return next(finding for finding in findings if finding.name == name)


@pytest.mark.long
def test_the_page_has_every_section_and_its_status_says_whether_something_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trial is no part of the job around it, whose other processes would have to come."""
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "SLURM_PROCID": "3", "SLURM_NTASKS": "8", "MASTER_ADDR": "elsewhere"}.items():
        monkeypatch.setenv(name, value)
    status = main(["doctor"])
    out = capsys.readouterr().out.splitlines()
    assert [line for line in out if not line.startswith(" ") and "problems" not in line] == list(SECTIONS)
    assert status == (0 if out[-1] == "no problems" else 1)
    exchanged = next(line for line in out if "processes  " in line and "exchange" in line)
    assert " over gloo: all-reduce of 16 MiB at " in exchanged or " over nccl: " in exchanged


def test_a_side_that_cannot_be_examined_is_a_problem_and_the_others_are_told() -> None:
    def broken() -> Iterator[Finding]:
        yield Finding("name", "value")
        raise OSError("no /proc here")

    sections = [examined("processor", broken), examined("memory", lambda: [Finding("host", "1 GiB")])]
    assert "processor: got OSError: no /proc here" in problems(sections)[0] and "1 GiB" in page(sections)


def test_few_open_files_are_a_problem() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert not named(machine.limits(), "file size").problem
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        assert "ulimit -n" in named(machine.limits(), "open files").problem
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft >= machine.LEAST_FILES:
        assert not named(machine.limits(), "open files").problem


def test_a_folder_is_written_to_and_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = named(machine.disk(), "working folder")
    assert str(tmp_path) in folder.value and "MB/s" in folder.value and list(tmp_path.iterdir()) == []
    monkeypatch.chdir("/proc")
    assert "(proc)" in (folder := named(machine.disk(), "working folder")).value and "written and locked" in folder.problem


def test_a_name_that_leads_nowhere_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "127.0.0.1" in named(network.network(), "lo").value
    monkeypatch.setattr("socket.gethostname", lambda: "nowhere.invalid")
    assert "nowhere.invalid, which cannot be resolved" in named(network.network(), "host name").problem


@pytest.mark.long
def test_processes_that_cannot_meet_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonesuch0")
    (trial,) = trials()
    assert "nonesuch0" in trial.value and "torch.distributed.run" in trial.problem


def test_every_extra_that_a_user_may_want_is_a_feature() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert features.FEATURES.keys() == extras.keys() - {"test", "kernels"}
    assert all("unknown" not in finding.value for finding in features.features())


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("not installed", "missing: pip install 'pyarrow>=15'"),
        ("14.0.2", "pyarrow 14.0.2 is too old: pip install 'pyarrow>=15'"),
        ("15.0", "pyarrow 15.0"),
    ],
)
def test_a_feature_says_what_it_lacks(version: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "package_version", lambda name: version)
    parquet = named(features.features(), "parquet")
    assert parquet.value == f"{told} (text in .parquet files)" and not parquet.problem


def test_a_missing_dependency_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "versions", lambda: {"torch": "2.11.0", "safetensors": "not installed"})
    assert [finding.name for finding in features.packages() if finding.problem] == ["safetensors"]


def test_problems_are_told_with_their_remedies() -> None:
    wrong = Finding.unless(False, "open files", "256", expected="at least 1024", do="ulimit -n 65536")
    sections = [Section("limits", [wrong, Finding.unless(True, "core files", "0", expected="none", do="nothing")])]
    told = "open files: got 256, expected at least 1024; ulimit -n 65536"
    assert problems(sections) == [told]
    assert page(sections).splitlines()[-2:] == ["problems", f"  - {told}"]
