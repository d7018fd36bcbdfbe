"""How fast is ``preprocess``? Against Megatron-LM's way of doing it, and against the tokenizer
alone, in turns.

    python tools/bench_preprocess.py --megabytes 24 --rounds 5 --tokenizer tokenizers

Three contenders tokenize the same JSON lines (Python's documentation, repeated) into the same ids
with the same tokenizer on the same number of processes:

- ``preprocess``: this project's command, into .bin and .idx.
- ``megatron``: what Megatron-LM's tools/preprocess_data.py does: ``multiprocessing.Pool.imap`` over
  lines, 32 at a time, one call of the
  tokenizer for each document, lists of ids sent back, ``IndexedDatasetBuilder`` of megatron-core in
  the parent.
- ``tokenizer``: the library's own batch call, with a thread on every core, over texts in memory;
  nothing is read or written.

``preprocess`` is timed as a whole command, interpreter and all. Megatron-LM's way begins with
everything imported (its imports alone take seconds) and forks its processes, as its tool does.
Prints medians over rounds of each rate, and of the ratios within a round, by the clock and by
processor time, which other work on the machine disturbs less. Outputs are compared byte for byte.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, and no other

import sentencepiece
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from megatron_llama.config.help import help_text
from megatron_llama.config.parse import parse
from megatron_llama.data.corpus import python_documentation
from megatron_llama.data.tokenizer.export import SPACE
from megatron_llama.data.tokenizer.load import load_tokenizer
from megatron_llama.data.tokenizer.spm import train_tokenizer
from megatron_llama.data.tokenizer.tiktoken import SPLIT, TiktokenTokenizer, parse_ranks
from megatron_llama.errors import UserError
from tools.processor import processor

if TYPE_CHECKING:
    import tiktoken

TRAINED = ("sentencepiece", "unigram", "tokenizers", "metaspace", "llama3", "gpt2")


@dataclass(frozen=True)
class BenchConfig:
    """What is tokenized, and how often."""

    megabytes: int = 24
    """Size of the corpus."""
    rounds: int = 5
    """How often contenders take turns."""
    workers: int = 0
    """Processes of each contender. 0: one per core."""
    tokenizer: str = "sentencepiece"
    """sentencepiece, tokenizers or metaspace: the same model as tokenizer.model, as tokenizer.json,
    and as one whose pre-tokenizer escapes spaces; llama3: a tokenizer.json of LLaMA 3's kind. Of
    kinds that get whole texts: unigram, a tokenizer.model, and gpt2, a tokenizer.json. Or a file:
    tokenizer.json, or tokenizer.model of sentencepiece or of LLaMA 3."""
    vocab_size: int = 16000
    """Pieces of a tokenizer that is trained on the corpus first."""
    steady: bool = False
    """Also time ``preprocess`` on half of the corpus. What the whole takes longer is the rate
    without the start."""


class Taken(NamedTuple):
    """Seconds."""

    clock: float
    processor: float


@cache
def _is_ranks(path: Path) -> bool:
    return isinstance(load_tokenizer(path), TiktokenTokenizer)


def _tiktoken(path: Path) -> tiktoken.Encoding:
    """LLaMA 3's tokenizer in the library that it was made with."""
    import tiktoken

    ranks = {token: rank for rank, token in enumerate(parse_ranks(path.read_bytes(), str(path)))}
    return tiktoken.Encoding("llama3", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={})


@cache
def _library_call(path: Path) -> Callable[[str], list[int]]:
    """One document, as Megatron-LM asks the library for it."""
    if path.suffix == ".model" and _is_ranks(path):
        return _tiktoken(path).encode_ordinary
    if path.suffix == ".model":
        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        return processor.encode_as_ids
    fast = tokenizers.Tokenizer.from_file(str(path))
    return lambda text: fast.encode(text, add_special_tokens=False).ids


def _encode_line(work: tuple[Path, str]) -> tuple[list[int], int]:
    path, line = work
    return _library_call(path)(json.loads(line)["text"]), len(line)


def megatron(source: Path, prefix: Path, model: Path, workers: int) -> None:
    """Megatron-LM's tool, without its messages."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(
        f"{prefix}.bin", dtype=DType.optimal_dtype(load_tokenizer(model).vocab_size)
    )
    with multiprocessing.Pool(workers) as pool, open(source, encoding="utf-8") as lines:
        for ids, _ in pool.imap(_encode_line, ((model, line) for line in lines), 32):
            if ids:
                builder.add_document(ids, [len(ids)])
    builder.finalize(f"{prefix}.idx")


def ours(source: Path, prefix: Path, model: Path, workers: int) -> None:
    """The command."""
    command = [
        "--input",
        source,
        "--output-prefix",
        prefix,
        "--tokenizer-model",
        model,
        "--workers",
        workers,
        "--overwrite",
    ]
    subprocess.run(
        [sys.executable, "-m", "megatron_llama", "preprocess", *map(str, command)],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},  # imports what we do
        stdout=subprocess.DEVNULL,
    )


def alone(texts: list[str], model: Path, workers: int) -> Taken:
    """The library's own batch call."""
    if model.suffix == ".model" and _is_ranks(model):
        encoding = _tiktoken(model)
        return _timed(lambda: encoding.encode_ordinary_batch(texts, num_threads=workers))
    if model.suffix == ".model":
        processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
        return _timed(lambda: processor.encode(texts, num_threads=workers))
    fast = tokenizers.Tokenizer.from_file(str(model))
    return _timed(lambda: fast.encode_batch_fast(texts, add_special_tokens=False))


