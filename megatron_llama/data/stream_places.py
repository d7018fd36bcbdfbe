"""The places of a run in samples without a count: those of a text that is read as it comes
(``text_stream.py``, which a run loads if --data-path names text)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from megatron_llama.config.fields import shown
from megatron_llama.config.limits import LARGEST_INTEGER
from megatron_llama.config.schema import DataConfig
from megatron_llama.data.loader import BlendedSamples, Samples, StreamSamples, TokenSamples
from megatron_llama.errors import DataError

ENDLESS = 1 << 48
"""The length of samples without a count: no run reads as many."""
_ROW_BOUNDS = (ENDLESS, ENDLESS, LARGEST_INTEGER, LARGEST_INTEGER)
"""The largest value of each number of a row."""
Row = tuple[int, int, int, int]
"""The place of a lane: the number of a block of samples, and the position of its first token, which
is a piece of the lane, a place in that piece (``Question.place``), and the number of tokens of that
document before it."""


class Stream(TokenSamples, Protocol):
    """Samples of a text, in lanes: a ``TextStream``."""

    @property
    def name(self) -> str:
        """The word of --data-path."""

    @property
    def lanes(self) -> int:
        """Number of lanes into which the text is dealt out."""

    @property
    def num_files(self) -> int:
        """Number of files."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""

    def ask(self, indices: Sequence[int]) -> None:
        """Begin to read these samples."""

    def seek(self, rows: Sequence[Row] | None) -> None:
        """Go on from each lane's row, as ``rows`` gave it; with None from the start."""

    def rows(self, consumed: int) -> list[Row]:
        """Return the place of each lane after the first ``consumed`` samples, or an earlier one if
        this process has read less of it."""


class StreamedSamples(StreamSamples):
    """The samples of a text stream, with the masks that ``data`` asks for."""

    def __init__(self, stream: Stream, data: DataConfig, eod: int | None) -> None:
        super().__init__(stream, data, eod)
        self.text = stream

    def ask(self, indices: Sequence[int]) -> None:
        """Begin to read these samples before ``batch`` is called for them."""
        self.text.ask(indices)


def text_streams(samples: Samples) -> list[Stream]:
    """Return the streams of samples; none for samples that have a count."""
    if isinstance(samples, StreamedSamples):
        return [samples.text]
    if isinstance(samples, BlendedSamples):
        return [part.text for part in samples.parts if isinstance(part, StreamedSamples)]
    return []


def positions(samples: Samples, consumed: int) -> list[int]:
    """Return the number of samples that each stream has given after ``consumed`` of the run."""
    if isinstance(samples, BlendedSamples):
        return samples.order.counts(consumed)
    return [consumed]


Places = Sequence[Sequence[Row]]
"""The rows of each stream."""


def places(samples: Samples, consumed: int) -> Places:
    """Return the places of the streams after ``consumed`` samples of the run, as far as this
    process has read them."""
    counts = positions(samples, consumed)
    streams = text_streams(samples)
    return [stream.rows(count) for stream, count in zip(streams, counts, strict=True)]


def furthest(found: Sequence[Places]) -> list[list[Row]]:
    """Join the places of several processes at the same position: the furthest row of each lane."""
    return [[max(rows) for rows in zip(*lanes, strict=True)] for lanes in zip(*found, strict=True)]


def seek(samples: Samples, kept: Any) -> None:
    """Have the streams go on from the places that a checkpoint keeps; None: from the start."""
    streams = text_streams(samples)
    rows = [None] * len(streams) if kept is None else kept
    if kept is not None:
        _require_rows(kept)
    for stream, lanes in zip(streams, rows, strict=True):
        stream.seek(None if lanes is None else [(a, b, c, d) for a, b, c, d in lanes])


def _require_rows(kept: Any) -> None:
    """Raise DataError unless places that a checkpoint keeps are rows of four integers."""
    streams = kept if isinstance(kept, list | tuple) else [kept]
    for number, lanes in enumerate(streams):
        rows = lanes if isinstance(lanes, list | tuple) else [lanes]
        for lane, row in enumerate(rows):
            is_row = isinstance(row, list | tuple) and len(row) == len(_ROW_BOUNDS)
            if not is_row or not all(
                type(value) is int and 0 <= value <= most
                for value, most in zip(row, _ROW_BOUNDS, strict=True)
            ):
                raise DataError(
                    f"stream_places of the checkpoint: stream {number}, lane {lane}",
                    got=shown(row),
                    expected="four integers of at least 0: block, piece, place, tokens",
                    do="take another copy of the checkpoint, or begin anew (--finetune)",
                )


def fits(samples: Samples, kept: Mapping[str, Any] | Sequence[Any]) -> bool:
    """Whether places that a checkpoint keeps are those of as many streams and lanes."""
    if not all(isinstance(lanes, list | tuple) for lanes in kept):
        _require_rows(kept)
    return [len(lanes) for lanes in kept] == [stream.lanes for stream in text_streams(samples)]
