"""Looks at the bytes of a pickle before they are read.

A pickle names the place of its memo into which a value goes, and the lengths of its strings, and
CPython's reader makes room for whatever is named: 9 bytes can take 34 GB. No classes have to be
allowed for that, so a list of classes does not help. Opcodes: CPython's ``pickletools``."""

from __future__ import annotations

import pickle
import pickletools
from collections.abc import Mapping
from types import MappingProxyType


def _argument_sizes() -> Mapping[int, int]:
    """Return the bytes of each opcode's argument; for those of no fixed size the (negative) kind
    that pickletools has for them."""
    return MappingProxyType(
        {ord(code.code): 0 if code.arg is None else code.arg.n for code in pickletools.opcodes}
    )


SIZES = _argument_sizes()
LENGTH_BYTES: Mapping[int, int] = MappingProxyType(
    {
        pickletools.TAKEN_FROM_ARGUMENT1: 1,
        pickletools.TAKEN_FROM_ARGUMENT4: 4,
        pickletools.TAKEN_FROM_ARGUMENT4U: 4,
        pickletools.TAKEN_FROM_ARGUMENT8U: 8,
    }
)
"""Arguments that begin with their own length, in so many bytes."""
LINES = {ord("i"): 2, ord("c"): 2}
"""Opcodes whose argument is two lines of text: module and name."""
STOP = ord(pickle.STOP)
PUT = ord(pickle.PUT)
BINPUT = ord(pickle.BINPUT)
LONG_BINPUT = ord(pickle.LONG_BINPUT)
MEMOIZE = ord(pickle.MEMOIZE)
FRAME = ord(pickle.FRAME)


def require_bounded(content: bytes) -> int:
    """Return the length of the pickle at the beginning of ``content``. Raises
    pickle.UnpicklingError where it claims a length beyond its end, or a place of the memo that no
    pickler would use next."""
    at = 0
    end = len(content)
    memoized = 0
    while at < end:
        opcode = content[at]
        size = SIZES.get(opcode)
        if size is None:
            raise pickle.UnpicklingError(f"byte {at} is no opcode")
        at += 1
        start = at
        if size == pickletools.UP_TO_NEWLINE:
            for _ in range(LINES.get(opcode, 1)):
                at = content.find(b"\n", at) + 1
                if at == 0:
                    raise pickle.UnpicklingError(f"byte {start}: a line without an end")
        elif size < 0:
            begin = at + LENGTH_BYTES[size]
            length = int.from_bytes(content[at:begin], "little")
            if length > end - begin:
                raise pickle.UnpicklingError(f"byte {at}: {length} bytes where {end - begin} are")
            at = begin + length
        else:
            at += size
        if opcode == STOP:
            return at
        if opcode in (BINPUT, LONG_BINPUT, PUT):
            argument = content[start:at]
            place = int(argument) if opcode == PUT else int.from_bytes(argument, "little")
            # A pickler numbers its values in order, and writes a number again only by chance.
            if not 0 <= place <= memoized:
                raise pickle.UnpicklingError(
                    f"byte {start}: place {place} of the memo where {memoized} are taken"
                )
            memoized = max(memoized, place + 1)
        elif opcode == MEMOIZE:
            memoized += 1
        elif opcode == FRAME and int.from_bytes(content[start:at], "little") > end - at:
            raise pickle.UnpicklingError(f"byte {start}: a frame beyond the end")
    raise pickle.UnpicklingError("the end is missing: it was cut off")
