"""What is free where memory is limited: by the machine, a container, a batch system."""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_llama.engine.comm.host_memory import free_bytes

GIB = 1 << 30


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def machine(folder: Path, available: int, groups: str) -> None:
    write(folder, {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:  {available // 1024} kB\n", "proc/self/cgroup": groups})


def group(limit: str, used: int, files: int, *, old: bool = False) -> dict[str, str]:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_") if old else ("memory.max", "memory.current", "")
    stat = f"anon 7\n{names[2]}inactive_file {files // 4}\n{names[2]}active_file {files - files // 4}\nshmem 5\n"
    return {names[0]: f"{limit}\n", names[1]: f"{used}\n", "memory.stat": stat}


def test_a_machine_without_groups_has_what_it_says(tmp_path: Path) -> None:
    machine(tmp_path, GIB // 2, "")
    assert free_bytes(tmp_path) == GIB // 2
    assert free_bytes(tmp_path / "nothing") == free_bytes(tmp_path / "nowhere") > 1 << 28, "all there is"
    assert 0 < free_bytes() <= free_bytes(tmp_path / "nothing")


@pytest.mark.parametrize("old", [False, True])
def test_what_a_container_keeps_of_files_is_free(old: bool, tmp_path: Path) -> None:
    """A run that has read its data and a checkpoint has filled the container's memory with them."""
    machine(tmp_path, GIB, "4:cpu,memory:/docker/abc\n" if old else "0::/\n")
    mount = tmp_path / ("sys/fs/cgroup/memory" if old else "sys/fs/cgroup")
    write(mount, group(str(GIB // 2), GIB // 2, GIB // 4, old=old))
    assert free_bytes(tmp_path) == GIB // 4
    write(mount, group(str(GIB // 2), GIB, 0, old=old))
    assert free_bytes(tmp_path) == 0


def test_the_limit_of_a_job_is_found_in_the_groups_that_hold_its_processes(tmp_path: Path) -> None:
    machine(tmp_path, GIB, "0::/system.slice/slurmstepd.scope/job_7/step_0\n")
    mount = tmp_path / "sys/fs/cgroup"
    for folder, limit in (("system.slice/slurmstepd.scope/job_7/step_0", "max"), ("system.slice", "max")):
        write(mount / folder, group(limit, 1, 0))
    assert free_bytes(tmp_path) == GIB
    write(mount / "system.slice/slurmstepd.scope/job_7", group(str(GIB // 8), GIB // 16, 0))
    assert free_bytes(tmp_path) == GIB // 16
