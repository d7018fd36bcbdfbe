"""Processor, devices, memory, disk and limits of this machine."""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.host_memory import free_bytes
from megatron_llama.engine.offload.worker import physical_cores
from megatron_llama.engine.plan.memory import sized
from megatron_llama.train.doctor.findings import Finding

GIB = 1 << 30
LEAST_DISK = GIB
"""Bytes: less would be full with the first checkpoint of a small model."""
LEAST_SHARED_MEMORY = GIB
"""Bytes of /dev/shm, which NCCL uses between GPUs of a machine that cannot reach each other's
memory. A container has 64 MB by default."""
LEAST_FILES = 1024
"""Open files of a process: gloo has a socket for each rank on each axis."""
WRITTEN = 64 << 20
"""Bytes that are written to measure the speed of a folder."""
SQUARE = 512
"""Rows and columns of the products that are timed."""
TIMED_SECONDS = 0.2


def processor() -> Iterator[Finding]:
    """Yield the host's processor and its speed."""
    yield Finding("name", processor_name())
    cores = physical_cores()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = f"torch takes {torch.get_num_threads()} threads"
    yield Finding("cores", f"{len(cores)} physical, {usable} processors; {threads}")
    yield Finding("vector width", torch.backends.cpu.get_cpu_capability())
    yield Finding(
        "bf16",
        "instructions for matrix products"
        if devices.multiplies_bf16()
        else "no instructions for matrix products: fp32 is faster on this host",
    )
    rates = {
        dtype: f"{_products_per_second(dtype) * 2 * SQUARE**3 / 1e9:.0f} GFLOP/s in {label}"
        for dtype, label in ((torch.float32, "fp32"), (torch.bfloat16, "bf16"))
    }
    yield Finding("products", f"{', '.join(rates.values())} ({SQUARE} x {SQUARE} matrices)")


def accelerators() -> Iterator[Finding]:
    """Yield the GPUs, and the libraries that run on them."""
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    yield Finding.unless(
        backends["gloo"],
        "backends",
        ", ".join(name for name, there in backends.items() if there) or "none",
        expected="gloo",
        do="install a torch with gloo: the wheels for Linux and macOS have it",
    )
    toolkits = [f"{name} {version}" for name, version in devices.toolkits().items()]
    yield Finding("torch built for", ", ".join(toolkits) or "the host alone")
    gpus = devices.accelerators()
    if not gpus:
        yield Finding("GPUs", "none")
        return
    for gpu in gpus:
        major, minor = devices.capability(gpu)
        size = sized(devices.memory_bytes(gpu))
        yield Finding(str(gpu), f"{devices.name(gpu)}, {size}, capability {major}.{minor}")
    kernels = "Triton's" if devices.runs_triton(gpus[0]) else "torch's: no Triton for this device"
    yield Finding("kernels", kernels)
    yield Finding.unless(
        backends["nccl"],
        "exchange of GPUs",
        "over NCCL" if backends["nccl"] else "impossible",
        expected="NCCL",
        do="install torch's wheel for CUDA on Linux",
    )


def memory() -> Iterator[Finding]:
    """Yield the host's memory."""
    total = devices.memory_bytes(torch.device("cpu"))
    yield Finding("host", f"{sized(total)}, {sized(free_bytes())} free for this process")
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        yield Finding.unless(
            size >= LEAST_SHARED_MEMORY or devices.accelerator_count() < 2,
            "/dev/shm",
            sized(size),
            expected=f"at least {sized(LEAST_SHARED_MEMORY)}, over which NCCL's processes exchange",
            do="start the container with --shm-size=8g or --ipc=host",
        )


def disk() -> Iterator[Finding]:
    """Yield the folders that a run writes into by default: the working folder and that of temporary
    files. Each is written to, and left as it was."""
    yield _folder("working folder", Path.cwd())
    yield _folder("temporary files", Path(tempfile.gettempdir()))


def limits() -> Iterator[Finding]:
    """Yield the limits of the shell that matter (``ulimit -a``)."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Finding.unless(
        files == resource.RLIM_INFINITY or files >= LEAST_FILES,
        "open files",
        _limit(files),
        expected=f"at least {LEAST_FILES}: each rank opens sockets to others",
        do="ulimit -n 65536",
    )
    size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield Finding.unless(
        size == resource.RLIM_INFINITY,
        "file size",
        _limit(size),
        expected="unlimited: checkpoints are large files",
        do="ulimit -f unlimited",
    )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield Finding.unless(
        locked == resource.RLIM_INFINITY or devices.accelerator_count() == 0,
        "locked memory",
        _limit(locked),
        expected="unlimited: memory for copies and for InfiniBand is pinned",
        do="ulimit -l unlimited",
    )
    yield Finding("processes", _limit(resource.getrlimit(resource.RLIMIT_NPROC)[0]))
    yield Finding("core files", _limit(resource.getrlimit(resource.RLIMIT_CORE)[0]))


def processor_name() -> str:
    """Return the name that Linux gives the processor, else the name of its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace") if info.exists() else ""
    names = [line for line in lines.splitlines() if line.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else platform.machine()


def _products_per_second(dtype: torch.dtype) -> float:
    """Return the rate of matrix products on the host, timed for a moment. The first, which sets
    things up, is left out."""
    left, right = torch.ones(SQUARE, SQUARE, dtype=dtype), torch.ones(SQUARE, SQUARE, dtype=dtype)
    _ = left @ right
    return _times_per_second(lambda: left @ right)


def _times_per_second(work: Callable[[], object]) -> float:
    start, done = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < TIMED_SECONDS or done == 0:
        work()
        done += 1
    return done / elapsed


def _folder(name: str, folder: Path) -> Finding:
    """Write a file into a folder, lock it, and remove it again."""
    free = shutil.disk_usage(folder).free
    value = f"{folder} ({_file_system(folder)}), {sized(free)} free"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            written = min(WRITTEN, max(1, free // 16))
            start = time.perf_counter()
            file.write(bytes(written))
            file.flush()
            os.fsync(file.fileno())
            rate = written / (time.perf_counter() - start) / 1e6
    except OSError as error:
        expected = "a folder in which files can be written and locked"
        do = "give --save and --output folders of another file system"
        return Finding(name, f"{value}, {error.strerror}", expected, do)
    return Finding.unless(
        free >= LEAST_DISK,
        name,
        f"{value}, takes {rate:.0f} MB/s",
        expected=f"at least {sized(LEAST_DISK)} free",
        do="remove files, or give --save and --output folders of another disk",
    )


def _file_system(folder: Path) -> str:
    """Return the kind of a folder's file system; a question mark where the system does not tell."""
    table = Path("/proc/mounts")
    lines = table.read_text().splitlines() if table.exists() else []
    mounts = [line.split()[1:3] for line in lines]
    kinds = {Path(mount.replace("\\040", " ")): kind for mount, kind in mounts}
    places = [place for place in (folder, *folder.parents) if place in kinds]
    return kinds[places[0]] if places else "?"


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"
