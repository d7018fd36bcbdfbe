"""Makes batches of samples, with the masks for document boundaries."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_llama.config.batch_ramp import BatchSizes
from megatron_llama.config.schema import DataConfig
from megatron_llama.data.order import BlendedOrder, mixed
from megatron_llama.data.stream import TokenStream
from megatron_llama.engine.comm.device import is_host
from megatron_llama.errors import DataError
from megatron_llama.model.nn.documents import Bounds, Documents

STEPS_AHEAD = 2
"""Samples of a remote dataset are requested so many steps before they are read: a server then has
the time of two steps to answer."""


@dataclass(frozen=True)
class Batch:
    """One microbatch, sequence first: s tokens of b samples."""

    tokens: Tensor
    """Input ids, int64 [s, b]."""
    labels: Tensor
    """The next ids, int64 [s, b]."""
    loss_mask: Tensor | None = None
    """1 where the label counts, else 0, float32 [s, b]. With None every label counts."""
    position_ids: Tensor | None = None
    """Positions, int64 [s, b]. None stands for 0, 1, ..., s - 1."""
    document_ids: Tensor | None = None
    """Number of the document within the sample, int32 [s, b]. With None attention crosses
    documents."""
    noise_scale: Tensor | None = None
    """Largest noise that training adds to the embedding of a token, float32 [s, b]. None stands for
    no noise."""
    noise_seeds: tuple[int, ...] = ()
    """A seed for each sample, where there is noise."""
    document_starts: Tensor | None = None
    """``Documents.starts`` of ``document_ids``, on a device; None if they have not been counted."""
    document_bounds: Bounds | None = None
    """``Documents.bounds``, where they are counted."""
    completion_ids: Tensor | None = None
    """1 + the number, within its sample, of the completion that the label belongs to, int32 [s, b];
    0 for labels of no completion. None for samples without completions to compare."""
    completion_kinds: Tensor | None = None
    """Kind of each completion of a sample, int8 [c, b]: 0 absent, 1 chosen or desirable, 2 rejected
    or undesirable. In a pair, number 2k is the chosen one and 2k + 1 the rejected one."""
    reference_logps: Tensor | None = None
    """Log-probability of each completion under the reference, float64 [c, b]."""
    mismatched: Batch | None = None
    """Prompts with completions of other prompts, from which KTO estimates a divergence."""

    @property
    def document_mask(self) -> Tensor | None:
        """The mask of attention, bool [b, 1, s, s], or None without documents. It is True where a
        query (third dim) may attend to a key (fourth): at the same or an earlier position of the
        same document."""
        if self.document_ids is None:
            return None
        # Made on each call: kept, it would take s * s bytes a sample for each microbatch of a step.
        ids = self.document_ids.t()
        return (ids[:, :, None] == ids[:, None, :]).tril().unsqueeze(1)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the batch by field, those of ``mismatched`` included."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        own = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        inner = self.mismatched.tensors() if self.mismatched is not None else {}
        return own | {f"mismatched.{name}": value for name, value in inner.items()}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Batch:
        """Return the batch with its tensors replaced by these, named as by ``tensors``."""
        own = {name: value for name, value in tensors.items() if "." not in name}
        moved = replace(self, **own)  # type: ignore[arg-type]
        if self.mismatched is None:
            return moved
        prefix = "mismatched."
        inner = {
            name.removeprefix(prefix): value
            for name, value in tensors.items()
            if name.startswith(prefix)
        }
        return replace(moved, mismatched=self.mismatched.with_tensors(inner))

    def prepared(self, device: torch.device) -> Batch:
        """Return the batch with its documents counted, if ``device`` needs that."""
        # The host counts before it sends the ids: to count on the device, it would have to wait.
        if self.document_ids is None or is_host(device) or not is_host(self.document_ids.device):
            return self
        documents = Documents.of(self.document_ids)
        inner = self.mismatched.prepared(device) if self.mismatched is not None else None
        return replace(
            self,
            document_starts=documents.starts,
            document_bounds=documents.bounds,
            mismatched=inner,
        )

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device, or itself if it is there already."""
        if self.tokens.device == device:
            return self
        ready = self.prepared(device)
        return ready.with_tensors(
            {name: tensor.to(device, non_blocking=True) for name, tensor in ready.tensors().items()}
        )


