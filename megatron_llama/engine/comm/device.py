"""The only module that knows which accelerator runs the model. All others ask it."""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.deterministic
from torch._subclasses.fake_tensor import FakeTensor

_LEAST_PRIORITY = 19
"""The least priority of a thread on Linux."""


def accelerator(local_rank: int) -> torch.device:
    """Return the device of this process: its GPU where there is one, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def open_backward(device: torch.device) -> None:
    """Let the thread in which autograd will run the device's backward passes enter its context."""
    if not is_host(device):
        # torch leaves that to the first kernel that is launched there by CUDA's runtime, and warns
        # where a product of cuBLAS comes first. Choosing the device would do nothing on device 0.
        one = torch.ones((), device=device, requires_grad=True)
        (one * one).backward()  # type: ignore[no-untyped-call]


class HelperThread(threading.Thread):
    """A thread of a rank beside the one that computes."""


def computes() -> bool:
    """Whether the calling thread is one that computes: that of the loop, or the one in which
    autograd runs the backward pass of a device's tensors. Both were started by others."""
    return not isinstance(threading.current_thread(), HelperThread)


def start_thread(target: Callable[..., object], *args: object, name: str) -> threading.Thread:
    """Start a daemon thread that calls ``target(*args)`` on the device of the calling thread, and
    return it. The package starts threads only here and in ``thread_pool``, so each is on the device
    of its rank."""
    thread = HelperThread(
        target=_run_on, args=(_chosen_device(), target, *args), name=name, daemon=True
    )
    thread.start()
    return thread


def thread_pool(workers: int) -> ThreadPoolExecutor:
    """Return a pool of ``workers`` threads on the device of the calling thread."""
    return ThreadPoolExecutor(workers, initializer=_run_on, initargs=(_chosen_device(), _nothing))


def take_least_priority() -> None:
    """Let the calling thread run only when a processor has nothing else to do, where a thread has a
    priority of its own."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_PRIORITY)


def _chosen_device() -> int | None:
    """Return the index of the calling thread's device; None where this process uses none."""
    # Asking for the current device would create a context on a GPU that is not used.
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.current_device()


def _run_on(device: int | None, target: Callable[..., object], *args: object) -> None:
    # The driver keeps the current device for each thread, and a new one begins on device 0: its
    # first event, allocation or launch would create a context there, hundreds of MiB for each rank.
    if device is not None:
        torch.cuda.set_device(device)
    target(*args)


def _nothing() -> None:
    pass


def use_allocator(settings: str) -> None:
    """Set how a GPU's memory is allocated, in the syntax of PYTORCH_ALLOC_CONF. Called before the
    first tensor there; does nothing on a host."""
    if torch.cuda.is_available():
        # torch.cuda.memory._set_allocator_settings calls this, and warns, since torch 2.11, that
        # it is deprecated: on every rank.
        torch._C._accelerator_setAllocatorSettings(settings)


@contextmanager
def deterministic(*, wanted: bool) -> Iterator[None]:
    """Let torch, if ``wanted``, take every sum in a fixed order in a section, and raise where it
    cannot. ``fix_sums`` of ``launcher.py`` does the same for cuBLAS and NCCL."""
    if not wanted:
        yield
        return
    switches: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled()
    filled = switches.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # It would write NaN into every new tensor, to reveal reads of unwritten memory.
    switches.fill_uninitialized_memory = False
    # Where a product splits its sum depends on its shape, and so on the layout.
    products = torch.backends.cuda.matmul
    rounds = products.allow_bf16_reduced_precision_reduction
    products.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        products.allow_bf16_reduced_precision_reduction = rounds
        torch.use_deterministic_algorithms(before)
        switches.fill_uninitialized_memory = filled


def accelerator_count() -> int:
    """Return the number of GPUs of this machine."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def accelerators() -> tuple[torch.device, ...]:
    """Return the GPUs of this machine. None is chosen."""
    return tuple(torch.device("cuda", index) for index in range(accelerator_count()))


def toolkits() -> dict[str, str]:
    """Return the versions of torch's GPU toolkits; none if it was built for the host."""
    if torch.version.cuda is None:
        return {}
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {"CUDA": torch.version.cuda, "NCCL": nccl}


