"""Text that is tokenized while a run trains on it: samples without a count, in an order that no
layout changes.

The corpus is cut into pieces (``shards.py``), and each pass over it shuffles the pieces. They are
dealt out to a fixed number of lanes. A lane lays the documents of its pieces end to end and cuts
them into samples; ``window / lanes`` of these at a time are shuffled. Sample p of the run is the
next one of lane p modulo the number of lanes. So a rank reads only the lanes of its own samples,
and no rank has to know how many samples there are.

Earlier text does not have to be read again: the place of a lane is a row of four integers, which a
checkpoint keeps.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_llama.data.order import mixed, sample_index
from megatron_llama.data.shards import Piece, Shard, cut
from megatron_llama.data.stream_places import ENDLESS, Row
from megatron_llama.data.text_worker import Answer, Failure, Question, TextWorker
from megatron_llama.data.workers import Helper
from megatron_llama.errors import DataError

VERSION = 1
"""Version of the samples, to be raised when the same files give others: no run then resumes."""


@dataclass(frozen=True)
class StreamSettings:
    """Settings with which text becomes samples."""

    tokenizer: str
    """Path of the tokenizer."""
    tokenizer_type: str | None
    key: str
    """Field or column with the text."""
    end: int
    """Id behind each document."""
    vocab_size: int
    """Ids lie in [0, vocab_size)."""
    seq_length: int
    seed: int
    shuffled: bool
    lanes: int
    """Number of lanes, if there are as many pieces."""
    window: int
    """Samples among which samples are shuffled, in all lanes together."""
    workers: int
    """Number of processes that tokenize."""
    step_samples: int
    """Samples of a step, in all ranks together: as many are read ahead."""
    identity: str
    """Identity of the tokenizer."""


class _Lane:
    """One lane: the tokens of the current block of samples, and those read ahead."""

    def __init__(self, row: Row) -> None:
        self.block, self.piece, self.place, self._skipped = row
        """The block that begins the tokens, and the place from which the next answer goes on."""
        self.tokens: NDArray[np.int32] = np.zeros(0, np.int32)
        self.starts: dict[int, Row] = {self.block: row}
        self.first = row
        self.documents: list[tuple[int, int, int]] = []
        """For each document in ``tokens``: its begin, counted from the block's first token, its
        piece and its place."""
        self.asked: int | None = None
        """Number of the question that is not answered yet."""
        self.blank = False
        """Whether the piece has been read from its beginning, and has had no token so far."""

    def extend(self, answer: Answer) -> None:
        """Add the documents of an answer."""
        at = len(self.tokens) - self._skipped
        begins = at + np.cumsum(answer.lengths) - answer.lengths
        self.documents += [
            (begin, self.piece, place)
            for begin, place in zip(begins.tolist(), answer.places.tolist(), strict=True)
        ]
        tokens = answer.tokens
        if self._skipped and len(tokens):
            tokens = tokens[self._skipped :]
            self._skipped = 0
        self.tokens = np.concatenate((self.tokens, tokens))

    def drop_block(self, tokens: int, keep: int) -> None:
        """Go on to the next block, which begins after so many tokens and whose first token is
        there. ``keep`` is the number of blocks whose start is remembered."""
        begin, piece, place = next(
            entry for entry in reversed(self.documents) if entry[0] <= tokens
        )
        self.block += 1
        self.starts[self.block] = (self.block, piece, place, tokens - begin)
        self.starts.pop(self.block - keep, None)
        self.tokens = self.tokens[tokens:].copy()
        self.documents = [
            (at - tokens, *where)  # type: ignore[misc]
            for at, *where in self.documents
            if at >= begin
        ]


class TextStream:
    """The samples of a corpus of text. They are read as those of a ``TokenStream`` are."""

    keep_tail = False

    def __init__(
        self,
        name: str,
        shards: Sequence[Shard],
        settings: StreamSettings,
        *,
        samples: int = ENDLESS,
    ) -> None:
        """``name`` is the word of --data-path. ``samples`` bounds the stream to its first ones, of
        which none comes twice."""
        self.name = name
        self.seq_length = settings.seq_length
        self._shards = tuple(shards)
        self._settings = settings
        self._pieces: list[Piece] = cut(shards, settings.lanes)
        self._samples = samples
        self.lanes = min(settings.lanes, len(self._pieces))
        self._block = max(1, settings.window // self.lanes)
        of_a_step = -(-settings.step_samples // self.lanes)
        # The blocks that steps reach ahead of a checkpoint, and one block for each end.
        self._keep = 2 + -(-2 * of_a_step // self._block)
        self._ahead = max(self._block, of_a_step)
        self._open: dict[int, _Lane] = {}
        self._rows: dict[int, Row] = {}
        self._blank: set[Piece] = set()
        """Pieces that are known to have no token."""
        self._questions = 0
        self._helpers: list[Helper] = []

    def __len__(self) -> int:
        return self._samples

    @property
    def num_files(self) -> int:
        """Number of files."""
        return len(self._shards)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(shard.file.size for shard in self._shards)

    def identity(self) -> dict[str, Any]:
        """Return fields for JSON that tell these samples from others."""
        settings = self._settings
        fields = {
            "version": VERSION,
            "shards": [(shard.name, shard.file.size) for shard in self._shards],
            "tokenizer": settings.identity,
            "pieces": len(self._pieces),
            "key": settings.key,
            "end": settings.end,
            "seed": settings.seed,
            "shuffled": settings.shuffled,
        }
        digest = hashlib.sha256(json.dumps(fields).encode()).hexdigest()
        return {
            "text files": self.num_files,
            "bytes of text": self.num_bytes,
            "tokens of a sample": self.seq_length,
            "lanes": self.lanes,
            "samples in a window": self._settings.window,
            "stream": digest[:32],
        }

    def found(self) -> tuple[str, str]:
        """Return the word of --data-path, and a mark of its files."""
        digest = self.identity()["stream"]
        return self.name, f"{self.num_files} files of {self.num_bytes} bytes ({digest})"

    def seek(self, rows: Sequence[Row] | None) -> None:
        """Go on from each lane's row, as ``rows`` gave it; with None from the start."""
        self._open.clear()
        self._rows = dict(enumerate(rows)) if rows is not None else {}

    def rows(self, consumed: int) -> list[Row]:
        """Return the place of each lane after the first ``consumed`` samples, or an earlier one if
        this process has read less of it."""
        return [self._row(lane, consumed) for lane in range(self.lanes)]

    def _row(self, number: int, consumed: int) -> Row:
        before = self._rows.get(number) or self._first_row(number)
        lane = self._open.get(number)
        count = max(0, -(-(consumed - number) // self.lanes))
        if lane is None or count == 0:
            return before
        last = (count - 1) // self._block
        known = [row for block, row in lane.starts.items() if block <= last]
        return max(known, default=before)

    def _first_row(self, lane: int) -> Row:
        return 0, 0, self._piece(lane, 0).start, 0

    def _piece(self, lane: int, number: int) -> Piece:
        """Return the piece of a lane with this number."""
        dealt = number * self.lanes + lane
        settings = self._settings
        if self._samples != ENDLESS and dealt >= len(self._pieces):
            batches = self._samples // settings.step_samples
            raise DataError(
                f"--data-path {self.name}: its validation files",
                got=f"fewer samples than --eval-iters {batches} x --global-batch-size "
                f"{settings.step_samples}",
                expected="enough in each of their parts",
                do="lower --eval-iters, or hold out more text",
            )
        return self._pieces[
            sample_index(dealt, len(self._pieces), settings.seed, settings.shuffled)
        ]

    def sample(self, index: int) -> NDArray[np.int64]:
        """Return the tokens of the sample at a position of the run, int64 [seq_length + 1]. Raises
        DataError if the text cannot be read or used."""
        number = index % self.lanes
        block, place = divmod(index // self.lanes, self._block)
        lane = self._lane(number, block)
        size = self._block * self.seq_length
        while lane.block < block or len(lane.tokens) <= size:
            if len(lane.tokens) > size:
                lane.drop_block(size, self._keep)
            else:
                self._read_ahead(number, lane)
                self._wait_for(number, lane)
        self._read_ahead(number, lane)
        self._receive()
        settings = self._settings
        key = mixed(settings.seed, number << 40 | block)
        start = sample_index(place, self._block, key, settings.shuffled) * self.seq_length
        return lane.tokens[start : start + self.seq_length + 1].astype(np.int64)

    def ask(self, indices: Sequence[int]) -> None:
        """Begin to read the text of these samples, all at once."""
        for index in indices:
            number, place = index % self.lanes, index // self.lanes
            self._read_ahead(number, self._lane(number, place // self._block))

    def _lane(self, number: int, block: int) -> _Lane:
        lane = self._open.get(number)
        if lane is None:
            lane = self._open[number] = _Lane(self._rows.get(number) or self._first_row(number))
        if lane.block > block:
            # A run that went back, or an evaluation that begins again.
            known = [row for row in (*lane.starts.values(), lane.first) if row[0] <= block]
            first = lane.first
            lane = self._open[number] = _Lane(max(known, default=self._first_row(number)))
            lane.first = min(first, lane.first)
        return lane

    def _read_ahead(self, number: int, lane: _Lane) -> None:
        """Ask for more tokens of a lane, unless there are enough or an answer is on its way."""
        wanted = (self._block + self._ahead) * self.seq_length + 1 - len(lane.tokens)
        if wanted <= 0 or lane.asked is not None:
            return
        if self._samples != ENDLESS:
            last = -(-(self._samples - number) // self.lanes)
            end = -(-last // self._block) * self._block - lane.block * self._block
            wanted = min(wanted, end * self.seq_length + 1 - len(lane.tokens))
            if wanted <= 0:
                return
        if not self._helpers:
            self._start()
        piece = self._piece(number, lane.piece)
        self._questions += 1
        lane.asked = self._questions
        shard = self._shards[piece.shard].file
        question = Question(number, lane.asked, shard, piece.start, piece.stop, lane.place, wanted)
        self._helpers[number % len(self._helpers)].ask(question)

    def _start(self) -> None:
        settings = self._settings
        self._helpers += [
            Helper(
                TextWorker, settings.tokenizer, settings.tokenizer_type, settings.key, settings.end
            )
            for _ in range(min(settings.workers, self.lanes))
        ]
        weakref.finalize(self, _close, self._helpers)

    def _receive(self) -> None:
        """Take all answers that have arrived."""
        for helper in self._helpers:
            while helper.answered():
                self._take(helper.answer())

    def _wait_for(self, number: int, lane: _Lane) -> None:
        """Wait for the answer to a lane's question."""
        while lane.asked is not None:
            self._take(self._helpers[number % len(self._helpers)].answer())

    def _take(self, answer: Any) -> None:
        if isinstance(answer, DataError):
            raise answer
        lane = self._open.get(answer.lane)
        if lane is None or lane.asked != answer.number:
            return  # of a lane that has gone back since
        lane.asked = None
        if isinstance(answer, Failure):
            raise answer.error
        assert isinstance(answer, Answer)
        piece = self._piece(answer.lane, lane.piece)
        self._require_ids(answer, piece)
        lane.blank = (lane.blank or lane.place == piece.start) and not len(answer.tokens)
        lane.extend(answer)
        if answer.next_place is None:
            if lane.blank:
                self._blank.add(piece)
                self._require_text(answer.lane)
                lane.blank = False
            lane.piece += 1
            lane.place = self._piece_start(answer.lane, lane.piece)
        else:
            lane.place = answer.next_place

    def _piece_start(self, lane: int, number: int) -> int:
        if self._samples != ENDLESS and number * self.lanes + lane >= len(self._pieces):
            return 0  # this place is never read: ``_piece`` refuses it
        return self._piece(lane, number).start

    def _require_text(self, lane: int) -> None:
        """Raise DataError if none of the pieces that a lane will ever have has a token: the lane
        would read them for ever."""
        if self._samples != ENDLESS:
            return
        own = (self._piece(lane, number) for number in range(len(self._pieces)))
        if self._blank.issuperset(self._pieces if self._settings.shuffled else own):
            names = sorted({self._shards[piece.shard].file.path for piece in self._blank})
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise DataError(
                f"--data-path {self.name}",
                got=f"documents without text alone ({', '.join(names[:3])}{more})",
                expected="text",
                do="change --stream-key, or leave these files out",
            )

    def _require_ids(self, answer: Answer, piece: Piece) -> None:
        tokens = answer.tokens
        if not len(tokens) or int(tokens.max()) < self._settings.vocab_size:
            return
        at = int(np.argmax(tokens >= self._settings.vocab_size))
        document = int(np.searchsorted(np.cumsum(answer.lengths), at, side="right"))
        raise DataError(
            f"{self._shards[piece.shard].file.path}: the document at {answer.places[document]}",
            got=f"id {tokens[at]}",
            expected=f"0 to {self._settings.vocab_size - 1}",
            do="take this model's tokenizer, or give --resize-embeddings to add rows to a trained "
            "model, --vocab-size to a new one",
        )


def _close(helpers: list[Helper]) -> None:
    for helper in helpers:
        helper.close()
