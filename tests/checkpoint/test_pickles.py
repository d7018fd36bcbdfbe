"""What a pickle claims is held against its bytes before CPython reads it."""

from __future__ import annotations

import pickle
import pickletools
import struct

import pytest
import torch
from megatron_llama.checkpoint.pickles import require_bounded
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

VALUES = (
    {"a": [1, -7, 2.5, None, True, "x" * 70_000, b"y" * 300, 10**50, (1,), ((1, 2), 3)]},
    torch.float32,
    bytearray(100),
    {1, 2},
    {MetadataIndex(f"layers.{layer}", torch.Size((layer, 0))): layer for layer in range(300)},
    print,
)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_real_pickles_pass(protocol: int) -> None:
    for value in VALUES:
        content = pickle.dumps(value, protocol)
        assert require_bounded(content + b"what follows") == len(content)


def small_objects(count: int) -> bytes:
    """A pickle of an index's objects, and of its classes' names, without its end."""
    values = [(MetadataIndex("w", torch.Size((at, 300, 2**33))), ChunkStorageMetadata(torch.Size((at,)), torch.Size((1, at)))) for at in range(count)]
    return pickle.dumps([value for pair in values for value in pair], 4)[11:-1]


@pytest.mark.parametrize("more", [0, 1])
def test_objects_that_are_taken_whole_leave_the_memo_as_pickle_has_it(more: int) -> None:
    content = small_objects(50)
    places = sum(opcode.name == "MEMOIZE" for opcode, _, _ in pickletools.genops(content + b"."))
    claims = content + b"r" + struct.pack("<I", places + more) + b"j" + struct.pack("<I", places) + b"0."
    if more:
        with pytest.raises(pickle.UnpicklingError, match=f"place {places + 1} of the memo where {places} are taken"):
            require_bounded(claims)
    else:
        assert require_bounded(claims) == len(claims)


def test_objects_that_are_taken_whole_need_small_classes() -> None:
    """A tuple in the place of a class counts with all that it is made of."""
    content = b"(" + b"K\x01" * 30 + b"t\x94" + b"h\x00)\x81\x94}\x94(ub" + b"(" + b"h\x01" * 130 + b"t."
    with pytest.raises(pickle.UnpicklingError, match="a tuple of 4"):
        require_bounded(content)


@pytest.mark.parametrize(
    "content",
    [
        b"]r" + struct.pack("<I", 2**31 - 1) + b"0.",  # 34 GB of memo
        b"]q\xff.",
        b"]p999999999\n.",
        b"X" + struct.pack("<I", 2**31) + b"abc.",
        b"\x8d" + struct.pack("<Q", 2**40) + b"abc.",
        b"\x96" + struct.pack("<Q", 2**40) + b".",
        b"\x8b" + struct.pack("<i", -1) + b"abc.",
        b"\x80\x04\x95" + struct.pack("<Q", 2**40) + b"].",
        b"cos\nsystem",
        b"\xff.",
        b"]",
        b"",
        b"}" + b")q\x00" + b"".join(b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(40)) + b"h\x28K\x01s.",  # its hash takes days
        b"}" + b")" + b"".join(b"2\x86" for _ in range(40)) + b"K\x01s.",
        b"}" + b")" + b"\x85" * 100_000 + b"K\x01s.",  # its hash overflows the stack
        b"}" + b"(" + b"K\x01" * 4000 + b"tq\x00" + b"K\x01s" + b"h\x00K\x01s" * 100_000 + b".",  # 400 million values hashed
        b"]" * 2_000_000 + b".",  # 112 MB of lists
        b"t.",
        b"e.",
        b"h\x00.",
        b"q\x00.",
        b"K\x01(\x86.",
    ],
)
def test_what_is_claimed_has_to_be_there(content: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError):
        require_bounded(content)
