"""The examples of a run: read by all ranks together, split, and handed out as samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from megatron_llama.config.schema import Config
from megatron_llama.data.block_cache import cache_folder
from megatron_llama.data.loader import Samples
from megatron_llama.data.stream import split_documents
from megatron_llama.engine.comm.machine import machine_name
from megatron_llama.engine.comm.object_collectives import all_gather_object, raise_on_all_ranks
from megatron_llama.engine.mesh import Axis
from megatron_llama.errors import DataError, describe
from megatron_llama.tune.sft.chat import ChatTokenizer
from megatron_llama.tune.sft.dataset import (
    Examples,
    ExampleSamples,
    Noise,
    Read,
    example_rounds,
    refuse_problems,
)
from megatron_llama.tune.sft.fingerprint import code_digest, file_digests, text_digest
from megatron_llama.tune.sft.records import example_files
from megatron_llama.tune.sft.sft_config import SFTConfig
from megatron_llama.tune.sft.token_store import FORMAT_VERSION, TokenStore

PARTS = ("training", "validation")
STORE = "examples"
"""The folder of tokens inside --data-cache-path."""
NOT_READ = (
    "train_data",
    "valid_data",
    "on_bad_sample",
    "on_changed_data",
    "packing",
    "neftune_noise_alpha",
)
"""The fields of SFTConfig on which no token of an example depends."""


_State = tuple[int, int] | None
"""Size in bytes and time of the last change; None: there is no such file."""


class FilledSamples(Samples, Protocol):
    """Samples that examples fill."""

    filled: float
    """The share of places with examples."""


Made = TypeVar("Made", bound=FilledSamples)


class FileData(ABC, Generic[Read, Made]):
    """Training and validation examples of files, as tokens in a ``TokenStore``.

    The first rank of each machine checks whether the tokens are there. If not, each rank encodes
    its share of every file, and the first ranks write all shares to the disk, one round after
    another. So no rank has more tokens in memory than those of a round.

    Creating it is collective. Raises DataError, on every rank, for unusable examples (unless they
    are to be dropped), for too few, or if machines have different files."""

    def __init__(
        self,
        options: SFTConfig,
        config: Config,
        world: Axis,
        tokenizer: ChatTokenizer,
        rendered: str | None = None,
    ) -> None:
        """``rendered``: the day in the texts, if the template writes it."""
        self.options = options
        self.tokenizer = tokenizer
        self.rendered = rendered
        self._made: dict[int, Made] = {}
        self._lines: list[str] = []
        machines = all_gather_object(machine_name(), world)
        self._leads = machines.index(machines[world.rank]) == world.rank
        with raise_on_all_ranks(world):
            self._store = TokenStore(cache_folder(config.data.data_cache_path) / STORE)
        self._read = [
            self._read_all(paths, config, world)
            for paths in (options.train_data, options.valid_data)
            if paths
        ]

    @abstractmethod
    def none(self) -> Read:
        """Return empty examples, to which others are added."""

    @abstractmethod
    def rounds(
        self, files: Sequence[Path], config: Config, share: tuple[int, int]
    ) -> Iterator[Read]:
        """Read the examples of a share (r, n) in rounds: of each round every n-th record from the
        r-th on."""

    @abstractmethod
    def fill(self, examples: Read, chosen: range, config: Config, part: int) -> Made:
        """Make samples of the ``chosen`` examples, for training (part 0) or validation (1)."""

    def reading(self) -> dict[str, Any]:
        """Return everything else on which the tokens depend, for JSON."""
        return {}

    def _read_all(self, paths: tuple[str, ...], config: Config, world: Axis) -> Read:
        files: list[Path] = []
        parts: dict[str, Any] = {}
        with raise_on_all_ranks(world):
            files = example_files(paths)
            before = _states(files)
            if self._leads:
                parts = self._parts(files, config)
        first, *others = (
            (rank, own) for rank, own in enumerate(all_gather_object(parts, world)) if own
        )
        for rank, own in others:
            if unequal := [name for name, value in first[1].items() if own[name] != value]:
                raise DataError(
                    describe(
                        ", ".join(paths),
                        got=f"machines that differ in {' and '.join(unequal)} (that of rank {rank} "
                        "from that of rank 0)",
                        expected="the same examples and tokens on all of them",
                        do="copy the files to all machines, or to a folder that they share, and "
                        "install the same versions",
                    )
                )
        key = text_digest(first[1])
        whole = True
        with raise_on_all_ranks(world):
            if self._leads:
                whole = self._store.is_whole(key)
        known = all(all_gather_object(whole, world))
        if not known:
            self._write(key, files, before, config, world, missing=not whole)
        examples = self.none()
        with raise_on_all_ranks(world):
            columns, about = self._store.read(key)
            examples.take(columns)
            examples.recall(about)
            refuse_problems(examples, files, self.options)
        self._lines.append(
            f"tokens of {', '.join(paths)}: "
            f"{'from an earlier start, in' if known else 'kept in'} {self._store.path(key)}"
        )
        return examples

    def _parts(self, files: Sequence[Path], config: Config) -> dict[str, Any]:
        """Return everything on which the tokens depend, by name, as digests."""
        options = asdict(self.options)
        for name in NOT_READ:
            del options[name]
        parts = {
            "files": file_digests(files),
            **self.tokenizer.identity(),
            "the day that the template writes": self.rendered,
            "options": [options, self.reading()],
            "seq_length and vocab_size": [config.training.seq_length, config.model.vocab_size],
            "versions": [FORMAT_VERSION, code_digest()],
        }
        return {name: text_digest(value) for name, value in parts.items()}

    def _write(
        self,
        key: str,
        files: Sequence[Path],
        before: Sequence[_State],
        config: Config,
        world: Axis,
        *,
        missing: bool,
    ) -> None:
        """Encode all examples, each rank its share, and write them where they are ``missing``.
        ``before``: the states of the files before they were hashed."""
        with ExitStack() as stack:
            with raise_on_all_ranks(world):
                writes = self._leads and missing
                writer = stack.enter_context(self._store.writing(key)) if writes else None
                if writer is not None:
                    writer.add(self.none().columns())  # files without a record have columns, too
            shares = self.rounds(files, config, (world.rank, world.size))
            seen = self.none()
            more = True
            while more:
                share = None
                with raise_on_all_ranks(world):
                    share = next(shares, None)
                gathered = all_gather_object(share, world)
                others = [given for given in gathered if given is not None]
                more = len(others) == len(gathered)
                examples = self.none()
                examples.merge(others)
                seen.add_counts(examples)
                with raise_on_all_ranks(world):
                    if not more and (others or _states(files) != before):
                        raise DataError(
                            describe(
                                ", ".join(map(str, files)),
                                got="a file that changed while it was read",
                                expected="files that nobody writes",
                                do="start again when they are complete",
                            )
                        )
                    if writer is not None and others:
                        writer.add(examples.columns())
                    if writer is not None and not more:
                        writer.publish(seen.about())

    def report(self, config: Config) -> Iterator[str]:
        """Yield lines on the read examples, and on how they fill samples."""
        for line, examples in zip(self._lines, self._read, strict=True):
            yield line
            yield from examples.report()
        samples = self.samples(config, 0)
        packed = "packed into" if self.options.packing else "one to each of"
        shares = [len(self._chosen(config, part)) for part in range(len(PARTS))]
        yield (
            f"{shares[0]:,} training examples, {packed} {len(samples):,} samples, which are "
            f"{samples.filled:.1%} full"
        )
        whole = len(self._read[0])
        if len(self._read) == 1 and shares[0] < whole:
            rest = f", {whole - sum(shares):,} for neither" if sum(shares) < whole else ""
            kept = f"{shares[1]:,} for validation{rest} (--split {config.data.split})"
            yield f"{whole - shares[0]:,} of {whole:,} examples are not trained: {kept}"
        if self.options.valid_data and config.training.eval_interval == 0:
            yield "warning: --valid-data without --eval-interval: it is never evaluated"

    def _chosen(self, config: Config, part: int) -> range:
        if len(self._read) == 2:
            return range(len(self._read[part]))
        return range(*split_documents(config.data.split, len(self._read[0]))[part])

    def samples(self, config: Config, part: int) -> Made:
        """Return the samples of training (part 0) or validation (1). Raises DataError without an
        example."""
        if part not in self._made:
            self._made[part] = self._samples(config, part)
        return self._made[part]

    def _samples(self, config: Config, part: int) -> Made:
        examples = self._read[part if len(self._read) == 2 else 0]
        chosen = self._chosen(config, part)
        if not chosen:
            got = f"none of {len(examples)} examples for {PARTS[part]}"
            do = "give --valid-data, or change --split"
            raise DataError(
                describe(f"--split {config.data.split}", got=got, expected="one or more", do=do)
            )
        return self.fill(examples, chosen, config, part)


def _states(files: Sequence[Path]) -> list[_State]:
    def state(file: Path) -> _State:
        try:
            status = file.stat()
        except OSError:
            return None
        return status.st_size, status.st_mtime_ns

    return [*map(state, files)]


class ExampleData(FileData[Examples, ExampleSamples]):
    """The examples of ``sft``."""

    def none(self) -> Examples:
        return Examples()

    def rounds(
        self, files: Sequence[Path], config: Config, share: tuple[int, int]
    ) -> Iterator[Examples]:
        rows = config.model.vocab_size
        length = config.training.seq_length
        return example_rounds(
            files, self.tokenizer, self.options, length, share=share, vocab_size=rows
        )

    def fill(self, examples: Examples, chosen: range, config: Config, part: int) -> ExampleSamples:
        noise = None
        if part == 0 and self.options.neftune_noise_alpha:
            noise = Noise(self.options.neftune_noise_alpha, config.model.hidden_size)
        return ExampleSamples(
            examples,
            chosen,
            config.training.seq_length,
            packing=self.options.packing,
            noise=noise,
            rendered=self.rendered,
        )
