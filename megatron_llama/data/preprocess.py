"""Makes indexed datasets of text files, in several processes and in the order of the input."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from megatron_llama.data.documents import LISTED, Problems, input_files, texts
from megatron_llama.data.indexed import IndexedDatasetWriter, token_dtype
from megatron_llama.data.meta import write_meta
from megatron_llama.data.preprocess_config import PreprocessConfig
from megatron_llama.data.readers import CHUNK_BYTES, Chunk, chunks, require_packages
from megatron_llama.data.tokenizer.base import Tokenizer
from megatron_llama.data.tokenizer.copies import copied_path, copy_tokenizer
from megatron_llama.data.tokenizer.fingerprint import Fingerprint
from megatron_llama.data.tokenizer.load import load_tokenizer, require_expressible, tokenizer_file
from megatron_llama.data.tokenizer.packed import ID_BYTES, pack
from megatron_llama.data.words import JSON_LINES, PARQUET, kind
from megatron_llama.data.workers import workers
from megatron_llama.errors import ConfigError, DataError, describe, listing

TRAINING_BYTES = 256 << 20


@dataclass(frozen=True)
class PreprocessReport:
    """Result of ``preprocess``: outputs, counts and time."""

    outputs: tuple[str, ...]
    """Prefixes of the datasets."""
    tokenizer: str
    """The tokenizer's file."""
    vocab_size: int
    """Vocabulary size of the tokenizer."""
    documents: int
    """Documents written, over all outputs."""
    tokens: int
    """Tokens written, end-of-document tokens included."""
    skipped: int
    """Documents without a token, which are left out."""
    bad: Problems
    """Documents that could not be used and were left out (--skip-bad-documents)."""
    bytes: int
    """Bytes of input read."""
    seconds: float
    """Seconds that it took."""

    def __str__(self) -> str:
        """Return a line for people, and one for each of the first documents that were bad."""
        skipped = f", {self.skipped:,} empty ones skipped" if self.skipped else ""
        rate = self.bytes / 1e6 / max(self.seconds, 1e-9)
        line = (
            f"{', '.join(self.outputs)}: {self.documents:,} documents, {self.tokens:,} tokens"
            f" from {self.bytes:,} bytes{skipped}; vocabulary {self.vocab_size:,};"
            f" {self.seconds:.1f} s ({rate:.1f} MB/s)"
        )
        if not self.bad.count:
            return line
        first = f", the first {LISTED} of them" if self.bad.count > LISTED else ""
        title = f"{line}\nwarning: {self.bad.count:,} unusable documents were left out{first}:"
        return listing(title, self.bad.listed)


@dataclass(frozen=True)
class _Encoding:
    """Settings of the encoding, which a worker needs besides its chunk."""

    tokenizer: Path
    keys: tuple[str, ...]
    eod: int | None
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class _Encoded:
    """A chunk as tokens: for each key the documents end to end, and their lengths."""

    size: int
    skipped: int
    problems: Problems
    documents: Mapping[str, tuple[NDArray[Any], NDArray[np.int64]]]


def preprocess(options: PreprocessConfig) -> PreprocessReport:
    """Tokenize ``options.input`` into indexed datasets. The outputs appear when all of them are
    complete; only with ``overwrite`` do they replace older ones.

    Raises ConfigError for options that do not go together; DataError for unusable input, with the
    first ten documents and the count of all, for a tokenizer that does not fit, for outputs that
    are there already, and for a folder that cannot be written. Then nothing is written.
    """
    started = time.perf_counter()
    _check_options(options)
    try:
        return _preprocess(options, started)
    except OSError as error:  # of writing: readers report what they cannot read themselves
        where = str(error.filename or options.output_prefix)
        do = "make room, or give another --output-prefix"
        raise DataError(
            where, got=error.strerror, expected="a place for the dataset", do=do
        ) from error