class Samples(Protocol):
    """Samples of one length, of which batches are made."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return these samples as a batch. Raises DataError."""

    def identity(self) -> dict[str, Any]:
        """Return a few fields for JSON that differ for other samples. A checkpoint keeps them."""


@runtime_checkable
class AskedAhead(Protocol):
    """Samples that take time to read, several of which are read at once."""

    def ask(self, indices: Sequence[int]) -> None:
        """Begin to read these samples. Raises DataError."""


@runtime_checkable
class FetchedAhead(Protocol):
    """Samples that may come from a server, and then are asked for steps ahead."""

    @property
    def is_remote(self) -> bool:
        """Whether some do."""

    def fetch(self, indices: Sequence[int]) -> None:
        """Begin to read these samples. It does not wait, and errors are raised when they are
        read."""


@runtime_checkable
class OfFiles(Protocol):
    """Samples of files that every rank has looked up by itself."""

    def found(self) -> list[tuple[str, str]]:
        """Return each file's name and a mark of its content, which is the same on all ranks."""


def found_files(samples: Samples) -> list[tuple[str, str]]:
    """Return the names and marks of the files of samples; none for samples that ranks have opened
    together."""
    return samples.found() if isinstance(samples, OfFiles) else []


def reads_remotely(samples: Samples) -> bool:
    """Whether samples come from a server and can be requested ahead."""
    return isinstance(samples, FetchedAhead) and samples.is_remote


def fetch(samples: Samples, indices: Sequence[int]) -> None:
    """Begin to read samples, if they come from a server."""
    if isinstance(samples, FetchedAhead) and samples.is_remote:
        samples.fetch(indices)


class TokenSamples(Protocol):
    """Samples as tokens: those of a ``TokenStream``, or of a ``TextStream``."""

    @property
    def seq_length(self) -> int:
        """One less than the tokens of a sample."""

    @property
    def keep_tail(self) -> bool:
        """Whether the last sample may be shorter."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def identity(self) -> dict[str, Any]:
        """Return a few fields for JSON that differ for other samples."""

    def found(self) -> tuple[str, str]:
        """Return the name of the files, and a mark of their content."""

    def sample(self, index: int) -> NDArray[np.int64]:
        """Return the tokens of a sample, int64 [seq_length + 1]. Raises DataError."""


class StreamSamples:
    """The samples of a token stream, with the masks that ``data`` asks for."""

    def __init__(self, stream: TokenSamples, data: DataConfig, eod: int | None) -> None:
        """Raises DataError if a mask needs the end-of-document id and ``eod`` is None."""
        needs = [
            name
            for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
            if getattr(data, name)
        ]
        if needs and eod is None:
            do = "give --tokenizer-model a tokenizer with an end token, or leave these options out"
            raise DataError(
                ", ".join(needs),
                got="no end-of-document id",
                expected="a tokenizer that has one",
                do=do,
            )
        self._stream = stream
        self._remote = stream if isinstance(stream, TokenStream) and stream.is_remote else None
        self._data = data
        self._eod = eod

    def __len__(self) -> int:
        return len(self._stream)

    def identity(self) -> dict[str, Any]:
        return self._stream.identity()

    def found(self) -> list[tuple[str, str]]:
        return [self._stream.found()]

    @property
    def is_remote(self) -> bool:
        return self._remote is not None

    def fetch(self, indices: Sequence[int]) -> None:
        """Begin to read these samples, if they come from a server."""
        if self._remote is not None:
            for index in indices:
                self._remote.fetch(index)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return these samples as a batch. A tail is padded behind its end, where no label counts.
        Raises DataError if a token id is outside the vocabulary."""
        samples = np.zeros((len(indices), self._stream.seq_length + 1), np.int64)
        counts = np.ones((len(indices), self._stream.seq_length), np.bool_)
        for row, index in enumerate(indices):
            sample = self._stream.sample(index)
            samples[row, : len(sample)] = sample
            counts[row, len(sample) - 1 :] = False
        tokens = samples[:, :-1]
        ends = tokens == self._eod
        if self._data.eod_mask_loss:
            counts &= ~ends
        # With a tail in some batch, all have a mask: ranks must not differ in that.
        masked = self._data.eod_mask_loss or self._stream.keep_tail
        mask = sequence_first(counts).to(torch.float32) if masked else None
        positions = sequence_first(_positions(ends)) if self._data.reset_position_ids else None
        documents = sequence_first(_documents(ends)) if self._data.reset_attention_mask else None
        return Batch(
            sequence_first(tokens), sequence_first(samples[:, 1:]), mask, positions, documents
        )


