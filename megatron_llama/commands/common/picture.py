"""A picture of coloured boxes and small numbers, written as PNG with the standard library."""

from __future__ import annotations

import struct
import zlib

Colour = tuple[int, int, int]

CHARACTERS = "0123456789FBW"
GLYPHS = (
    (14, 17, 19, 21, 25, 17, 14),
    (4, 12, 4, 4, 4, 4, 14),
    (14, 17, 1, 6, 8, 16, 31),
    (14, 17, 1, 6, 1, 17, 14),
    (2, 6, 10, 18, 31, 2, 2),
    (31, 16, 30, 1, 1, 17, 14),
    (6, 8, 16, 30, 17, 17, 14),
    (31, 1, 2, 4, 8, 8, 8),
    (14, 17, 17, 14, 17, 17, 14),
    (14, 17, 17, 15, 1, 2, 12),
    (31, 16, 16, 30, 16, 16, 16),
    (30, 17, 17, 30, 17, 17, 30),
    (17, 17, 17, 21, 21, 27, 17),
)
"""Rows of five pixels, top to bottom, the highest bit on the left; one glyph for each of
CHARACTERS."""
GLYPH_WIDTH = 5
GLYPH_HEIGHT = 7


def text_width(text: str, scale: int) -> int:
    """Pixels from the first to the last column of a text."""
    return scale * ((GLYPH_WIDTH + 1) * len(text) - 1)


class Canvas:
    """Pixels that can be painted. Nothing is clipped: what is painted must lie inside."""

    def __init__(self, width: int, height: int, background: Colour) -> None:
        self.width = width
        self.height = height
        self._rows = [bytearray(bytes(background) * width) for _ in range(height)]

    def box(
        self, left: int, top: int, width: int, height: int, colour: Colour, *, rounded: int = 0
    ) -> None:
        """Fill a rectangle; ``rounded``: pixels cut from its corners, one fewer in each row."""
        for row in range(height):
            cut = max(0, rounded - min(row, height - 1 - row))
            start = left + cut
            count = width - 2 * cut
            self._rows[top + row][3 * start : 3 * (start + count)] = bytes(colour) * count

    def text(self, centre: int, middle: int, text: str, colour: Colour, *, scale: int) -> None:
        """Write CHARACTERS around a point."""
        left = centre - text_width(text, scale) // 2
        top = middle - scale * GLYPH_HEIGHT // 2
        for index, character in enumerate(text):
            start = left + scale * (GLYPH_WIDTH + 1) * index
            for row, bits in enumerate(GLYPHS[CHARACTERS.index(character)]):
                for column in range(GLYPH_WIDTH):
                    if bits >> (GLYPH_WIDTH - 1 - column) & 1:
                        self.box(start + scale * column, top + scale * row, scale, scale, colour)

    def png(self) -> bytes:
        """The file: 8 bits for each of red, green and blue, no filter (PNG specification, sections
        5 and 11)."""
        header = struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)
        pixels = zlib.compress(b"".join(b"\0" + row for row in self._rows), 9)
        return (
            b"\x89PNG\r\n\x1a\n"
            + _chunk(b"IHDR", header)
            + _chunk(b"IDAT", pixels)
            + _chunk(b"IEND", b"")
        )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