def _made(options: BenchConfig, documents: Sequence[str], folder: Path) -> Path:
    """The tokenizer's file, trained on the documents unless it is somebody's."""
    if options.tokenizer not in TRAINED:
        return Path(options.tokenizer)
    model = folder / "tokenizer.model"
    exported = folder / "tokenizer.json"
    if options.tokenizer in ("llama3", "gpt2"):
        _train_byte_level(
            documents,
            options.vocab_size,
            exported,
            SPLIT if options.tokenizer == "llama3" else None,
        )
        return exported
    if options.tokenizer == "unigram":
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(documents),
            model_prefix=str(model.with_suffix("")),
            vocab_size=options.vocab_size,
            minloglevel=2,
        )
        return model
    train_tokenizer(documents, options.vocab_size, model).save_hf(folder)
    if options.tokenizer == "metaspace":
        steps = {
            "type": "Metaspace",
            "replacement": SPACE,
            "prepend_scheme": "first",
            "split": False,
        }
        content = {**json.loads(exported.read_text()), "normalizer": None, "pre_tokenizer": steps}
        exported.write_text(json.dumps(content))
    return model if options.tokenizer == "sentencepiece" else exported


def _train_byte_level(
    documents: Sequence[str], vocab_size: int, path: Path, split: str | None
) -> None:
    """A byte-level BPE behind a split by a regular expression; None: by GPT-2's."""
    bpe = tokenizers.Tokenizer(models.BPE())
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    bpe.pre_tokenizer = (
        of_bytes
        if split is None
        else pre_tokenizers.Sequence(
            [pre_tokenizers.Split(tokenizers.Regex(split), "isolated"), of_bytes]
        )
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=alphabet,
        special_tokens=special,
        show_progress=False,
    )
    bpe.train_from_iterator(documents, trainer)
    bpe.save(str(path))
    path.with_name("tokenizer_config.json").write_text(
        json.dumps({"bos_token": special[0], "eos_token": special[1]})
    )


def _timed(run: Callable[[], object]) -> Taken:
    clock = time.perf_counter()
    processor = _processor_seconds()
    run()
    return Taken(time.perf_counter() - clock, _processor_seconds() - processor)


def _processor_seconds() -> float:
    """Of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main(argv: Sequence[str]) -> None:
    """Measure and print."""
    if {"-h", "--help"} & set(argv):
        usage = "python tools/bench_preprocess.py [--option value ...]"
        print(help_text(usage, __doc__ or "", [BenchConfig]), end="")
        return
    options = parse(argv, [BenchConfig], aliases={}).get(BenchConfig)
    workers = options.workers or len(os.sched_getaffinity(0))
    documents = list(python_documentation())
    repeats = -(-options.megabytes * 10**6 // sum(len(text.encode()) for text in documents))
    texts = documents * repeats
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model = _made(options, documents, root)
        source = root / "corpus.jsonl"
        half = root / "half.jsonl"
        lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts]
        source.write_text("".join(lines))
        half.write_text("".join(lines[: len(lines) // 2]))
        import_module("megatron.core.datasets.indexed_dataset")  # before the clock runs
        turns: list[tuple[str, Callable[[], Taken]]] = [
            ("preprocess", lambda: _timed(lambda: ours(source, root / "ours", model, workers))),
            ("megatron", lambda: _timed(lambda: megatron(source, root / "theirs", model, workers))),
            ("tokenizer", lambda: alone(texts, model, workers)),
        ]
        if options.steady:
            turns.append(
                ("half", lambda: _timed(lambda: ours(half, root / "half", model, workers)))
            )
        taken: dict[str, list[Taken]] = {name: [] for name, _ in turns}
        for number in range(options.rounds):
            at = number % len(turns)
            for name, turn in turns[at:] + turns[:at]:
                taken[name].append(turn())
        for suffix in (".bin", ".idx"):
            assert (root / f"ours{suffix}").read_bytes() == (
                root / f"theirs{suffix}"
            ).read_bytes(), "the outputs differ"
    size, rest = (
        sum(len(text.encode()) for text in part) for part in (texts, texts[len(texts) // 2 :])
    )
    _report(options, taken, size, rest, len(texts), workers)


def _report(
    options: BenchConfig,
    taken: dict[str, list[Taken]],
    size: int,
    rest: int,
    documents: int,
    workers: int,
) -> None:
    """``rest``: bytes of the corpus behind its half."""
    import tiktoken

    libraries = ", ".join(
        f"{library.__name__} {library.__version__}"
        for library in (sentencepiece, tokenizers, tiktoken)
    )
    print(
        f"{processor()}\n{size / 1e6:.1f} MB, {documents:,} documents, {workers} processes, "
        f"{options.tokenizer}, {options.rounds} rounds; {libraries}"
    )
    whole = taken["preprocess"]
    half = taken.pop("half", [])
    for name, each in taken.items():
        rates = sorted(size / 1e6 / seconds.clock for seconds in each)
        print(
            f"{name:<12}{statistics.median(rates):8.2f} MB/s   ({rates[0]:.2f} - {rates[-1]:.2f})"
        )
    for name, words in (
        ("megatron", "times as fast as Megatron-LM's way"),
        ("tokenizer", "of the tokenizer's own rate"),
    ):
        for measure in Taken._fields:
            pairs = zip(whole, taken[name], strict=True)
            ratios = sorted(
                getattr(theirs, measure) / getattr(own, measure) for own, theirs in pairs
            )
            print(
                f"by {measure}: {statistics.median(ratios):.3f} {words} ({ratios[0]:.3f} "
                f"- {ratios[-1]:.3f} in single rounds)"
            )
    for measure in Taken._fields if half else ():
        alone, own, start = (
            statistics.median(getattr(each, measure) for each in group)
            for group in (taken["tokenizer"], whole, half)
        )
        steady = rest * alone / ((own - start) * size)
        print(
            f"by {measure}: behind the first half {steady:.3f} of the tokenizer's own "
            "rate (medians)"
        )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