def _preprocess(options: PreprocessConfig, started: float) -> PreprocessReport:
    files = input_files(options.input)
    require_packages(files)
    if len(options.json_keys) > 1 and (
        plain := [str(file) for file in files if kind(file) not in (*JSON_LINES, PARQUET)]
    ):
        expected = "only .jsonl and .parquet files with several --json-keys"
        raise DataError(
            plain[0], got="a plain text file", expected=expected, do="leave it out or give one key"
        )
    total = sum(file.stat().st_size for file in files)
    prefixes = _prefixes(options)
    with ExitStack() as stack:
        if options.train_tokenizer:
            _require_free(options, prefixes.values(), _tokenizer_folder(options))
            staged, final = stack.enter_context(_trained(options, files, total))
        else:
            assert options.tokenizer_model is not None
            staged = tokenizer_file(options.tokenizer_model, options.tokenizer_type)
            final = copied_path(staged, _tokenizer_folder(options))
            own = [] if final == staged else [final.parent]
            _require_free(options, prefixes.values(), *own)
        stack.callback(_tokenizer.cache_clear)
        tokenizer = _tokenizer(staged)
        require_expressible(tokenizer)
        if options.append_eod and tokenizer.eos_id is None:
            raise DataError(
                staged,
                got="no end token",
                expected="one, for --append-eod",
                do="use another tokenizer or leave it out",
            )
        eod = tokenizer.eos_id if options.append_eod else None
        encoding = _Encoding(staged, options.json_keys, eod, token_dtype(tokenizer.vocab_size))
        # The first call makes the tables of the encoder. Forked workers then share them.
        tokenizer.encode_packed(["a word"])
        fingerprint = Fingerprint.of(tokenizer, tokenizer.vocab_size)
        writers = {
            key: stack.enter_context(IndexedDatasetWriter(prefix, encoding.dtype))
            for key, prefix in prefixes.items()
        }
        skipped, bad = _write(
            encoding,
            chunks(files, options.json_keys),
            writers,
            count=_workers(options.workers, total),
            total=total,
            most_bad=options.skip_bad_documents,
        )
        for prefix in prefixes.values():
            Path(prefix + ".meta.json").unlink(missing_ok=True)
    if not options.train_tokenizer:
        copy_tokenizer(staged, _tokenizer_folder(options))
    for writer in writers.values():
        write_meta(
            writer.prefix,
            tokenizer=final,
            fingerprint=fingerprint,
            vocab_size=tokenizer.vocab_size,
            eod=tokenizer.eos_id,
            documents=writer.num_documents,
            tokens=writer.num_tokens,
            sums=writer.sums,
        )
    return PreprocessReport(
        outputs=tuple(prefixes.values()),
        tokenizer=str(final),
        vocab_size=tokenizer.vocab_size,
        documents=sum(writer.num_documents for writer in writers.values()),
        tokens=sum(writer.num_tokens for writer in writers.values()),
        skipped=skipped,
        bad=bad,
        bytes=total,
        seconds=time.perf_counter() - started,
    )


def _check_options(options: PreprocessConfig) -> None:
    problems = []
    if not options.input:
        problems.append(
            describe("input", got="nothing", expected="files or folders", do="give --input")
        )
    if not options.output_prefix or options.output_prefix.endswith("/"):
        got = repr(options.output_prefix)
        problems.append(
            describe(
                "output_prefix",
                got=got,
                expected="a path without suffix",
                do="give --output-prefix such as data/corpus",
            )
        )
    if not options.json_keys or len(set(options.json_keys)) < len(options.json_keys):
        problems.append(
            describe(
                "json_keys",
                got=options.json_keys,
                expected="one or more different fields",
                do="change --json-keys",
            )
        )
    if options.skip_bad_documents < 0:
        problems.append(
            describe(
                "skip_bad_documents",
                got=options.skip_bad_documents,
                expected="0 or more",
                do="change --skip-bad-documents",
            )
        )
    if options.workers < 0:
        problems.append(
            describe(
                "workers",
                got=options.workers,
                expected="0 (all cores) or more",
                do="change --workers",
            )
        )
    if options.train_tokenizer == (options.tokenizer_model is not None):
        got = "both" if options.train_tokenizer else "neither"
        expected = "exactly one of tokenizer_model and train_tokenizer"
        problems.append(
            describe(
                "tokenizer",
                got=got,
                expected=expected,
                do="give --tokenizer-model PATH or --train-tokenizer",
            )
        )
    if options.train_tokenizer and options.tokenizer_type not in (
        None,
        "SentencePieceTokenizer",
        "Llama2Tokenizer",
    ):
        expected = "SentencePieceTokenizer, which is what --train-tokenizer makes"
        problems.append(
            describe(
                "tokenizer_type",
                got=options.tokenizer_type,
                expected=expected,
                do="leave --tokenizer-type out",
            )
        )
    if problems:
        raise ConfigError(listing("These options cannot be used:", problems))


def _prefixes(options: PreprocessConfig) -> dict[str, str]:
    """Return the output prefix of each key."""
    if len(options.json_keys) == 1 and not options.megatron_names:
        return {options.json_keys[0]: options.output_prefix}
    return {key: f"{options.output_prefix}_{key}_document" for key in options.json_keys}


def _tokenizer_folder(options: PreprocessConfig) -> Path:
    """Return the folder for the datasets' tokenizer. It is beside them, so that all can be moved
    together."""
    return Path(f"{options.output_prefix}-tokenizer")


def _require_free(options: PreprocessConfig, prefixes: Iterable[str], *folders: Path) -> None:
    """Raise DataError if an output is there already and is not to be replaced."""
    files = [
        Path(prefix + suffix) for prefix in prefixes for suffix in (".bin", ".idx", ".meta.json")
    ]
    present = [str(path) for path in (*files, *folders) if path.exists()]
    if present and not options.overwrite:
        do = "give another --output-prefix, or replace it with --overwrite"
        got = f"{', '.join(present)}, which {'is' if len(present) == 1 else 'are'} there already"
        raise DataError("output_prefix", got=got, expected="nothing of these names", do=do)


