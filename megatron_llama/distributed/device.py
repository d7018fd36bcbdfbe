"""The one module that knows which accelerator runs the model; everything else asks here."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import AbstractContextManager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensor


def accelerator(local_rank: int) -> torch.device:
    """This process's device: its GPU where there is one, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def use_allocator(settings: str) -> None:
    """How a GPU's memory is handed out, in the words of PYTORCH_ALLOC_CONF. Before the first tensor
    there; nothing on a host."""
    if torch.cuda.is_available():
        torch.cuda.memory._set_allocator_settings(settings)


def accelerator_count() -> int:
    """GPUs of this machine."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def backend(device: torch.device) -> str:
    """The torch.distributed backend. CPU tensors (checkpoint metadata) always travel over gloo."""
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def one_connection_per_peer(device: torch.device) -> bool:
    """Whether communicators over the same ranks should be one. Over sockets, messages of one
    communicator go out in the order in which they were issued, those of two share the link as they
    like. A GPU's communicator runs one operation at a time."""
    return is_host(device)


def is_host(device: torch.device) -> bool:
    """Whether the host itself computes, so that waiting for communication is time on the host's
    clock."""
    return device.type == "cpu"


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory because a run is only traced: then it does not matter what
    suits the processor that does so."""
    return isinstance(tensor, FakeTensor)


def name(device: torch.device) -> str:
    """What the vendor calls it."""
    return (
        platform.processor() or platform.machine()
        if is_host(device)
        else torch.cuda.get_device_name(device)
    )


@cache
def prefers_onednn() -> bool:
    """Whether fp32 products on the host are faster by oneDNN than by MKL, which uses AVX-512 on
    Intel's processors only."""
    known = hasattr(torch.ops.mkldnn, "_linear_pointwise") and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    info = Path("/proc/cpuinfo")
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return (
        known
        and wide
        and info.exists()
        and "AuthenticAMD" in info.read_text(encoding="utf-8", errors="replace")[:4096]
    )


@cache
def multiplies_bf16() -> bool:
    """Whether the host's processor has instructions for products in bf16 of wide vectors or
    tiles."""
    kinds = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, kind, bool)()) for kind in kinds)


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle. Only for timing at log lines, never inside a step."""
    if not is_host(device):
        torch.cuda.synchronize(device)


def reset_peak_memory(device: torch.device) -> None:
    """Start ``peak_memory_bytes`` anew, where it is known."""
    if is_host(device):
        with suppress(FileNotFoundError), open("/proc/self/clear_refs", "w") as switch:
            switch.write("5")
    else:
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int | None:
    """Largest memory so far, or since ``reset_peak_memory``: allocated bytes on a GPU, resident set
    of the process on a CPU. None where the system does not say: only Linux does."""
    return (
        _largest_resident_set(Path("/proc/self/status"))
        if is_host(device)
        else torch.cuda.max_memory_allocated(device)
    )


def _largest_resident_set(status: Path) -> int | None:
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), None)


def timed_event(device: torch.device) -> torch.Event:
    """An event with a time, recorded on the current stream."""
    event = torch.Event(device, enable_timing=True)
    event.record(current_stream(device))
    return event


def memory_bytes(device: torch.device) -> int:
    """Memory of the device; of the machine on a CPU."""
    if is_host(device):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(torch.cuda.get_device_properties(device).total_memory)


def runs_triton(device: torch.device) -> bool:
    """Whether Triton's kernels may run: it is installed, and the device can do what they need. On a
    host only in Triton's interpreter, which tests choose before they import it."""
    if is_host(device):
        triton = sys.modules.get("triton")
        return triton is not None and bool(triton.knobs.runtime.interpret)
    return (
        torch.version.hip is None
        and find_spec("triton") is not None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def capability(device: torch.device) -> tuple[int, int]:
    """Generation of a GPU, (9, 0) for Hopper; (0, 0) of a host."""
    return (0, 0) if is_host(device) else torch.cuda.get_device_capability(device)


def multiprocessors(device: torch.device) -> int:
    """Units of the device that run programs side by side."""
    return (
        2
        if is_host(device)
        else int(torch.cuda.get_device_properties(device).multi_processor_count)
    )


def new_stream(device: torch.device) -> torch.Stream:
    """A stream of its own for work beside the computation."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def current_stream(device: torch.device) -> torch.Stream:
    """The stream that the caller's work goes to."""
    return torch.cuda.current_stream(device)


def on_stream(stream: torch.Stream) -> AbstractContextManager[object]:
    """Work issued inside goes to this stream."""
    return torch.cuda.stream(stream)  # type: ignore[arg-type]


def record_memory(device: torch.device, *, on: bool) -> None:
    """Begin or end to note every allocation on the device. The host's are not noted."""
    if not is_host(device):
        torch.cuda.memory._record_memory_history("all" if on else None)


def write_memory(device: torch.device, path: str) -> None:
    """Write what was noted; nothing on a host."""
    if not is_host(device):
        torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]


def pin(memory: torch.Tensor, device: torch.device) -> None:
    """Register host memory with the device's driver, so that copies run at full speed and beside
    the host."""
    if not is_host(device):
        status = torch.cuda.cudart().cudaHostRegister(  # type: ignore[no-untyped-call]
            memory.data_ptr(), memory.numel() * memory.element_size(), 0
        )
        torch.cuda.check_error(status)


def unpin(memory: torch.Tensor, device: torch.device) -> None:
    """Undo ``pin``, before the memory is freed."""
    if not is_host(device):
        status = torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
        torch.cuda.check_error(status)


def host_event(device: torch.device) -> torch.Event:
    """An event that the host waits for asleep, its processor being needed; recorded on the current
    stream."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch.Event takes no notice of it
    event.record(current_stream(device))
    return event


def physical_cores() -> tuple[int, ...]:
    """The processors that this process may run on, one of each physical core; all of them where the
    system does not say."""
    allowed = (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(os.cpu_count() or 1))
    )
    first: dict[str, int] = {}
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        first.setdefault(siblings.read_text().strip() if siblings.exists() else str(cpu), cpu)
    return tuple(first.values())


def copy_to_host(values: torch.Tensor) -> tuple[torch.Tensor, torch.Event | None]:
    """The same values on the host when the event has happened, which comes behind what was issued
    so far. None: at once."""
    if is_host(values.device):
        return values, None
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    copy.copy_(values, non_blocking=True)
    event = torch.Event(values.device)
    event.record(current_stream(values.device))
    return copy, event


def wait_for_copies(device: torch.device) -> None:
    """Wait until copies to the host that the caller has issued are complete."""
    if not is_host(device):
        torch.cuda.current_stream(device).synchronize()
