"""The parts of a sequence that each rank holds under context parallelism, and the parts that each
attends to: plain integers, no torch.

The sequence is cut into 2 x size equal chunks; rank r holds chunks r and 2 x size - 1 - r, in that
order. An early chunk sees few keys and its partner many, so every rank computes the same number of
attention scores (zig-zag; Dubey et al., 2024, section 3.3.2).

With a window a query sees only the last tokens of some chunks before its own. Each rank sends these
tails straight to the ranks whose queries reach them.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_llama.errors import ConfigError, describe


@dataclass(frozen=True)
class Piece:
    """One attention call: chunks [start, stop) of a rank's own two as queries, and chunks [start,
    stop) of a block as keys.

    With ``causal`` both are the same chunk, in which a token sees no later token; otherwise every
    query sees every key."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool = False


def zigzag_chunks(rank: int, size: int) -> tuple[int, int]:
    """Return the two chunks of a rank."""
    return rank, 2 * size - 1 - rank


def chunk_owner(chunk: int, size: int) -> tuple[int, int]:
    """Return the rank that holds a chunk, and whether it is its first (0) or second (1)."""
    return (chunk, 0) if chunk < size else (2 * size - 1 - chunk, 1)


def chunk_length(length: int, size: int) -> int:
    """Return the tokens per chunk of a sequence of ``length`` tokens. Raises ConfigError unless the
    chunks are equal."""
    if length % (2 * size):
        want = f"a multiple of {2 * size}, twice the context parallel size"
        raise ConfigError(
            describe("sequence length", got=length, expected=want, do="change one of the two")
        )
    return length // (2 * size)


def own_pieces() -> tuple[Piece, ...]:
    """Return both chunks attending to themselves. They need no communication, and are the same for
    both algorithms."""
    return Piece((0, 1), (0, 1), causal=True), Piece((1, 2), (1, 2), causal=True)


def gathered_pieces(rank: int, size: int) -> tuple[Piece, ...]:
    """Return the pieces beside ``own_pieces`` when the block is the whole sequence in its order:
    each chunk sees all chunks before it."""
    first, second = zigzag_chunks(rank, size)
    early = (Piece((0, 1), (0, first)),) if first else ()
    return *early, Piece((1, 2), (0, second))


def ring_pieces(rank: int, source: int) -> tuple[Piece, ...]:
    """Return the pieces of ``rank`` with the two chunks of rank ``source``: half of the four pairs
    if it is another rank."""
    if source == rank:
        first, second = own_pieces()
        return first, Piece((1, 2), (0, 1)), second
    if source < rank:  # its first chunk is before both of ours, its second after both
        return (Piece((0, 2), (0, 1)),)
    return (Piece((1, 2), (0, 2)),)  # both its chunks lie between ours


def reached(keys: int, queries: int, length: int, window: int) -> int:
    """Return how many tokens at the end of chunk ``keys`` the queries of a later chunk see through
    a window, with ``length`` tokens a chunk. As many queries, the first ones, see any of them."""
    if keys >= queries:
        return 0
    between = (queries - keys - 1) * length
    return max(0, min(length, window - 1 - between))


@dataclass(frozen=True)
class Tail:
    """The last tokens of a chunk."""

    chunk: int
    tokens: int


def tails(source: int, target: int, size: int, length: int, window: int) -> tuple[Tail, ...]:
    """Return the tails of rank ``source``'s chunks that the queries of rank ``target`` see, through
    a window and beside their own chunk."""
    seen = (
        Tail(chunk, max(reached(chunk, own, length, window) for own in zigzag_chunks(target, size)))
        for chunk in zigzag_chunks(source, size)
    )
    return tuple(tail for tail in seen if tail.tokens)
