"""Log-probabilities of the completions under the reference, which are computed once, kept in a
file, and read back with the samples. No second model is ever in memory.

The file holds a number for each completion in fp64, and in its header their identity: model,
template and tokenizer, samples, and the dtype of the computation. Scores of anything else are
refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor

from megatron_llama.config.limits import LARGEST_SCORES_HEADER
from megatron_llama.data.loader import Batch
from megatron_llama.engine.comm.object_collectives import sum_over_ranks
from megatron_llama.engine.mesh import Mesh
from megatron_llama.errors import DataError, TrainingError, describe, listing
from megatron_llama.files import replace_file
from megatron_llama.tune.sft.fingerprint import text_digest

VERSION = 1
KEY = "reference_scores"
"""The key of the JSON in the header of a file."""
LOGPS = "logps"
MISMATCHED = "mismatched"
REFERENCE = "reference"
"""The key of the reference's digest in the identity of samples, which a checkpoint keeps."""
SHOWN = 12
"""Digits of a digest in names and messages."""
PROGRESS_LINES = 10
REMEDY = "delete it to compute them anew, or give --reference-scores another file"


class Scorable(Protocol):
    """Samples of completions that a reference can score."""

    @property
    def completions(self) -> int:
        """The number of all completions."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return these samples as a batch."""

    def identity(self) -> dict[str, Any]:
        """Return a few fields for JSON that differ for other samples."""

    def digest(self) -> str:
        """Return a digest of everything that is scored: of the completions in their order, whatever
        their samples."""

    def numbers(self, index: int) -> Sequence[int]:
        """Return the number, among all completions, of each completion of a sample, in the order of
        its batch. A mismatched completion has the number of the completion that it replaces."""

    def with_references(
        self, logps: NDArray[np.float64], kl_logps: NDArray[np.float64] | None
    ) -> Scorable:
        """Return the samples with these log-probabilities, by the numbers of the completions."""


Score = Callable[[Sequence[Batch]], Iterable[Tensor]]
"""A function from batches to the sums of the log-probabilities of the tokens of each completion,
fp64 [c, b] for each batch, on every rank that shares the samples. Collective."""


class ReferencedSamples:
    """The samples of a run with a reference, whose digest is part of their identity."""

    def __init__(self, samples: Scorable, reference: str) -> None:
        self.samples = samples
        self.reference = reference

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, indices: Sequence[int]) -> Batch:
        return self.samples.batch(indices)

    def identity(self) -> dict[str, Any]:
        return {**self.samples.identity(), REFERENCE: self.reference}

    def with_scores(self, scores: Scores) -> ReferencedSamples:
        """Return the samples with these scores."""
        scored = self.samples.with_references(scores.logps, scores.mismatched)
        return ReferencedSamples(scored, self.reference)


@dataclass(frozen=True)
class Scores:
    """A reference's scores of the completions of samples."""

    logps: NDArray[np.float64]
    """The sum of the log-probabilities of the tokens of each completion; NaN for one that is in no
    sample."""
    mismatched: NDArray[np.float64] | None = None
    """The same of the completions of other examples, for KTO."""

    def arrays(self) -> dict[str, NDArray[np.float64]]:
        """Return the arrays by their names in a file."""
        arrays = {LOGPS: self.logps}
        return arrays if self.mismatched is None else {**arrays, MISMATCHED: self.mismatched}


@dataclass(frozen=True)
class Scored:
    """The identity of scores."""

    model: str
    """The digest of the reference (``model_digest``)."""
    template: str
    """The identity of chat template and tokenizer."""
    samples: str
    """The digest of the completions."""
    dtype: str
    """The dtype of the reference's computation."""
    completions: int
    mismatched: bool
    """Whether there are scores of mismatched completions."""

    @classmethod
    def of(cls, samples: ReferencedSamples, *, template: str, dtype: torch.dtype) -> Self:
        """Return the identity of the scores of samples."""
        return cls(
            samples.reference,
            template,
            samples.samples.digest(),
            str(dtype).removeprefix("torch."),
            samples.samples.completions,
            samples.batch([0]).mismatched is not None,
        )

    @property
    def digest(self) -> str:
        """Return a digest of the identity."""
        return text_digest(VERSION, asdict(self))

    def path_beside(self, file: Path) -> Path:
        """Return the default path of the scores of the samples in ``file``."""
        return file.with_name(f"{file.name}.{self.digest[:SHOWN]}.reference.safetensors")

    def differences(self, found: Mapping[str, Any]) -> Iterator[str]:
        """Yield a line for each field whose value in a file (``found``) differs."""
        for name, expected in asdict(self).items():
            stored = found[name]
            if stored != expected:
                yield describe(_WORDS[name], got=stored, expected=expected, do=REMEDY)


_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "model": "reference model",
        "template": "chat template or tokenizer",
        "samples": "samples",
        "dtype": "dtype of the computation",
        "completions": "number of completions",
        "mismatched": "scores of mismatched completions",
    }
)
"""The fields of ``Scored`` in messages."""


def write_scores(path: Path, scored: Scored, scores: Scores) -> None:
    """Write a file of scores, whole or not at all. Raises OSError."""
    arrays = scores.arrays()
    entry = {"version": VERSION, **asdict(scored), "checksum": _checksum(arrays)}
    replace_file(path, save(arrays, {KEY: json.dumps(entry)}))