def backend(device: torch.device) -> str:
    """Return the torch.distributed backend. CPU tensors (checkpoint metadata) always go over
    gloo."""
    return "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"


def axis_backend(device: torch.device) -> str | None:
    """Return the torch.distributed backend of a group that moves only tensors of the device. None:
    that of the group of all ranks."""
    return None if is_host(device) or sends_nothing() else "nccl"


def sends_nothing() -> bool:
    """Whether this process only plays one of many ranks: torch.distributed's ``fake`` backend, in
    which no message goes anywhere."""
    return dist.is_initialized() and dist.get_backend() == dist.Backend.FAKE


def one_connection_per_peer(device: torch.device) -> bool:
    """Whether operations over the same ranks should share one communicator."""
    # Over sockets, messages of one communicator go out in the order in which they were issued;
    # those of two communicators share the link in any order. A GPU's communicator runs one
    # operation at a time, so two of them are needed to run two operations concurrently.
    return is_host(device)


def is_host(device: torch.device) -> bool:
    """Whether the host itself computes. Then waiting for communication is time on the host's
    clock."""
    return device.type == "cpu"


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory because a run is only traced. The processor that traces must
    not decide anything then."""
    return isinstance(tensor, FakeTensor)


def name(device: torch.device) -> str:
    """Return the vendor's name of the device."""
    return (
        platform.processor() or platform.machine()
        if is_host(device)
        else torch.cuda.get_device_name(device)
    )


@cache
def prefers_onednn() -> bool:
    """Whether fp32 matrix products on the host are faster with oneDNN than with MKL, which uses
    AVX-512 on Intel's processors only."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    known = available and hasattr(torch.ops.mkldnn, "_linear_pointwise")
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
    """Whether torch has instructions for matrix products in bf16 on the host's processor (AVX-512,
    AMX or ARM's). Where it has none, products in fp32 take a tenth to a half of the time."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", bool)
    if not torch.backends.mkldnn.is_available() or not supported():  # type: ignore[no-untyped-call]
        return False
    # With AVX-512 alone oneDNN accepts bf16 too, and computes it by instructions for fp32.
    kinds = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return not is_x86 or any(bool(getattr(torch.cpu, kind, bool)()) for kind in kinds)


def widens_bf16(values: torch.Tensor) -> bool:
    """Whether products of these values are computed in fp32 although they are in bf16: on a host
    without instructions for it."""
    return (
        values.dtype is torch.bfloat16
        and is_host(values.device)
        and not is_fake(values)
        and not multiplies_bf16()
    )


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle. Only for timing at log lines, never inside a step."""
    if not is_host(device):
        torch.cuda.synchronize(device)


def reset_peak_memory(device: torch.device) -> None:
    """Start ``peak_memory_bytes`` anew, if the system supports it."""
    if is_host(device):
        with suppress(FileNotFoundError), open("/proc/self/clear_refs", "w") as switch:
            switch.write("5")
    else:
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int | None:
    """Largest memory so far, or since ``reset_peak_memory``: allocated bytes on a GPU, the resident
    set of the process on a CPU. None where the system does not tell it (only Linux does)."""
    if is_host(device):
        return _largest_resident_set(Path("/proc/self/status"))
    return torch.cuda.max_memory_allocated(device)


def _largest_resident_set(status: Path) -> int | None:
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), None)


def timed_event(device: torch.device) -> torch.Event:
    """Return an event with a time, recorded on the current stream."""
    event = torch.Event(device, enable_timing=True)
    event.record(current_stream(device))
    return event


def memory_bytes(device: torch.device) -> int:
    """Return bytes of memory of the device; on a CPU, of the machine."""
    if is_host(device):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(torch.cuda.get_device_properties(device).total_memory)


def runs_triton(device: torch.device) -> bool:
    """Whether Triton's kernels may run: Triton is installed, and the device supports them. On a
    host they run only in Triton's interpreter, which tests choose before they import it."""
    if is_host(device):
        triton = sys.modules.get("triton")
        return triton is not None and bool(triton.knobs.runtime.interpret)
    return (
        torch.version.hip is None
        and find_spec("triton") is not None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU, (9, 0) for Hopper; (0, 0) for a host."""
    return (0, 0) if is_host(device) else torch.cuda.get_device_capability(device)


def multiprocessors(device: torch.device) -> int:
    """Return the number of the device's multiprocessors; on a host, 2."""
    if is_host(device):
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def new_stream(device: torch.device) -> torch.Stream:
    """Return a new stream, for work that runs concurrently with the computation."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream that the caller's work goes to."""
    return torch.cuda.current_stream(device)


def on_stream(stream: torch.Stream) -> AbstractContextManager[object]:
    """Return a context in which work is issued to ``stream``."""
    return torch.cuda.stream(stream)  # type: ignore[arg-type]


def record_memory(device: torch.device, *, on: bool) -> None:
    """Begin or end a record of every allocation on the device. A host has none."""
    if not is_host(device):
        torch.cuda.memory._record_memory_history("all" if on else None)


def write_memory(device: torch.device, path: str) -> None:
    """Write the record of allocations to ``path``; does nothing on a host."""
    if not is_host(device):
        torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]


