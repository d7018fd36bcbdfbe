"""Pickles that call or allocate, archives that swell, tensors that are not what they say, and
indices that point elsewhere."""

from __future__ import annotations

import argparse
import io
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tools.harm.hostile_inputs.case import CHECKPOINT, Change, Hostile, replaced, reseal, with_bytes

PICKLED = (
    ("native", f"{CHECKPOINT}/.metadata"),
    ("native/auto", f"{CHECKPOINT}/.metadata"),
    ("torch_dist", f"{CHECKPOINT}/.metadata"),
)
"""Files that are a pickle."""
ARCHIVES = (
    ("torch_dist", f"{CHECKPOINT}/common.pt"),
    ("megatron", "release/mp_rank_00/model_optim_rng.pt"),
    ("meta", "consolidated.00.pth"),
)
"""Files that are an archive with a pickle in it."""
MARK = "code-was-run"
"""Lies beside the folder that is read if a file has made the program call something."""


class _Call:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._reduced = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._reduced


def _shell() -> bytes:
    import os

    return pickle.dumps(_Call(os.system, f"touch {MARK}"), 2)


def _build(module: str, name: str) -> bytes:
    """Set an attribute of a class itself."""
    state = pickle.dumps({"harmed": 1}, 2)[2:-1]
    return b"\x80\x02" + f"c{module}\n{name}\n".encode() + state + b"b."


def _laughs() -> bytes:
    """Tuples of tuples: 40 levels, 2**40 leaves for whoever walks them."""
    return b"\x80\x02)" + b"2\x86" * 40 + b"."


PICKLES = {
    "a memo index of 2**28": b"\x80\x02]r\xff\xff\xff\x0f.",
    "a memo index of 2**31": b"\x80\x02]r\xff\xff\xff\x7f.",
    "a memo index of 2**32": b"\x80\x02]r\xff\xff\xff\xff.",
    "a memo index of 10**9 in words": b"]p1000000000\n.",
    "a text of 2**31 bytes": b"\x80\x02X\xff\xff\xff\x7fabc.",
    "a text of 2**62 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"abc.",
    "bytes of 2**33": b"\x80\x04\x8e" + struct.pack("<Q", 2**33) + b"abc.",
    "a bytearray of 2**30": b"\x80\x05\x96" + struct.pack("<Q", 2**30) + b"abc.",
    "a number of 2**31 bytes": b"\x80\x02\x8b\xff\xff\xff\x7fabc.",
    "a frame of 2**62": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"].",
    "100,000 lists": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "100,000 marks": b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b".",
    "laughs": _laughs(),
    "an empty stack": b"\x80\x02.",
    "nothing": b"",
    "protocol 200": b"\x80\xc8].",
    "a list": pickle.dumps([1], 2),
    "a number": pickle.dumps(7, 2),
    "a dict of a list": pickle.dumps({"a": [1]}, 2),
    "a call of the shell": _shell(),
    "a call of eval": pickle.dumps(_Call(eval, f"open('{MARK}', 'w')"), 2),
    "a call of getattr": b"\x80\x02cbuiltins\ngetattr\n.",
    "a class of torch with an attribute": _build("torch", "Size"),
    "a tensor with an attribute": _build("torch", "Tensor"),
    "the metadata with an attribute": _build("torch.distributed.checkpoint.metadata", "Metadata"),
    "a dtype with an attribute": _build("torch", "float32"),
    "an ordered dict with an attribute": _build("collections", "OrderedDict"),
    "a namespace with an attribute": _build("argparse", "Namespace"),
    "a persistent number": b"\x80\x02K\x01Q.",
    "an extension code": b"\x80\x02\x82\x01.",
}


def cases() -> Iterator[Hostile]:
    """Yield all of them."""
    for name, content in PICKLES.items():
        for format, file in PICKLED:
            yield Hostile(f"{file} is {name}", format, replaced(file, content))
        for format, file in ARCHIVES:
            yield Hostile(f"{file} holds {name}", format, _with_pickle(file, content))
    for method, word in METHODS.items():
        for format, file in (*ARCHIVES, ("native", f"{CHECKPOINT}/__0_0.distcp")):
            yield Hostile(f"{file} swells by {word}", format, _swollen(file, method))
    yield from _tensors()
    yield from _metadata()
    yield from _arguments()
    yield from _indices()


METHODS = {zipfile.ZIP_DEFLATED: "deflate", zipfile.ZIP_BZIP2: "bzip2", zipfile.ZIP_LZMA: "lzma"}
SWOLLEN = 2**29
"""Bytes of one entry when it is unpacked."""


