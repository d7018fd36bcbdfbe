"""How the batches of a step lie in one piece of memory; and, on a GPU, that they arrive without anybody waiting."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron_llama.data.loader import Batch
from megatron_llama.data.upload import ALIGNMENT, GrowingBuffer, Upload, laid_out, pack, size_of

CPU = torch.device("cpu")


def batches(seed: int, count: int = 3) -> list[Batch]:
    """With different fields, of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, 100, (5 + number, 2), generator=generator) for number in range(count)]
    made = [Batch(part, part + 1, noise_seeds=(seed, number)) for number, part in enumerate(tokens)]
    ids = (tokens[1] > 50).to(torch.int32).cumsum(0, dtype=torch.int32)
    made[1] = replace(made[1], loss_mask=torch.rand(tokens[1].shape, generator=generator), document_ids=ids)
    return made


def same(one: Batch, other: Batch) -> bool:
    tensors, others = one.tensors(), other.tensors()
    alike = one.noise_seeds == other.noise_seeds and tensors.keys() == others.keys()
    return alike and all(t.dtype is others[name].dtype and torch.equal(t.cpu(), others[name].cpu()) for name, t in tensors.items())


def test_batches_lie_in_one_slab() -> None:
    given, slab = batches(1), GrowingBuffer(CPU)
    memory = slab.hold(size_of(given))
    pack(given, memory)
    placed = laid_out(given, memory.clone())
    assert all(map(same, placed, given))
    starts = [tensor.storage_offset() * tensor.element_size() for batch in placed for tensor in batch.tensors().values()]
    assert starts == sorted(set(starts)) and all(start % ALIGNMENT == 0 for start in starts)
    assert len({tensor.untyped_storage().data_ptr() for batch in placed for tensor in batch.tensors().values()}) == 1


def test_a_slab_is_taken_again() -> None:
    slab = GrowingBuffer(CPU)
    first = slab.hold(1000).data_ptr()
    assert slab.hold(500).data_ptr() == slab.hold(1000).data_ptr() == first
    assert slab.hold(2000).numel() == 2000 and slab.memory.numel() == 2000


def test_on_a_host_batches_stay() -> None:
    given, upload = batches(1), Upload(CPU)
    assert upload.send(given) is given
    upload.wait()


@pytest.mark.gpu
def test_batches_arrive_while_the_device_computes() -> None:
    """Those of a step under way are not overwritten, though the host is far ahead of the device."""
    device = torch.device("cuda", 0)
    upload, steps, read = Upload(device), [batches(seed) for seed in range(5)], []
    sent = upload.send(steps[0])
    torch.cuda.synchronize()
    for number in range(len(steps)):
        upload.wait()
        current = sent
        if number + 1 < len(steps):
            sent = upload.send(steps[number + 1])
        torch.cuda._sleep(200_000_000)  # the step
        read.append([replace(batch, **{name: tensor.clone() for name, tensor in batch.tensors().items()}) for batch in current])
    for given, found in zip(steps, read, strict=True):
        assert all(same(replace(batch, document_starts=None, document_bounds=None), other) for batch, other in zip(found, given, strict=True))


@pytest.mark.gpu
def test_a_step_takes_no_memory_and_waits_for_nothing() -> None:
    device = torch.device("cuda", 0)
    upload = Upload(device)
    for seed in range(3):
        upload.send(batches(seed))
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for seed in range(3, 6):
            upload.wait()
            upload.send(batches(seed))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
