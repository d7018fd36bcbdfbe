"""The order in which Megatron-LM reads the samples of a run: GPTDataset and BlendedDataset of
megatron.core.datasets 0.16, reproduced from the seed.

Megatron shuffles documents, lays them end to end, cuts samples out of them and shuffles these,
with numpy's RandomState (MT19937), whose numbers numpy keeps as they are. Everything depends on the
number of samples that the run asks for, so the order belongs to a length of the run, too.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_llama.config.blend import Blend
from megatron_llama.config.schema import DataConfig
from megatron_llama.data.loader import (
    Batch,
    Samples,
    fetch,
    found_files,
    reads_remotely,
    side_by_side,
)
from megatron_llama.data.shared_order import Arrays, shared_arrays
from megatron_llama.data.stream import TokenStream, normalized
from megatron_llama.errors import DataError

SURPLUS = 0.005
"""Share of samples that Megatron makes beyond those that a blend takes of a dataset
(``mid_level_dataset_surplus``). They change the order, because all are shuffled."""
SEPARATE_BELOW = 0.80
"""The last epoch is shuffled by itself where less than this share of it is read."""
LARGEST_NUMBER = 2**31 - 1
"""Documents of a dataset that int32 can number."""
PLACE_BYTES = 12
"""Bytes that a document of an epoch takes in an order: its number and its end."""
BLEND_BYTES = 10
"""Bytes that a sample of a blend takes: its dataset and its number there."""
DOCUMENT_BYTES, SAMPLE_BYTES = 28, 8
"""What a document of an epoch and a sample take while the order is made: a number, a length and two
ends; a number and its place."""


def shuffled_documents(
    documents: NDArray[np.int32], epochs: int, random: np.random.RandomState, *, last_apart: bool
) -> NDArray[np.int32]:
    """Return the documents of all epochs in the order in which they are laid end to end. Epochs are
    mixed, but with ``last_apart`` the last one stays apart."""
    if last_apart:
        before = shuffled_documents(documents, epochs - 1, random, last_apart=False)
        last = shuffled_documents(documents, 1, random, last_apart=False)
        return np.concatenate((before, last))
    order = np.tile(documents, epochs)
    random.shuffle(order)
    return order


def sample_dtype(samples: int) -> np.dtype[Any]:
    """Return the kind of integers with which Megatron numbers so many samples."""
    return np.dtype(np.uint32 if samples < np.iinfo(np.uint32).max - 1 else np.int64)


def shuffled_samples(
    first: int, samples: int, random: np.random.RandomState
) -> NDArray[np.integer[Any]]:
    """Return the samples in the order in which they are read: the ``first`` ones, then the others
    up to ``samples``, each part shuffled."""
    dtype = sample_dtype(samples)
    before = np.arange(first, dtype=dtype)
    random.shuffle(before)
    behind = np.arange(first, samples, dtype=dtype)
    if first < samples:
        random.shuffle(behind)
    return np.concatenate((before, behind))


class MegatronStream(TokenStream):
    """The documents in [start, stop) of a dataset as the samples of Megatron's GPTDataset: sample i
    is the one that Megatron reads at position i.

    It takes 12 bytes for each document of each epoch, and 4 for each sample: in a file that the
    processes of a machine share (``shared_order.py``), unless that would be a small one."""

    def __init__(
        self,
        stream: TokenStream,
        *,
        seed: int,
        num_samples: int | None,
        most_bytes: int,
        data: DataConfig,
    ) -> None:
        """``stream`` has the documents in file order, ``seed`` is Megatron's --seed.
        ``num_samples`` is the number that the run takes of this dataset; with None it is read once.
        ``data`` has folder and size of the cache. Raises DataError if documents have several
        sequences, and where making the order would take more than ``most_bytes``."""
        dataset = stream.dataset
        documents = stream.documents
        seq_length = stream.seq_length
        super().__init__(
            dataset, documents, seq_length, stream.vocab_size, tokenizer=stream.tokenizer
        )
        if not dataset.sequences_are_documents:
            raise DataError(
                f"--megatron-data-order: {dataset.prefix}.idx",
                got="documents of several sequences",
                expected="one sequence a document, as for Megatron's GPT",
                do="preprocess it without --split-sentences",
            )
        if documents[1] > LARGEST_NUMBER:
            raise DataError(
                f"--megatron-data-order: {dataset.prefix}.idx",
                got=f"{documents[1]:,} documents",
                expected=f"at most {LARGEST_NUMBER:,}: Megatron numbers them in 32 bits, and its "
                "numbers overflow",
                do="divide the dataset, and give its parts as a blend",
            )
        tokens = self.num_tokens
        per_epoch = max(0, (tokens - 1) // seq_length)
        epochs = 1
        first = per_epoch
        last_apart = False
        if num_samples is not None:
            epochs = max(1, -(-(num_samples * seq_length + 1) // tokens))
        samples = max(0, (epochs * tokens - 1) // seq_length)
        if epochs > 1 and num_samples is not None:
            before_last = ((epochs - 1) * tokens - 1) // seq_length
            last_apart = num_samples - before_last < int(SEPARATE_BELOW * per_epoch)
            first = before_last if last_apart else samples
        count = epochs * (documents[1] - documents[0])
        needed = DOCUMENT_BYTES * count + SAMPLE_BYTES * samples

        def make() -> Arrays:
            if needed > most_bytes:
                raise DataError(
                    f"--megatron-data-order: {dataset.prefix}",
                    got=f"an order of {count:,} documents and {samples:,} samples, "
                    f"{needed / 1e9:,.1f} GB while it is made",
                    expected=f"at most {most_bytes / 1e9:,.1f} GB, the free memory",
                    do="free memory, train for fewer iterations, or leave --megatron-data-order "
                    "out: the order of this package takes no memory",
                )
            random = np.random.RandomState(seed)
            numbers = np.arange(*documents, dtype=np.int32)
            mixed = shuffled_documents(numbers, epochs, random, last_apart=last_apart)
            order = shuffled_samples(first, samples, random)
            lengths = dataset.lengths[slice(*documents)]
            return mixed, order, np.cumsum(lengths[mixed - documents[0]], dtype=np.int64)

        self._documents, self._samples, self._ends = shared_arrays(
            f"--megatron-data-order: {dataset.prefix}",
            data,
            {
                "documents": list(documents),
                "lengths": dataset.lengths_digest(*documents),
                "epochs": epochs,
                "last epoch apart": last_apart,
                "samples": [first, samples],
                "seq_length": seq_length,
                "seed": seed,
            },
            PLACE_BYTES * count + sample_dtype(samples).itemsize * samples,
            make,
        )

    def __len__(self) -> int:
        """Return the number of samples that Megatron's index has: at least those asked for."""
        return len(self._samples)

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "samples in Megatron's order": len(self)}

    def ranges(self, index: int) -> list[tuple[int, int]]:
        """Return the places [start, stop) in the dataset's stream of the tokens of the sample that
        Megatron reads at a position."""
        assert 0 <= index < len(self), f"sample {index} of {len(self)}"
        position = int(self._samples[index]) * self.seq_length
        stop = position + self.seq_length + 1
        pieces = []
        # The last token of a sample is the first of the next one in the shuffled text, as in the
        # file's own order.
        place = int(np.searchsorted(self._ends, position, side="right"))
        while position < stop:
            document = int(self._documents[place])
            end = int(self._ends[place])
            behind = self.dataset.document_start(document + 1)
            taken = min(stop, end) - position
            if taken > 0:
                start = behind - (end - position)
                pieces.append((start, start + taken))
            position = position + taken
            place = place + 1
        return pieces