def _workers(wanted: int, total: int) -> int:
    """Return the number of processes: no more than there are chunks."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, min(wanted or cores, total // CHUNK_BYTES))


@contextmanager
def _trained(
    options: PreprocessConfig, files: Sequence[Path], total: int
) -> Iterator[tuple[Path, Path]]:
    """A block with a tokenizer that was trained into a temporary folder, whose files get their
    final names if the block succeeds. It gives both paths of the model."""
    from megatron_llama.data.tokenizer.spm import train_tokenizer

    folder = _tokenizer_folder(options)
    staging = Path(f"{folder}.tmp-{os.getpid()}")
    try:
        model = train_tokenizer(
            _training_texts(files, options, total), options.vocab_size, staging / "tokenizer.model"
        )
        model.save_hf(staging)
        yield staging / "tokenizer.model", folder / "tokenizer.model"
        folder.mkdir(exist_ok=True)
        # The folder may be there, with files of the user: so it is not renamed whole.
        for file in staging.iterdir():
            os.replace(file, folder / file.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _training_texts(files: Sequence[Path], options: PreprocessConfig, total: int) -> list[str]:
    """Return all documents, or evenly spaced ones that make up about ``TRAINING_BYTES``, since
    sentencepiece holds its corpus in memory."""
    keys = options.json_keys
    stride = -(-total // TRAINING_BYTES)
    problems = Problems()
    documents = (
        text
        for chunk in chunks(files, keys)
        for of_key in texts(chunk, keys, problems).values()
        for text in of_key
    )
    kept = [text for index, text in enumerate(documents) if index % stride == 0]
    problems.raise_if_more_than(options.skip_bad_documents)
    return kept


def _write(
    encoding: _Encoding,
    work: Iterable[Chunk],
    writers: Mapping[str, IndexedDatasetWriter],
    *,
    count: int,
    total: int,
    most_bad: int,
) -> tuple[int, Problems]:
    """Tokenize and append everything. Return the number of documents without a token, and the
    problems of those that cannot be used. Raises DataError for more than ``most_bad`` of these."""
    problems = Problems()
    skipped = 0
    with ExitStack() as stack:
        # Processes come first: they can be forked while nothing has started a thread, neither the
        # bar below nor a reader of the input.
        encode = functools.partial(_encode, encoding)
        encode_all = (
            stack.enter_context(workers(count, encode))
            if count > 1
            else functools.partial(map, encode)
        )
        bar = stack.enter_context(
            tqdm(
                total=total,
                unit="B",
                unit_scale=True,
                desc="tokenizing",
                disable=not sys.stderr.isatty(),
            )
        )
        for is_long, of_kind in itertools.groupby(work, key=attrgetter("is_long")):
            if is_long:
                for chunk in of_kind:
                    skipped += _write_long(encoding, chunk, writers, problems)
                    bar.update(chunk.size)
                continue
            for encoded in encode_all(of_kind):
                problems.extend(encoded.problems)
                skipped += encoded.skipped
                for key, (tokens, lengths) in encoded.documents.items():
                    writers[key].add_many(tokens, lengths)
                bar.update(encoded.size)
    problems.raise_if_more_than(most_bad)
    for key, writer in writers.items():
        if writer.num_tokens == 0:
            raise DataError(
                f"field {key!r}",
                got="no text in the whole input",
                expected="text",
                do="check the files and --json-keys",
            )
    return skipped, problems


def _write_long(
    encoding: _Encoding,
    chunk: Chunk,
    writers: Mapping[str, IndexedDatasetWriter],
    problems: Problems,
) -> int:
    """Tokenize and append a document that is long, piece by piece. Return how many of its texts
    have no token."""
    tokenizer = _tokenizer(encoding.tokenizer)
    skipped = 0
    for key, of_key in texts(chunk, encoding.keys, problems).items():
        for text in of_key:
            pieces = (
                np.frombuffer(ids, np.intc).astype(encoding.dtype)
                for ids in _with_end(tokenizer.encode_long(text), encoding.eod)
            )
            skipped += not writers[key].add_pieces(pieces)
    return skipped


def _with_end(pieces: Iterable[bytes], eod: int | None) -> Iterator[bytes]:
    """Yield the pieces of a document, and its end if it has a token."""
    empty = True
    for piece in pieces:
        empty = empty and not piece
        yield piece
    if not empty and eod is not None:
        yield pack([eod])


@functools.lru_cache(maxsize=1)
def _tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer once for a call of ``preprocess``, after which the file may change. Forked
    processes have it already."""
    return load_tokenizer(path)


def _encode(encoding: _Encoding, chunk: Chunk) -> _Encoded:
    tokenizer = _tokenizer(encoding.tokenizer)
    problems = Problems()
    skipped = 0
    texts_by_key = texts(chunk, encoding.keys, problems)
    documents = {}
    end = pack([encoding.eod]) if encoding.eod is not None else b""
    for key, of_key in texts_by_key.items():
        ids = [document + end for document in tokenizer.encode_packed(of_key) if document]
        skipped += len(of_key) - len(ids)
        lengths = np.fromiter(map(len, ids), np.int64, count=len(ids)) // ID_BYTES
        documents[key] = (np.frombuffer(b"".join(ids), np.intc).astype(encoding.dtype), lengths)
    return _Encoded(chunk.size, skipped, problems, documents)
