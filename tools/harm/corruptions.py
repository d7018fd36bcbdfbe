"""Damage as functions of bytes: what happens to files on disks, on wires and in hurried hands.

Each is drawn from a seed, and says what it has done to which byte of which file.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

Files = Mapping[str, bytes]
"""The content of a folder by relative name."""
ENDS = 2048
"""Bytes at both ends of a file, where headers and directories are: half of all damage is there."""


@dataclass(frozen=True)
class Corruption:
    """What was done to a file."""

    kind: str
    file: str
    words: str
    content: bytes | None
    """The file as it is now; None when it is gone."""

    def __str__(self) -> str:
        return f"{self.kind} {self.file}: {self.words}"


Damage = Callable[[random.Random, str, Files, Sequence[Files]], Corruption | None]
"""Damages one file of a folder that has siblings; None if the file cannot be damaged so."""


def draw(chance: random.Random, files: Files, siblings: Sequence[Files]) -> Corruption:
    """Damage one file of a folder. Every file is as likely as another, whatever its size."""
    names = sorted(files)
    while True:
        name = chance.choice(names)
        kind = chance.choices(tuple(DAMAGES), weights=tuple(WEIGHTS[kind] for kind in DAMAGES))[0]
        corruption = DAMAGES[kind](chance, name, files, siblings)
        if corruption is not None and corruption.content != files[name]:
            return corruption


def _place(chance: random.Random, size: int) -> int:
    """A position in a file of at least a byte."""
    if size <= 2 * ENDS or chance.random() < 0.5:
        return chance.randrange(size)
    offset = chance.randrange(2 * ENDS)
    return offset if offset < ENDS else size - 2 * ENDS + offset


def flip(chance: random.Random, name: str, files: Files, _: Sequence[Files]) -> Corruption | None:
    """One bit is another."""
    content = bytearray(files[name])
    if not content:
        return None
    at, bit = _place(chance, len(content)), chance.randrange(8)
    before = content[at]
    content[at] ^= 1 << bit
    words = f"bit {bit} of byte {at} of {len(content)}, {before:#04x} to {content[at]:#04x}"
    return Corruption("flip", name, words, bytes(content))


def digit(chance: random.Random, name: str, files: Files, _: Sequence[Files]) -> Corruption | None:
    """One decimal digit of a text is another: the damage that no parser can see."""
    content = files[name]
    places = [at for at, byte in enumerate(content) if 0x30 <= byte <= 0x39]
    if not places or b"\0" in content[:4096]:
        return None
    at = chance.choice(places)
    other = chance.choice([byte for byte in b"0123456789" if byte != content[at]])
    changed = content[:at] + bytes([other]) + content[at + 1 :]
    words = (
        f"byte {at} of {len(content)}, {chr(content[at])} to {chr(other)} in {_around(content, at)}"
    )
    return Corruption("digit", name, words, changed)


def cut(chance: random.Random, name: str, files: Files, _: Sequence[Files]) -> Corruption | None:
    """The end is missing."""
    content = files[name]
    if not content:
        return None
    keep = chance.choice((0, len(content) - 1, _place(chance, len(content))))
    return Corruption("cut", name, f"{keep} of {len(content)} bytes left", content[:keep])


def append(chance: random.Random, name: str, files: Files, _: Sequence[Files]) -> Corruption | None:
    """Bytes follow that do not belong there."""
    content = files[name]
    count = chance.choice((1, 7, 512))
    repeated = content[:count] if chance.random() < 0.5 else bytes(count)
    words = f"{len(repeated)} bytes behind {len(content)}: {repeated[:8]!r}..."
    return Corruption("append", name, words, content + repeated)


def zero(chance: random.Random, name: str, files: Files, _: Sequence[Files]) -> Corruption | None:
    """A block reads as zeros, as after a crash of a file system."""
    content = files[name]
    if not content:
        return None
    at = _place(chance, len(content)) & ~511
    size = min(chance.choice((16, 512, 4096)), len(content) - at)
    changed = content[:at] + bytes(size) + content[at + size :]
    return Corruption("zero", name, f"{size} bytes from {at} of {len(content)}", changed)


def exchange(
    chance: random.Random, name: str, files: Files, siblings: Sequence[Files]
) -> Corruption | None:
    """The file of another folder of the same kind lies there."""
    numbers = [number for number, sibling in enumerate(siblings, 1) if name in sibling]
    if not numbers:
        return None
    number = chance.choice(numbers)
    return Corruption(
        "exchange", name, f"with that of sibling {number}", siblings[number - 1][name]
    )


def drop(chance: random.Random, name: str, files: Files, _: Sequence[Files]) -> Corruption | None:
    """The file is gone."""
    return Corruption("drop", name, f"{len(files[name])} bytes gone", None)


DAMAGES: Mapping[str, Damage] = MappingProxyType(
    {
        "flip": flip,
        "digit": digit,
        "cut": cut,
        "append": append,
        "zero": zero,
        "exchange": exchange,
        "drop": drop,
    }
)
WEIGHTS: Mapping[str, int] = MappingProxyType(
    {"flip": 8, "digit": 3, "cut": 2, "append": 1, "zero": 2, "exchange": 3, "drop": 1}
)


def _around(content: bytes, at: int) -> str:
    """The text around a position, as one word."""
    begin = max(content.rfind(b"\n", 0, at) + 1, at - 30)
    end = content.find(b"\n", at)
    return repr(
        content[begin : min(len(content) if end < 0 else end, at + 20)].decode(errors="replace")
    )
