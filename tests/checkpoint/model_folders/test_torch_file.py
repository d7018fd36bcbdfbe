"""Files of ``torch.save``: nothing in them runs, damage is found, and what we write is what torch would have written."""

from __future__ import annotations

import argparse
import collections
import enum
import os
import pickle
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_llama.checkpoint.model_folders.torch_file import ALIGNMENT, TorchWeights, write_torch_file
from megatron_llama.checkpoint.torch_file import TorchFile
from megatron_llama.checkpoint.torch_pickle import Inert
from megatron_llama.converter.tensor_map import MappedTensor, TensorMap
from megatron_llama.engine.plan.specs import HFSlice, Rectangle
from megatron_llama.errors import CheckpointError

from tests.flipped import flip


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


@pytest.mark.parametrize("content", [[torch.ones(2)], {"w": torch.ones(2), "step": 5}, {"w": torch.ones(2), 0: torch.ones(2)}])
def test_weights_are_names_with_tensors(tmp_path: Path, content: Any) -> None:
    with pytest.raises(CheckpointError, match=r"a\.pt: got other things, expected names with tensors"):
        TorchWeights(TorchFile(saved(tmp_path / "a.pt", content)))


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
    with pytest.raises(CheckpointError, match=r"a\.pt: got .*, expected a (file that torch\.save wrote|readable file|regular file); copy the file again"):
        TorchFile(path)


@pytest.mark.parametrize("at", [0, 1, 399_999])
def test_a_flipped_bit_is_found_when_its_tensor_is_read(tmp_path: Path, at: int) -> None:
    values = torch.arange(100_000.0)
    path = saved(tmp_path / "a.pt", {"w": values, "other": torch.ones(7)})
    flip(path, path.read_bytes().index(values.numpy().tobytes()) + at, 16)
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
    file = TorchFile(tmp_path / "a.pt")
    file.verify(file.content["model"]["c"])


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_values_that_are_not_finite_are_not_written(tmp_path: Path, value: float) -> None:
    values = torch.ones(4, 4)
    values[2, 1] = value
    with pytest.raises(CheckpointError, match=r"a\.pt: got values beyond torch\.float32, expected finite values; look at the source"):
        write_torch_file(tmp_path / "a.pt", {"w": outgoing(values)}, torch.float32)


