"""Reads the few fields of a serialized sentencepiece ``ModelProto`` that an exact export needs.

Field numbers are those of sentencepiece's ``sentencepiece_model.proto``, wire types those of the
protocol buffers encoding. sentencepiece's Python API does not show the normalizer. The module that
it generates for this file needs the protobuf package, which would be a new dependency for eleven
fields and would tie the package to the protobuf version of the generated code.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron_llama.errors import DataError

NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5
BYTE = 6
UNIGRAM = 1
BPE = 2

_VARINT = 0
LONGEST_VARINT = 63
"""Largest number of bits before the last byte of a number of 64 bits."""
_FIXED64 = 1
_BYTES = 2
_FIXED32 = 5


class Piece(NamedTuple):
    """One entry of the vocabulary. ``type`` is one of the constants above; ``score`` orders BPE
    merges, highest first."""

    text: str
    score: float
    type: int


@dataclass(frozen=True)
class SentencePieceModel:
    """The parsed model. Flags that the file leaves out have sentencepiece's defaults."""

    pieces: tuple[Piece, ...]
    model_type: int
    byte_fallback: bool
    whitespace_as_suffix: bool
    charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool


def parse_model(data: bytes, name: str) -> SentencePieceModel:
    """Parse the content of a ``.model`` file; ``name`` is for messages. Raises DataError if it is
    no sentencepiece model."""
    try:
        return _parse(data)
    except (IndexError, struct.error, TypeError, ValueError) as error:
        raise DataError(
            name,
            got=f"damaged content ({error})",
            expected="a sentencepiece model",
            do="restore the file",
        ) from error


def _parse(data: bytes) -> SentencePieceModel:
    pieces: list[Piece] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in _fields(data):
        if number == 1:
            pieces.append(_piece(_as_bytes(value)))
        elif number == 2:
            trainer.update(_fields(_as_bytes(value)))
        elif number == 3:
            normalizer.update(_fields(_as_bytes(value)))
    if not pieces:
        raise ValueError("no pieces")
    return SentencePieceModel(
        pieces=tuple(pieces),
        model_type=int(trainer.get(3, UNIGRAM)),
        byte_fallback=bool(trainer.get(35, 0)),
        whitespace_as_suffix=bool(trainer.get(24, 0)),
        charsmap=_as_bytes(normalizer.get(2, b"")),
        add_dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
        escape_whitespaces=bool(normalizer.get(5, 1)),
    )


def _piece(data: bytes) -> Piece:
    fields = dict(_fields(data))
    score = struct.unpack("<f", _as_bytes(fields[2]))[0] if 2 in fields else 0.0
    return Piece(_as_bytes(fields.get(1, b"")).decode(), score, int(fields.get(3, NORMAL)))


def _as_bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise TypeError("a number where bytes belong")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) of one message: varints as int, everything else as raw bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == _VARINT:
            number, at = _varint(data, at)
            yield key >> 3, number
            continue
        if wire == _BYTES:
            size, at = _varint(data, at)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if at + size > len(data):
            raise ValueError(f"a field ends at byte {at + size} of {len(data)}")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while data[at] & 0x80:
        if shift >= LONGEST_VARINT:
            raise ValueError(f"a number of too many bytes at byte {at}")
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
    return value | data[at] << shift, at + 1