def read_scores(path: Path, scored: Scored) -> Scores:
    """Read the scores of ``scored``. Raises DataError for a file that cannot be read, is damaged or
    has no scores, and, with all differences, for scores of something else."""
    expected = "reference scores, as align writes them"
    try:
        if not path.is_file() and path.exists():
            got = "something that is no file"
            raise DataError(path, got=got, expected=expected, do=REMEDY)
        largest = LARGEST_SCORES_HEADER + 2 * np.float64().nbytes * scored.completions
        if (size := path.stat().st_size) > largest:
            got = f"{size:,} bytes"
            do = REMEDY
            raise DataError(path, got=got, expected=f"{largest:,} at most, {expected}", do=do)
        content = path.read_bytes()
        arrays = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        entry = json.loads(header["__metadata__"][KEY])
        version = entry["version"]
    except OSError as error:
        do = "mend the file, or give --reference-scores another one"
        raise DataError(path, got=error.strerror, expected=expected, do=do) from error
    except DataError:
        raise
    except (SafetensorError, ValueError, LookupError, TypeError, RecursionError) as error:
        got = f"a file that is damaged, or another one ({type(error).__name__}: {error})"
        raise DataError(path, got=got, expected=expected, do=REMEDY) from error
    if version != VERSION:
        raise DataError(f"{path} version", got=version, expected=VERSION, do=REMEDY)
    try:
        problems = list(scored.differences(entry))
        checksum = entry["checksum"]
    except (LookupError, TypeError, AttributeError) as error:
        got = f"a header without the field {error}"
        raise DataError(path, got=got, expected=expected, do=REMEDY) from error
    if problems:
        raise DataError(listing(f"{path} has the reference scores of something else:", problems))
    names = {LOGPS, MISMATCHED} if scored.mismatched else {LOGPS}
    fits = arrays.keys() == names and all(
        array.shape == (scored.completions,) and array.dtype == np.float64
        for array in arrays.values()
    )
    if not fits or _checksum(arrays) != checksum:
        got = "damaged content"
        raise DataError(path, got=got, expected="the scores of its checksum", do=REMEDY)
    return Scores(arrays[LOGPS], arrays.get(MISMATCHED))


def _checksum(arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for _, values in sorted(arrays.items()):
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


def reference_scores(
    score: Score,
    samples: Scorable,
    mesh: Mesh,
    *,
    micro_batch_size: int,
    microbatches: int = 1,
    say: Callable[[str], None] = lambda line: None,
) -> Scores:
    """Score every completion of the samples. Each data-parallel rank takes its share of the samples
    and gives ``score`` this many ``microbatches`` at a time. ``say`` gets the progress, on every
    rank. All ranks return all scores. Collective. Raises TrainingError, on every rank, if a score
    is not finite."""
    count = len(samples)
    unit = micro_batch_size * mesh.data_size
    stop = -(-count // unit)
    # Ranks that share samples all have their scores; one rank of each group counts in the sum.
    primary = mesh.pp.rank == mesh.tp.rank == mesh.cp.rank == 0
    sums = torch.zeros(2, samples.completions, dtype=torch.float64)
    times = torch.zeros(samples.completions, dtype=torch.float64)
    mismatched = False
    said = 0
    for first in range(0, stop, microbatches):
        last = min(first + microbatches, stop)
        starts = [
            (u * mesh.data_size + mesh.data_rank) * micro_batch_size for u in range(first, last)
        ]
        places = [range(start, start + micro_batch_size) for start in starts]
        # All ranks make equally many passes: places after the last sample repeat it, and do not
        # count.
        batches = [samples.batch([min(place, count - 1) for place in span]) for span in places]
        mismatched_batches = [batch.mismatched for batch in batches if batch.mismatched is not None]
        mismatched = bool(mismatched_batches)
        results = [score(batches)]
        if mismatched:
            results.append(score(mismatched_batches))
        if primary:
            for row, logps in enumerate(results):
                for number, value in _numbered(samples, places, logps):
                    sums[row, number] += value
                    times[number] += 1 - row
        done = min(last * unit, count)
        if done * PROGRESS_LINES // count > said:
            said = done * PROGRESS_LINES // count
            say(f"reference scores: {done:,} of {count:,} samples")
    sum_over_ranks(sums, mesh.world)
    sum_over_ranks(times, mesh.world)
    assert times.max() <= 1, "a completion is in one sample"
    scored = times > 0
    infinite = int((~sums[:, scored].isfinite()).any(dim=0).sum())
    if infinite:
        raise TrainingError(
            "reference scores",
            got=f"{infinite:,} of {int(scored.sum()):,} that are not finite",
            expected="finite log-probabilities",
            do="look at the reference's weights, or compute in bf16 or fp32",
        )
    sums[:, ~scored] = torch.nan
    return Scores(sums[0].numpy(), sums[1].numpy() if mismatched else None)


def _numbered(
    samples: Scorable, places: Sequence[range], logps: Iterable[Tensor]
) -> Iterator[tuple[int, float]]:
    """Yield the number and the score of each completion of the samples at these places."""
    for span, scores in zip(places, logps, strict=True):
        for row, values in zip(span, scores.t().tolist(), strict=True):
            if row < len(samples):
                yield from zip(samples.numbers(row), values, strict=False)
