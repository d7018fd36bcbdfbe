"""Checks the bytes of a pickle before they are read.

A pickle names the place of its memo into which a value goes, and the lengths of its strings, and
CPython's reader makes room for any number: 9 bytes can take 34 GB. No classes have to be allowed
for that, so a list of classes does not help. Nor does it help against tuples that each hold the
previous one twice: the hash of the last one takes forever. So the stack is followed here, with a
number in the place of each value: the number of values that it is made of, if it can be hashed.

Opcodes: CPython's ``pickletools``."""

from __future__ import annotations

import pickle
import pickletools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from megatron_llama.config.limits import (
    HASHED_PER_PICKLED_BYTE,
    LARGEST_TUPLE,
    PICKLED_BYTES_PER_OBJECT,
)

FREE_OBJECTS = 2**18
"""Number of objects that a pickle may make whatever its length."""
FREE_HASHED = 2**16
"""Number of values that may be hashed whatever the length."""


class ForbiddenNames(pickle.UnpicklingError):
    """A pickle names classes or functions that are not allowed."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(f"a pickle that calls {', '.join(names)}")


@dataclass(frozen=True, slots=True)
class _Opcode:
    """Effect of an opcode."""

    argument: int
    """Bytes of its argument; without a fixed size, the (negative) kind of pickletools."""
    pops: int
    """Number of values that it takes from the stack, apart from those above a mark."""
    to_mark: bool
    """Whether it takes everything above the last mark, and the mark."""
    pushes: int
    joins: bool
    """Whether the result is made of the taken values, and hashed with them."""
    keeps: bool
    """Whether the result is the first of the taken values."""
    hashes: bool
    """Whether one of the taken values is hashed."""
    makes: bool
    """Whether the result is a new object that takes memory."""


JOINING = frozenset(
    [
        "TUPLE",
        "TUPLE1",
        "TUPLE2",
        "TUPLE3",
        "FROZENSET",
        "REDUCE",
        "NEWOBJ",
        "NEWOBJ_EX",
        "INST",
        "OBJ",
        "BINPERSID",
    ]
)
KEEPING = frozenset(["DUP", "BUILD", "MEMOIZE"])
HASHING = frozenset(["SETITEM", "SETITEMS", "ADDITEMS", "DICT", "FROZENSET"])
MAKING = JOINING | {"EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "LIST", "DICT"}


def _opcodes() -> Mapping[int, _Opcode]:
    table = {}
    for code in pickletools.opcodes:
        before = list(code.stack_before)
        to_mark = pickletools.markobject in before
        table[ord(code.code)] = _Opcode(
            0 if code.arg is None else code.arg.n,
            before.index(pickletools.markobject) if to_mark else len(before),
            to_mark,
            len(code.stack_after),
            code.name in JOINING,
            code.name in KEEPING,
            code.name in HASHING,
            code.name in MAKING,
        )
    return MappingProxyType(table)


OPCODES = _opcodes()
CONSTANTS: Mapping[int, int] = MappingProxyType(
    {
        byte: 1 + opcode.argument
        for byte, opcode in OPCODES.items()
        if (opcode.pops, opcode.to_mark, opcode.pushes) == (0, False, 1)
        and opcode.argument >= 0
        and not opcode.makes
        and chr(byte) not in "(hj"
    }
)
"""Opcodes that only push a value of their own, with their length, argument included."""
LENGTH_BYTES: Mapping[int, int] = MappingProxyType(
    {
        pickletools.TAKEN_FROM_ARGUMENT1: 1,
        pickletools.TAKEN_FROM_ARGUMENT4: 4,
        pickletools.TAKEN_FROM_ARGUMENT4U: 4,
        pickletools.TAKEN_FROM_ARGUMENT8U: 8,
    }
)
"""Arguments that begin with their own length, in so many bytes."""
LINES: Mapping[int, int] = MappingProxyType({ord("i"): 2, ord("c"): 2})
"""Opcodes whose argument is two lines of text: module and name."""
STOP = ord(pickle.STOP)
MARK = ord(pickle.MARK)
POP = ord(pickle.POP)
PUT = ord(pickle.PUT)
BINPUT = ord(pickle.BINPUT)
LONG_BINPUT = ord(pickle.LONG_BINPUT)
MEMOIZE = ord(pickle.MEMOIZE)
GET = ord(pickle.GET)
BINGET = ord(pickle.BINGET)
LONG_BINGET = ord(pickle.LONG_BINGET)
FRAME = ord(pickle.FRAME)
_GET = rb"(?:h.|j....)"
_NUMBER = rb"(?:K.|M..|J....|N|\x8a(?:\x05.{5}|\x06.{6}))"
_SIZE = rb"(h.|j....)(?:%b\x85|%b{2}\x86|%b{3}\x87)\x94\x85\x94R\x94" % (_NUMBER, _NUMBER, _NUMBER)
_FIELDS = rb"(?:%b(?:%b|%b)){,8}" % (_GET, _NUMBER, _GET)
SMALL_OBJECT = re.compile(
    rb"(h.|j....)\)\x81\x94\}\x94\(%b(?:%b%b%b(?:%b%b%b)?)?ub"
    % (_FIELDS, _GET, _SIZE, _FIELDS, _GET, _SIZE, _FIELDS),
    re.DOTALL,
)
"""An object of a class, whose fields are integers, values of the memo, and at most two results of a
call with up to three integers, such as ``torch.Size``. The groups are the places of the class and
of the called functions."""
SMALL = 8
"""Bound on the size of values that a SMALL_OBJECT puts into the memo, if its groups have size 1."""
PLACES = frozenset({PUT, BINPUT, LONG_BINPUT, GET, BINGET, LONG_BINGET})
"""Opcodes whose argument is a place of the memo."""


def require_bounded(content: bytes) -> int:
    """Return the length of the pickle at the beginning of ``content``. Raises
    pickle.UnpicklingError if it claims a length beyond its end or a place of the memo that no
    pickler would use next, or makes values that take much more memory or time than its bytes."""
    stack: list[int] = []
    marks: list[int] = []
    memo: list[int] = []
    at = 0
    end = len(content)
    objects = FREE_OBJECTS + end // PICKLED_BYTES_PER_OBJECT
    hashed = FREE_HASHED + end * HASHED_PER_PICKLED_BYTE
    largest = 1
    # Opcodes that get a value of size one from the memo; None stands for a group without a match.
    ones: set[bytes | None] = {None}
    while at < end:
        byte = content[at]
        # The index of a large model has millions of opcodes. Nearly all of them belong to three
        # objects for each chunk, which are taken whole.
        if byte in (BINGET, LONG_BINGET):
            match = SMALL_OBJECT.match(content, at)
            # A value of the memo takes two bytes or more, so none takes more than its bytes allow.
            if match is not None and largest <= 2 * HASHED_PER_PICKLED_BYTE:
                named = match.groups()
                if not ones.issuperset(named):
                    ones.update(get for get in named if get is not None and _is_one(memo, get))
                if ones.issuperset(named):
                    values_made = 3 * (match.lastindex or 1) - 1
                    objects -= values_made
                    hashed -= HASHED_PER_PICKLED_BYTE * (match.end() - at)
                    memo += [SMALL] * values_made
                    largest = max(largest, SMALL)
                    stack.append(SMALL)
                    at = match.end()
                    continue
        if byte == MEMOIZE and stack:
            memo.append(stack[-1])
            at += 1
            continue
        constant = CONSTANTS.get(byte)
        if constant is not None:
            stack.append(1)
            at += constant
            continue
        if byte in (BINGET, LONG_BINGET):
            start = at + 1
            at = start + (1 if byte == BINGET else 4)
            place = int.from_bytes(content[start:at], "little")
            if place < len(memo):
                stack.append(memo[place])
                continue
            at = start - 1
        opcode = OPCODES.get(byte)
        if opcode is None:
            raise pickle.UnpicklingError(f"byte {at} is no opcode")
        start = at + 1
        at = start
        if opcode.argument:
            at = _end_of_argument(content, start, byte, opcode.argument)
        if byte == MARK:
            marks.append(len(stack))
            continue
        if byte == STOP:
            if objects < 0 or hashed < 0:
                raise pickle.UnpicklingError("more values than bytes for them")
            return at
        if byte in PLACES:
            argument = content[start:at]
            place = int.from_bytes(argument, "little")
            if byte in (PUT, GET):
                place = int(argument) if re.fullmatch(rb"\d{1,19}\n", argument) else -1
            taken = len(memo)
            puts = byte in (PUT, BINPUT, LONG_BINPUT)
            # A pickler numbers its values in order, and writes a number again only by chance.
            if not 0 <= place < taken + puts or (puts and not stack):
                raise pickle.UnpicklingError(
                    f"byte {start}: place {place} of the memo where {taken} are taken"
                )
            if not puts:
                stack.append(memo[place])
            elif place == taken:
                memo.append(stack[-1])
            else:
                memo[place] = max(memo[place], stack[-1])
                ones = {None}
            continue
        if byte == FRAME and int.from_bytes(content[start:at], "little") > end - at:
            raise pickle.UnpicklingError(f"byte {start}: a frame beyond the end")
        if byte == POP and marks and marks[-1] == len(stack):
            marks.pop()
            continue
        base = len(stack)
        if opcode.to_mark:
            if not marks:
                raise pickle.UnpicklingError(f"byte {start - 1}: no mark")
            base = marks.pop()
        base -= opcode.pops
        if base < (marks[-1] if marks else 0):
            raise pickle.UnpicklingError(f"byte {start - 1}: nothing on the stack")
        values = stack[base:]
        del stack[base:]
        size = values[0] if opcode.keeps else 1
        if opcode.joins:
            size += sum(values)
            if size > LARGEST_TUPLE:
                raise pickle.UnpicklingError(
                    f"byte {start - 1}: a tuple of {size} values where {LARGEST_TUPLE} are allowed"
                )
            largest = max(largest, size)
        if opcode.hashes:
            hashed -= sum(values)
        objects -= opcode.makes
        stack += [size] * opcode.pushes
        if byte == MEMOIZE:
            memo.append(size)
    raise pickle.UnpicklingError("the end is missing: it was cut off")


def _is_one(memo: list[int], get: bytes) -> bool:
    """Whether an opcode with its argument gets a value from the memo that contains no other."""
    place = int.from_bytes(get[1:], "little")
    return place < len(memo) and memo[place] == 1


def _end_of_argument(content: bytes, start: int, opcode: int, size: int) -> int:
    """Return the end of an argument that begins at ``start`` and has so many bytes, or is of a kind
    of pickletools. Raises pickle.UnpicklingError if it would lie behind the end."""
    end = len(content)
    at = start
    if size >= 0:
        at += size
    elif size == pickletools.UP_TO_NEWLINE:
        for _ in range(LINES.get(opcode, 1)):
            at = content.find(b"\n", at) + 1
            if at == 0:
                raise pickle.UnpicklingError(f"byte {start}: a line without an end")
    else:
        begin = at + LENGTH_BYTES[size]
        length = int.from_bytes(content[at:begin], "little")
        if length > end - begin:
            raise pickle.UnpicklingError(f"byte {at}: {length} bytes where {end - begin} are")
        at = begin + length
    if at > end:
        raise pickle.UnpicklingError("the end is missing: it was cut off")
    return at
