"""Files of ``torch.save``: nothing in them runs, damage is found, and what we write is what torch would have written."""

from __future__ import annotations

import argparse
import enum
import os
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_llama.conversion.tensor_map import MappedTensor, TensorMap
from megatron_llama.conversion.torch_file import ALIGNMENT, Inert, TorchFile, write_torch_file
from megatron_llama.errors import CheckpointError
from megatron_llama.plans.params import HFSlice, Rectangle


def saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def test_settings_and_random_states_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enums of Megatron need no Megatron: they are taken as objects without content."""
    module = types.ModuleType("megatron.core.enums")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.ModelType = enum.Enum("ModelType", {"encoder_or_decoder": 1}, module=module.__name__)  # type: ignore[attr-defined]
    args = argparse.Namespace(lr=1e-3, params_dtype=torch.bfloat16, model_type=module.ModelType.encoder_or_decoder, path=Path("/x"))
    content = {
        "args": args,
        "plain": types.SimpleNamespace(rank=3),
        "rng_state": [{"np_rng_state": np.random.get_state(), "torch_rng_state": torch.get_rng_state()}],
        "model": {"w": torch.arange(6.0).view(2, 3)},
    }
    path = saved(tmp_path / "a.pt", content)
    monkeypatch.delitem(sys.modules, module.__name__)
    with torch.serialization.safe_globals([module.ModelType]):  # as megatron.core does for its own, if something has imported it
        found = TorchFile(path).content
        assert module.ModelType in torch.serialization.get_safe_globals()
    assert (found["args"].lr, found["args"].params_dtype, found["plain"].rank) == (1e-3, torch.bfloat16, 3)
    assert isinstance(found["args"].model_type, Inert)
    assert torch.equal(found["model"]["w"], content["model"]["w"])
    assert module.__name__ not in sys.modules


class Attack:
    """Unpickled by an ordinary unpickler, it makes a folder."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def test_code_is_refused_by_name_and_not_run(tmp_path: Path) -> None:
    target = tmp_path / "made"
    path = saved(tmp_path / "a.pt", {"w": torch.ones(2), "args": Attack(target)})
    with pytest.raises(CheckpointError, match=r"a\.pt: got a pickle that calls posix\.mkdir, expected tensors .*nothing was run"):
        TorchFile(path)
    assert not target.exists()
    torch.load(path, weights_only=False)
    assert target.exists()  # the attack is a real one


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "pickle", "missing", "folder"])
def test_damaged_files(tmp_path: Path, damage: str) -> None:
    path = saved(tmp_path / "a.pt", {"w": torch.arange(100_000.0)})
    content = bytearray(path.read_bytes())
    if damage == "pickle":
        content[content.index(b"data.pkl") + 100] ^= 1
    changed = {"cut": bytes(content[:-300]), "empty": b"", "text": b"hello" * 100, "pickle": bytes(content)}
    path.unlink()
    if damage in changed:
        path.write_bytes(changed[damage])
    elif damage == "folder":
        path.mkdir()
    with pytest.raises(CheckpointError, match=r"a\.pt: got .*, expected a file that torch\.save wrote; copy the file again"):
        TorchFile(path)


@pytest.mark.parametrize("at", [0, 1, 399_999])
def test_a_flipped_bit_is_found_when_its_tensor_is_read(tmp_path: Path, at: int) -> None:
    values = torch.arange(100_000.0)
    path = saved(tmp_path / "a.pt", {"w": values, "other": torch.ones(7)})
    content = bytearray(path.read_bytes())
    content[content.index(values.numpy().tobytes()) + at] ^= 16
    path.write_bytes(content)
    file = TorchFile(path)
    file.verify(file.content["other"])
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"a\.pt: got damaged content \(a checksum does not match\)"):
            file.verify(file.content["w"])


def test_parts_of_one_storage(tmp_path: Path) -> None:
    """Meta's files hold many tensors that are views of one storage."""
    whole = torch.arange(24.0)
    file = TorchFile(saved(tmp_path / "a.pt", {"a": whole[:6].view(2, 3), "b": whole[6:].view(3, 6).t()}))
    for name in "ab":
        file.verify(file.content[name])
    assert torch.equal(file.content["b"], whole[6:].view(3, 6).t())


def outgoing(values: torch.Tensor) -> MappedTensor:
    """A tensor under the name ``w``, one row at a time asked for by rectangles."""

    def source(rectangle: Rectangle, out: torch.Tensor) -> None:
        window = tuple(slice(start, start + size) for start, size in zip(rectangle.offset, rectangle.size, strict=True))
        out.copy_(values[window])

    shape = tuple(values.shape)
    return MappedTensor(TensorMap(shape, (HFSlice("w", shape, 0, shape[0]),)), source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_written_is_a_file_of_torch(tmp_path: Path, dtype: torch.dtype) -> None:
    values = {name: torch.randn(shape).to(dtype) for name, shape in (("a", (5, 7)), ("b", (3,)), ("c", (2**9, 2**6)))}
    content = {"args": argparse.Namespace(n=3, none=None), "model": {name: outgoing(tensor) for name, tensor in values.items()}}
    write_torch_file(tmp_path / "a.pt", content, dtype)
    for mmap in (False, True):
        found = torch.load(tmp_path / "a.pt", weights_only=False, mmap=mmap)
        assert vars(found["args"]) == {"n": 3, "none": None}
        assert found["model"].keys() == values.keys()
        for name, tensor in found["model"].items():
            assert tensor.dtype == dtype and tensor.is_contiguous() and torch.equal(tensor, values[name])
            assert not mmap or tensor.data_ptr() % ALIGNMENT == 0
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert archive.testzip() is None
    TorchFile(tmp_path / "a.pt").verify(TorchFile(tmp_path / "a.pt").content["model"]["c"])


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_values_that_are_not_finite_are_not_written(tmp_path: Path, value: float) -> None:
    values = torch.ones(4, 4)
    values[2, 1] = value
    with pytest.raises(CheckpointError, match=r"a\.pt: got values beyond torch\.float32, expected finite values; look at the source"):
        write_torch_file(tmp_path / "a.pt", {"w": outgoing(values)}, torch.float32)