def pin(memory: torch.Tensor, device: torch.device) -> None:
    """Register host memory with the device's driver, so that copies run at full speed and
    asynchronously."""
    if not is_host(device):
        status = torch.cuda.cudart().cudaHostRegister(  # type: ignore[no-untyped-call]
            memory.data_ptr(), memory.numel() * memory.element_size(), 0
        )
        torch.cuda.check_error(status)


def unpin(memory: torch.Tensor, device: torch.device) -> None:
    """Undo ``pin``. Called before the memory is freed."""
    if not is_host(device):
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostUnregister(memory.data_ptr())
        torch.cuda.check_error(status)


def host_event(device: torch.device) -> torch.Event:
    """Return an event, recorded on the current stream, for which the host waits asleep: its
    processor is needed for updates."""
    # torch.Event has the argument too, but ignores it.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(current_stream(device))
    return event


def copy_to_host(values: torch.Tensor) -> tuple[torch.Tensor, torch.Event | None]:
    """Start copying to the host. The copy is complete when the event has happened, which comes
    after everything that was issued so far; None means that it is complete now."""
    if is_host(values.device):
        return values, None
    copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    copy.copy_(values, non_blocking=True)
    event = torch.Event(values.device)
    event.record(current_stream(values.device))
    return copy, event


def wait_for_copies(device: torch.device) -> None:
    """Let the host wait until the copies that the caller has issued are complete."""
    if not is_host(device):
        torch.cuda.current_stream(device).synchronize()


def message_pool(backend: Any) -> Any:
    """Return a memory pool, empty, of memory that the backend of a communicator allocates."""
    return torch.cuda.MemPool(backend.mem_allocator)


def making_in(pool: Any, device: torch.device) -> AbstractContextManager[None]:
    """Let this thread make tensors of a device in a pool."""
    return torch.cuda.use_mem_pool(pool, device)


def graph_pool() -> Any:
    """Return the name of a memory pool, empty, that graphs may share."""
    return torch.cuda.graph_pool_handle()


def capture(
    work: Callable[[], Any], pool: Any, stream: torch.Stream
) -> tuple[Any, Callable[[], None]]:
    """Note what ``work`` does in ``stream`` as a graph, with memory of ``pool``, and do none of it.
    Returns the result of ``work``, and a function that does all in the caller's stream."""
    graph = torch.cuda.CUDAGraph()
    with on_stream(stream):
        # Other threads may go on looking at the events of messages.
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            result = work()
        finally:
            graph.capture_end()
    return result, graph.replay


def release_memory(device: torch.device) -> None:
    """Give unused memory back to the device. Waits for it."""
    if not is_host(device):
        torch.cuda.empty_cache()
