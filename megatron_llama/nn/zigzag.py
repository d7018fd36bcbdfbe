"""Who holds and who sees which part of a sequence under context parallelism: plain integers, no
torch.

The sequence is cut into 2 x size equal chunks; rank r holds chunks r and 2 x size - 1 - r, in that
order. An early chunk sees few keys and its partner many, so every rank computes the same number of
scores (zig-zag; Dubey et al., 2024, section 3.3.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_llama.errors import ConfigError, describe


@dataclass(frozen=True)
class Piece:
    """One attention call: chunks [start, stop) of a rank's own two, seeing chunks [start, stop) of
    a block of keys.

    ``causal``: the chunks are the same one and a token sees no later token; otherwise every token
    sees every key."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool = False


def zigzag_chunks(rank: int, size: int) -> tuple[int, int]:
    """The two chunks of a rank."""
    return rank, 2 * size - 1 - rank


def chunk_home(chunk: int, size: int) -> tuple[int, int]:
    """The rank that holds a chunk, and whether it is its first (0) or second (1)."""
    return (chunk, 0) if chunk < size else (2 * size - 1 - chunk, 1)


def chunk_length(length: int, size: int) -> int:
    """Tokens per chunk of a sequence of ``length`` tokens. Raises ConfigError unless the chunks are
    equal."""
    if length % (2 * size):
        want = f"a multiple of {2 * size}, twice the context parallel size"
        raise ConfigError(
            describe("sequence length", got=length, expected=want, do="change one of the two")
        )
    return length // (2 * size)


def zigzag_positions(length: int, rank: int, size: int) -> tuple[range, range]:
    """Global positions of a rank's tokens, in local order. Raises ConfigError unless the chunks are
    equal."""
    chunk = chunk_length(length, size)
    first, second = zigzag_chunks(rank, size)
    return range(first * chunk, (first + 1) * chunk), range(second * chunk, (second + 1) * chunk)


def own_pieces() -> tuple[Piece, ...]:
    """Both chunks on themselves: what needs no communication and is the same for both
    algorithms."""
    return Piece((0, 1), (0, 1), causal=True), Piece((1, 2), (1, 2), causal=True)


def gathered_pieces(rank: int, size: int) -> tuple[Piece, ...]:
    """What ``own_pieces`` leaves, when the block is the whole sequence in its order: each chunk
    sees all chunks before it."""
    first, second = zigzag_chunks(rank, size)
    early = (Piece((0, 1), (0, first)),) if first else ()
    return *early, Piece((1, 2), (0, second))


def ring_pieces(rank: int, source: int) -> tuple[Piece, ...]:
    """What ``rank`` computes with the two chunks of rank ``source``. With those of another rank:
    half of the four pairs.

    Chunks of an earlier rank: its first is before both of ours, its second after both. Of a later
    rank: both lie between ours."""
    if source == rank:
        first, second = own_pieces()
        return first, Piece((1, 2), (0, 1)), second
    return (Piece((0, 2), (0, 1)),) if source < rank else (Piece((1, 2), (0, 2)),)
