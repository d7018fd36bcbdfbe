"""What the host can and cannot say about itself."""

from __future__ import annotations

import mmap
import warnings
from pathlib import Path

import pytest
import torch
from megatron_llama.engine.comm import device as devices


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