def blended_places(weights: Sequence[float], samples: int) -> NDArray[np.int16]:
    """Return the dataset of each sample of a blend, int16 [samples]: the one that is furthest
    behind its weight, the first of several.

    The arithmetic is that of Megatron's helper, double by double and in its order; the sums that
    decide between datasets often differ by their rounding alone. It takes about a second for
    three million samples of two datasets."""
    counts = [0.0] * len(weights)
    others = list(enumerate(weights))[1:]
    places = array("h")
    for sample in range(samples):
        at = float(max(sample, 1))
        chosen = 0
        most = weights[0] * at - counts[0]
        for number, weight in others:
            behind = weight * at - counts[number]
            if behind > most:
                most = behind
                chosen = number
        places.append(chosen)
        counts[chosen] += 1.0
    return np.frombuffer(places, np.int16) if samples else np.zeros(0, np.int16)


class MegatronBlend:
    """The samples of several datasets in the order of Megatron's BlendedDataset. It takes ten bytes
    for each sample, in a file as for ``MegatronStream``."""

    def __init__(
        self, parts: Sequence[Samples], weights: Sequence[float], samples: int, data: DataConfig
    ) -> None:
        """``weights`` are normalized here. ``data`` has folder and size of the cache. Raises
        DataError where the blend takes more of a dataset than its index has, as Megatron does."""
        self._parts = tuple(parts)
        shares = normalized(weights)

        def make() -> Arrays:
            places = blended_places(shares, samples)
            numbers = np.zeros(samples, np.int64)
            for place in range(len(shares)):
                (mine,) = np.nonzero(places == place)
                numbers[mine] = np.arange(len(mine))
            return places, numbers, np.bincount(places, minlength=len(shares))

        self._places, self._numbers, counts = shared_arrays(
            "--megatron-data-order",
            data,
            {"blend": shares, "samples": samples},
            BLEND_BYTES * samples,
            make,
        )
        for place, (part, count) in enumerate(zip(self._parts, counts.tolist(), strict=True)):
            if count > len(part):
                raise DataError(
                    f"--megatron-data-order: dataset {place} of --data-path",
                    got=f"{count:,} samples in the blend",
                    expected=f"at most the {len(part):,} that Megatron makes of it (Megatron "
                    "refuses this, too)",
                    do="change the weights or the length of the run",
                )

    def __len__(self) -> int:
        return len(self._places)

    def identity(self) -> dict[str, Any]:
        """Return the identity of these samples, their order included."""
        parts = enumerate(part.identity() for part in self._parts)
        fields = {
            f"{name} of part {number}": value
            for number, part in parts
            for name, value in part.items()
        }
        return {**fields, "samples in Megatron's order": len(self)}

    def found(self) -> list[tuple[str, str]]:
        return [file for part in self._parts for file in found_files(part)]

    @property
    def is_remote(self) -> bool:
        return any(reads_remotely(part) for part in self._parts)

    def fetch(self, indices: Sequence[int]) -> None:
        """Begin to read the samples at these positions."""
        for index in indices:
            fetch(self._parts[int(self._places[index])], [int(self._numbers[index])])

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the samples at these positions as a batch. Raises DataError."""
        return side_by_side(
            [
                self._parts[int(self._places[index])].batch([int(self._numbers[index])])
                for index in indices
            ]
        )


def samples_of_parts(blend: Blend, samples: int) -> list[int | None]:
    """Return how many samples Megatron asks of each dataset of --data-path, for a run of so many:
    with the surplus, and None for a dataset that is read once."""
    if blend.shares is None:
        return [samples] if len(blend.prefixes) == 1 else [None] * len(blend.prefixes)
    return [math.ceil(target * (1 + SURPLUS)) for target in _targets(blend.shares, samples)]


def samples_of_blend(blend: Blend, samples: int, sizes: Sequence[int]) -> int:
    """Return how many samples the blend has, for a run of so many, whose datasets have ``sizes``
    samples: with weights a few more, without them at most all of them."""
    if blend.shares is None:
        return min(samples, sum(sizes))
    return sum(_targets(blend.shares, samples))


def _targets(shares: Sequence[float], samples: int) -> list[int]:
    return [math.ceil(samples * share) for share in normalized(shares)]
