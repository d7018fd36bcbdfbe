"""What a pickle claims is held against its bytes before CPython reads it."""

from __future__ import annotations

import pickle
import struct

import pytest
import torch
from megatron_llama.checkpoint.pickles import require_bounded
from torch.distributed.checkpoint.metadata import MetadataIndex

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
    ],
)
def test_what_is_claimed_has_to_be_there(content: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError):
        require_bounded(content)
