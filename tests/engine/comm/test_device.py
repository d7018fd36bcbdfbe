"""What the host can and cannot say about itself."""

from __future__ import annotations

import mmap
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.groups import communicator_options
from torch.testing._internal.distributed.fake_pg import FakeStore


def test_peak_memory_is_that_of_this_process_and_starts_anew() -> None:
    cpu = torch.device("cpu")
    # Not a tensor's memory: malloc may keep what is freed, for the next tensor.
    with mmap.mmap(-1, 1 << 26) as memory:
        memory[::4096] = bytes(1 << 14)
    grown = devices.peak_memory_bytes(cpu)
    devices.reset_peak_memory(cpu)
    after = devices.peak_memory_bytes(cpu)
    assert grown is not None and after is not None and grown > after + 2**25 > 2**26


def test_peak_memory_is_unknown_where_the_system_does_not_say(tmp_path: Path) -> None:
    silent = tmp_path / "status"
    assert devices._largest_resident_set(silent) is None
    silent.write_text("Name:\tpython\nVmRSS:\t  12 kB\n")
    assert devices._largest_resident_set(silent) is None
    silent.write_text("Name:\tpython\nVmHWM:\t   34 kB\nVmRSS:\t  12 kB\n")
    assert devices._largest_resident_set(silent) == 34 * 1024


def test_the_allocator_is_set_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which every rank would print. The settings are kept by builds of torch without a GPU, too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch._C._accelerator_getAllocatorSettings()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        devices.use_allocator("expandable_segments:True")
    found = torch._C._accelerator_getAllocatorSettings()
    torch._C._accelerator_setAllocatorSettings(before)
    assert "expandable_segments:True" in found


def test_one_rank_that_plays_many_has_no_groups_of_nccl() -> None:
    """Whose communicators would wait for the others."""
    gpu = torch.device("cuda", 0)
    dist.init_process_group(dist.Backend.FAKE, store=FakeStore(), rank=0, world_size=4)
    try:
        assert devices.axis_backend(gpu) is None
        assert communicator_options(gpu, timedelta(minutes=1), urgent=True) is None
    finally:
        dist.destroy_process_group()
    assert devices.axis_backend(gpu) == "nccl"


FIRST_PRODUCT = """
import torch
from megatron_llama.engine.comm import device as devices

device = devices.accelerator(0)
devices.open_backward(device)
factor = torch.ones(4, 4, device=device, requires_grad=True)
(factor @ factor).backward(torch.ones(4, 4, device=device))
assert factor.grad.sum().item() == 128
"""


@pytest.mark.gpu
def test_a_product_may_come_first_in_backward() -> None:
    """In a process of its own, whose autograd has not run yet; torch would warn of a thread without a context, but go on."""
    command = [sys.executable, "-W", "error:Attempting to run cuBLAS", "-c", FIRST_PRODUCT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