def _entries(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _with_pickle(file: str, content: bytes) -> Change:
    def change(folder: Path) -> None:
        path = folder / file
        entries = _entries(path)
        with zipfile.ZipFile(path, "w") as archive:
            for name, before in entries.items():
                archive.writestr(name, content if name.endswith("data.pkl") else before)
        reseal(folder)

    return change


def _swollen(file: str, method: int) -> Change:
    def change(folder: Path) -> None:
        path = folder / file
        if not zipfile.is_zipfile(path):
            prefix, entries = "archive", {"archive/data.pkl": pickle.dumps({}, 2)}
        else:
            entries = _entries(path)
            prefix = next(iter(entries)).split("/")[0]
        with zipfile.ZipFile(path, "w", method) as archive:
            for name, before in entries.items():
                if name != f"{prefix}/data.pkl":
                    archive.writestr(name, before)
            with archive.open(f"{prefix}/data.pkl", "w") as out:
                out.write(b"\x80\x02")
                # NONE and POP, again and again: a pickle that is as long as it likes to be.
                for _ in range(SWOLLEN // 2**24):
                    out.write(b"N0" * 2**23)
                out.write(b"N.")
        reseal(folder)

    return change


TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "no dimensions": lambda t: t.flatten()[0].clone(),
    "one dimension": lambda t: t.flatten().clone(),
    "three dimensions": lambda t: t[None].clone(),
    "no elements": lambda t: t[:0].clone(),
    "integers": lambda t: t.to(torch.int64),
    "flags": lambda t: t > 0,
    "complex numbers": lambda t: t.to(torch.complex64),
    "bytes": lambda t: t.to(torch.uint8),
    "a size of 2**40 from one number": lambda t: torch.zeros(1).expand(2**20, 2**20),
    "rows that overlap": lambda t: torch.as_strided(t.clone(), t.shape, (1,) * t.dim()),
    "other columns": lambda t: t.T.clone() if t.dim() == 2 else t.clone()[:-1],
    "no values": lambda t: t.to("meta"),
    "not a number": lambda t: torch.full_like(t, torch.nan),
    "a list": lambda t: t.tolist(),
    "None": lambda _: None,
    "a word": lambda _: "weight",
    "sparse": lambda t: t.to_sparse(),
    "a view of a larger one": lambda t: torch.cat([t, t])[: len(t)],
}


def _change_first(tree: Any, edit: Callable[[torch.Tensor], Any]) -> bool:
    """Replace the first matrix in nested dicts."""
    for name, value in tree.items():
        if isinstance(value, torch.Tensor) and value.dim() == 2:
            tree[name] = edit(value)
            return True
        if isinstance(value, dict) and _change_first(value, edit):
            return True
    return False


def _retorched(file: str, edit: Callable[[Any], object]) -> Change:
    def change(folder: Path) -> None:
        path = folder / file
        content = torch.load(path, weights_only=False)
        edit(content)
        buffer = io.BytesIO()
        torch.save(content, buffer)
        path.write_bytes(buffer.getvalue())
        reseal(folder)

    return change


def _tensors() -> Iterator[Hostile]:
    for name, edit in TENSORS.items():
        for format, file in ARCHIVES[1:]:
            change = _retorched(file, partial(_change_first, edit=edit))
            yield Hostile(f"{file} has a weight of {name}", format, change)


def _edited_metadata(edit: Callable[[Any], None]) -> Change:
    def change(folder: Path) -> None:
        path = folder / CHECKPOINT / ".metadata"
        content = pickle.loads(path.read_bytes())
        edit(content)
        path.write_bytes(pickle.dumps(content))
        reseal(folder)

    return change


def _first_tensor(metadata: Any) -> Any:
    entries = metadata.state_dict_metadata
    return next(
        entries[name] for name in sorted(entries) if len(getattr(entries[name], "size", ())) == 2
    )


def _first_place(metadata: Any) -> Any:
    return next(iter(metadata.storage_data.values()))


def _first_chunk(metadata: Any) -> Any:
    return _first_tensor(metadata).chunks[0]


def _first_properties(metadata: Any) -> Any:
    return _first_tensor(metadata).properties


def _itself(metadata: Any) -> Any:
    return metadata


def _set_attribute(metadata: Any, find: Callable[[Any], Any], field: str, value: object) -> None:
    # Some of these classes are frozen.
    object.__setattr__(find(metadata), field, value)


def _repeat_chunk(metadata: Any) -> None:
    chunks = _first_tensor(metadata).chunks
    chunks.append(chunks[0])


PATHS: tuple[object, ...] = (
    *("../../secret.txt", "/etc/passwd", "", ".", "/dev/zero", None, 7, "a\0b"),
)
PLACES: tuple[object, ...] = (-1, 2**40, 2**63, 2.5, None, "a", [1], True)
CORNERS: tuple[object, ...] = (
    *((-1, 0), (2**40, 2**40), (2.5, 1), (1,), None, "ab", torch.Size((0, 0)), (True, 1)),
)


def _metadata() -> Iterator[Hostile]:
    """Lies in the index."""
    lies: tuple[tuple[str, Callable[[Any], Any], str, tuple[object, ...]], ...] = (
        ("a place", _first_place, "relative_path", PATHS),
        ("a place", _first_place, "offset", PLACES),
        ("a place", _first_place, "length", PLACES),
        ("a chunk", _first_chunk, "offsets", CORNERS),
        ("a chunk", _first_chunk, "sizes", CORNERS),
        ("a tensor", _first_tensor, "size", (torch.Size((2**20, 2**20)), torch.Size(()), *CORNERS)),
        ("a tensor", _first_tensor, "chunks", ([], None, "ab", [1], 7)),
        ("a tensor", _first_properties, "dtype", (torch.int64, torch.float64, None, "float32")),
        ("the index", _itself, "state_dict_metadata", (None, [], {}, {"a": 1}, 7)),
        ("the index", _itself, "storage_data", (None, [], {}, {"a": 1}, 7)),
    )
    edits: dict[str, Callable[[Any], None]] = {"a chunk twice": _repeat_chunk}
    for what, find, field, values in lies:
        for value in values:
            name = f"{field} {value!r} of {what}"
            edits[name] = partial(_set_attribute, find=find, field=field, value=value)
    for name, edit in edits.items():
        for format in ("native", "torch_dist"):
            yield Hostile(f".metadata with {name}", format, _edited_metadata(edit))


def _arguments() -> Iterator[Hostile]:
    """Megatron's arguments of the wrong kind."""
    wrong: tuple[object, ...] = ("word", None, -7, 2.5, float("nan"), 10**9, [1], True)
    for field in (*ARGUMENTS, "iteration"):
        for value in wrong:
            for format, file in ARCHIVES[:2]:
                change = _retorched(file, partial(_set_argument, field=field, value=value))
                yield Hostile(f"{file} {field} {value!r}", format, change)
    instead: tuple[object, ...] = (None, 7, {}, argparse.Namespace(), "word")
    for value in instead:
        for format, file in ARCHIVES[:2]:
            change = _retorched(file, partial(_set_argument, field="args", value=value))
            yield Hostile(f"{file} args {value!r}", format, change)


ARGUMENTS = (
    *("num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size", "norm_epsilon"),
)


def _set_argument(content: Any, field: str, value: object) -> None:
    if field in ARGUMENTS:
        setattr(content["args"], field, value)
    else:
        content[field] = value


HEADER = 34
"""Bytes of an index before its lengths: magic, version, dtype, counts."""


def _indices() -> Iterator[Hostile]:
    """Lies in the index of a dataset: magic (9), version (8), dtype (1), sequences (8), documents
    (8), then lengths (int32), places (int64), documents (int64)."""

    def patched(at: int, form: str, value: int) -> Change:
        def edit(content: bytes) -> bytes:
            packed = struct.pack(form, value)
            begin = at if at >= 0 else len(content) + at
            return content[:begin] + packed + content[begin + len(packed) :]

        return with_bytes("d.idx", edit)

    for format in ("dataset", "dataset/train"):
        for value in (0, 2, 2**63):
            yield Hostile(f".idx version {value}", format, patched(9, "<Q", value))
        for value in (0, 3, 9, 99, 255):
            yield Hostile(f".idx dtype {value}", format, patched(17, "<B", value))
        for at, what in ((18, "sequences"), (26, "documents")):
            for value in (0, 1, 2**31, 2**40, 2**62, 2**63):
                yield Hostile(f".idx {what} {value}", format, patched(at, "<Q", value))
        for value in (-1, 0, 2**31 - 1, 1):
            yield Hostile(f".idx first length {value}", format, patched(HEADER, "<i", value))
            yield Hostile(f".idx second length {value}", format, patched(HEADER + 4, "<i", value))
        for value in (-1, 1, 2**40, 2**63 - 1, -(2**63), 2**63 - 8):
            place = HEADER + 4 * 40  # forty documents of one sequence each
            yield Hostile(f".idx first place {value}", format, patched(place, "<q", value))
            yield Hostile(f".idx second place {value}", format, patched(place + 8, "<q", value))
            yield Hostile(f".idx last place {value}", format, patched(place + 39 * 8, "<q", value))
            yield Hostile(f".idx last document {value}", format, patched(-8, "<q", value))
            yield Hostile(
                f".idx second document {value}", format, patched(place + 41 * 8, "<q", value)
            )