class BlendedSamples:
    """The samples of several parts, laid end to end and read in the order of a blend."""

    def __init__(self, parts: Sequence[Samples], weights: Sequence[int]) -> None:
        """``weights`` says how often each part is read, in proportion to the others."""
        self.parts = tuple(parts)
        self.order = BlendedOrder(weights, [len(part) for part in parts])

    def __len__(self) -> int:
        """Return the number of samples until some part begins again."""
        return len(self.order)

    def identity(self) -> dict[str, Any]:
        parts = enumerate(part.identity() for part in self.parts)
        return {
            f"{name} of part {number}": value
            for number, part in parts
            for name, value in part.items()
        }

    def found(self) -> list[tuple[str, str]]:
        return [file for part in self.parts for file in found_files(part)]

    @property
    def is_remote(self) -> bool:
        return any(reads_remotely(part) for part in self.parts)

    def fetch(self, indices: Sequence[int]) -> None:
        """Begin to read these samples, as far as they come from a server."""
        for part, index in map(self._place, indices):
            fetch(self.parts[part], [index])

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return these samples as a batch; ``indices`` count over all parts."""
        return side_by_side(
            [self.parts[part].batch([index]) for part, index in map(self._place, indices)]
        )

    def _place(self, index: int) -> tuple[int, int]:
        """Return the part of a sample, and its number there."""
        part = bisect_right(self.order.starts, index) - 1
        return part, index - self.order.starts[part]


class BatchLoader:
    """Gives this data-parallel rank its microbatches of each step. It has no state: the same
    consumed samples give the same batches.

    The samples of a step are those at positions consumed .. consumed + global batch size of the
    run, whatever the layout: microbatch m of rank r holds the positions
    consumed + (m * dp_size + r) * micro_batch_size + j. A step with fewer samples than places still
    fills all microbatches; the places behind its last sample do not count in the loss.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        shuffled: bool,
        micro_batch_size: int,
        global_batch_size: int | BatchSizes,
        seed: int,
        dp_rank: int = 0,
        dp_size: int = 1,
    ) -> None:
        sizes = (
            BatchSizes(global_batch_size)
            if isinstance(global_batch_size, int)
            else global_batch_size
        )
        fit = all(size % (micro_batch_size * dp_size) == 0 for size in sizes.all())
        assert fit, "global_batch_size is a multiple of micro_batch_size x dp"
        self.samples = samples
        self._sizes = sizes
        # Samples that are no blend are read as a blend of one part.
        self._order = (
            samples.order
            if isinstance(samples, BlendedSamples)
            else BlendedOrder((1,), (len(samples),))
        )
        self._shuffled = shuffled
        self._micro_batch_size = micro_batch_size
        self._seed = seed
        self._dp_rank = dp_rank
        self._dp_size = dp_size

    def microbatches(self, consumed_samples: int) -> list[Batch]:
        """Return the microbatches of the step that follows ``consumed_samples`` samples. Raises
        DataError if they cannot be read."""
        size = self._micro_batch_size
        places = self._sizes.places(consumed_samples)
        samples = self._sizes.at(consumed_samples)
        starts = self._starts(consumed_samples)
        if isinstance(self.samples, AskedAhead):
            self.samples.ask(self._indices(starts))
        if reads_remotely(self.samples):
            first = consumed_samples
            for _ in range(1 + STEPS_AHEAD):
                fetch(self.samples, self._indices(self._starts(first)))
                first += self._sizes.at(first)
        batches = [self._batch(range(start, start + size)) for start in starts]
        if samples == places:
            return batches
        # Also on a rank whose places all have samples: all ranks or none must have a mask.
        counts = [consumed_samples + samples - start for start in starts]
        return [_counting(batch, count) for batch, count in zip(batches, counts, strict=True)]

    def _starts(self, consumed_samples: int) -> list[int]:
        """Return the first position of each of this rank's microbatches."""
        size = self._micro_batch_size
        return [
            consumed_samples + (m * self._dp_size + self._dp_rank) * size
            for m in range(self._sizes.places(consumed_samples) // (size * self._dp_size))
        ]

    def _indices(self, starts: Sequence[int]) -> list[int]:
        """Return the samples of microbatches that begin at these positions."""
        places = range(self._micro_batch_size)
        return [self._index(start + place) for start in starts for place in places]

    def _index(self, position: int) -> int:
        return self._order.index(position, self._seed, self._shuffled)

    def _batch(self, positions: range) -> Batch:
        batch = self.samples.batch([self._index(position) for position in positions])
        # Noise belongs to a position of the run, not to a sample: a sample that comes again gets
        # new noise.
        seeds = (
            ()
            if batch.noise_scale is None
            else tuple(mixed(self._seed, position) for position in positions)
        )
        return replace(batch, noise_seeds=seeds) if seeds else batch


def _counting(batch: Batch, count: int) -> Batch:
    """Return the batch with a mask that leaves only its first ``count`` samples in the loss, or
    without the completions of the others."""
    if batch.completion_kinds is not None:
        kinds = batch.completion_kinds.clone()
        kinds[:, max(count, 0) :] = 0
        inner = None if batch.mismatched is None else _counting(batch.mismatched, count)
        batch = replace(batch, completion_kinds=kinds, mismatched=inner)
        if batch.loss_mask is None:
            return batch
    mask = torch.ones(batch.labels.shape) if batch.loss_mask is None else batch.loss_mask.clone()
    mask[:, max(count, 0) :] = 0.0
    return replace(batch, loss_mask=mask)


def side_by_side(batches: Sequence[Batch]) -> Batch:
    """Join batches of the same length and with the same masks into one. Completions and noise are
    not joined."""
    assert all(batch.completion_ids is None and batch.noise_scale is None for batch in batches)

    def joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(present, dim=1) if present else None

    if len(batches) == 1:
        return batches[0]
    tokens = torch.cat([b.tokens for b in batches], dim=1)
    labels = torch.cat([b.labels for b in batches], dim=1)
    mask = joined([b.loss_mask for b in batches])
    positions = joined([b.position_ids for b in batches])
    return Batch(tokens, labels, mask, positions, joined([b.document_ids for b in batches]))


def _documents(ends: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return the number of documents ended before each token, [b, s]. An end token belongs to the
    document that it ends."""
    return (np.cumsum(ends, axis=1) - ends).astype(np.int32)


def _positions(ends: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the distance to the first token of the token's document, [b, s]."""
    place = np.arange(ends.shape[1], dtype=np.int64)
    first = np.zeros(ends.shape, np.int64)
    first[:, 1:] = np.where(ends[:, :-1], place[1:], 0)
    return place - np.maximum.accumulate(first, axis=1)


def sequence_first(array: NDArray[np.generic]) -> Tensor:
    """Return an array [b, s] as a tensor [s, b]."""
    return torch.from_numpy(np.ascontiguousarray(array.T))