def archived(path: Path, text: bytes, values: dict[str, bytes] | None = None, compression: int = zipfile.ZIP_STORED) -> Path:
    """A file of torch.save around a pickle."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", text)
        archive.writestr("archive/byteorder", b"little")
        for key, content in (values or {}).items():
            archive.writestr(f"archive/data/{key}", content)
    return path


def named(name: str) -> bytes:
    module, _, leaf = name.rpartition(".")
    return f"c{module}\n{leaf}\n".encode()


def number(value: int) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


def called(name: str, *arguments: bytes) -> bytes:
    return b"\x80\x02" + named(name) + b"(" + b"".join(arguments) + b"tR."


def tensor_of(size: list[int], stride: list[int], *, offset: int = 0, values: int = 4) -> bytes:
    """The pickle of one tensor of float32 over a storage of so many values."""
    numbers = [b"(" + b"".join(map(number, entries)) + b"t" for entries in (size, stride)]
    storage = (
        b"(X\x07\x00\x00\x00storage" + named("torch.FloatStorage") + b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpu" + number(values) + b"tQ"
    )
    return called("torch._utils._rebuild_tensor_v2", storage, number(offset), *numbers, b"\x89", b"N")


HOSTILE = {
    "a memo of 34 GB": b"\x80\x02r\xff\xff\xff\xff.",
    "a string of 4 GB": b"\x80\x02X\xff\xff\xff\xffab.",
    "a tensor class with a size": called("torch.FloatTensor", number(10**12)),
    "a tensor type with a size": called("torch.Tensor", number(10**12)),
    "bytes of a number": called("builtins.bytearray", number(10**12)),
    "a tensor without values": called(
        "torch._utils._rebuild_meta_tensor_no_storage",
        named("torch.float32"),
        b"(" + number(2**40) + b"t",
        b"(" + number(1) + b"t",
        b"\x89",
    ),
    "an expanded tensor": tensor_of([2**40], [0]),
    "an expanded tensor whose size overflows": tensor_of([2**62, 2**62], [0, 0]),
    "a tensor beyond its storage": tensor_of([2**40], [1]),
    "a tensor that begins behind its storage": tensor_of([1], [1], offset=4),
    "a negative stride": tensor_of([2], [-1], offset=1),
    "a storage larger than its entry": tensor_of([4], [1], values=2**40),
    "65 dimensions": tensor_of([1] * 65, [1] * 65),
    "a state of a class of torch": b"\x80\x02" + named("torch.FloatStorage") + b"}X\x05\x00\x00\x00dtypeK\x01sb.",
    "a state of a function of torch": b"\x80\x02" + named("torch._utils._rebuild_tensor_v2") + b"}X\x01\x00\x00\x00aK\x01sb.",
    "settings with a number for a name": b"\x80\x02" + named("argparse.Namespace") + b")\x81}K\x01K\x01sb.",
    "nested tuples": b"\x80\x02)" + b"\x85" * 1_000_000 + b".",
    "nested tuples as a key": b"\x80\x02})" + b"\x85" * 1_000_000 + b"K\x01s.",
    "nested tuples in a set": b"\x80\x02" + named("builtins.set") + b"])" + b"\x85" * 1_000_000 + b"a\x85R.",
    "a list that holds itself": b"\x80\x02]q\x00h\x00a.",
    "lists that hold each other ten times": b"\x80\x02]q\x00"
    + b"".join(b"](" + b"h%c" % level * 10 + b"eq%c" % (level + 1) for level in range(20))
    + b".",
    "no end": b"\x80\x02}",
    "an empty stack": b"\x80\x02.",
    "a call of a number": b"\x80\x02K\x01)R.",
    "a value behind the end": b"\x80\x02}.}.",
    "a key of the memo that nothing set": b"\x80\x02h\x07.",
    "an object of protocol 4": pickle.dumps({"a": 1}, 4),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_pickles_that_claim_more_than_they_hold(tmp_path: Path, name: str) -> None:
    path = archived(tmp_path / "a.pt", HOSTILE[name], {"0": bytes(16)})
    with pytest.raises(CheckpointError, match=r"a\.pt: got "):
        TorchFile(path)


def test_the_hostile_pickles_are_almost_sound(tmp_path: Path) -> None:
    """Their makers make a sound one with other numbers."""
    file = TorchFile(archived(tmp_path / "a.pt", tensor_of([2, 2], [1, 2]), {"0": np.arange(4, dtype=np.float32).tobytes()}))
    file.verify_all()
    assert file.content.tolist() == [[0.0, 2.0], [1.0, 3.0]]


def test_archives_that_are_larger_inside(tmp_path: Path) -> None:
    sound = tensor_of([4], [1])
    path = archived(tmp_path / "a.pt", sound, {"0": bytes(16), "1": bytes(2**24)}, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match=r"is compressed, [\d,]+ bytes that become [\d,]+"):
        TorchFile(path)
    path = archived(tmp_path / "b.pt", sound, {"0": bytes(16), "1": b"x" * 64})
    content = bytearray(path.read_bytes())
    # The second entry of values is said to begin where the first does.
    first, second = (content.rindex(b"archive/data/" + key) - 4 for key in (b"0", b"1"))
    content[second : second + 4] = content[first : first + 4]
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="shares bytes"):
        TorchFile(path)
    old = tmp_path / "old.pt"
    torch.save({"w": torch.ones(2)}, old, _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match=r"torch before 1\.6"):
        TorchFile(old)
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(CheckpointError, match="got no regular file but a named pipe"):
        TorchFile(tmp_path / "pipe.pt")


def test_everything_that_torch_saves_of_a_checkpoint_is_read(tmp_path: Path) -> None:
    """The same as torch reads, of all dtypes, and of tensors and parameters with attributes."""
    values: dict[str, Any] = {
        f"{dtype}": torch.arange(6).to(dtype).view(2, 3)
        for dtype in (
            torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool,
            torch.complex64, torch.float8_e4m3fn, torch.uint16,
        )
    }
    attributed = torch.ones(3)
    attributed.tensor_model_parallel = True  # type: ignore[attr-defined]
    values |= {
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "attributed": attributed,
        "empty": torch.empty(0, 3),
        "number": torch.tensor(2.0),
    }
    values["strided"] = torch.arange(12.0).view(3, 4).t()[1:]
    plain = {
        "ordered": collections.OrderedDict(a=1),
        "set": {1, 2},
        "bytes": b"ab",
        "array": bytearray(b"cd"),
        "size": torch.Size([1, 2]),
        "large": 2**70,
        "complex": 1j,
        "nested": [({"a": (1, 2, 3, 4)},)],
        "milestones of a scheduler": collections.Counter({2: 1, 4: 2}),
        ("a", 1): None,
    }
    path = saved(tmp_path / "a.pt", {"tensors": values, **plain})
    file = TorchFile(path)
    file.verify_all()
    wanted = torch.load(path, weights_only=True)
    assert {name: file.content[name] for name in plain} == {name: wanted[name] for name in plain}
    assert file.content["tensors"].keys() == wanted["tensors"].keys()
    for name, tensor in wanted["tensors"].items():
        ours = file.content["tensors"][name]
        assert (
            ours.dtype == tensor.dtype
            and ours.stride() == tensor.stride()
            and torch.equal(
                ours.view(torch.uint8) if name == "torch.float8_e4m3fn" else ours,
                tensor.view(torch.uint8) if name == "torch.float8_e4m3fn" else tensor,
            )
        )
