"""The examples of a run: read by all ranks together, split, and handed out as samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar

from megatron_llama.config.schema import Config
from megatron_llama.data.loader import Samples
from megatron_llama.data.stream import split_documents
from megatron_llama.distributed.comm.object_collectives import all_gather_object, raise_on_all_ranks
from megatron_llama.distributed.mesh import Axis
from megatron_llama.errors import DataError, describe
from megatron_llama.sft.chat import ChatTokenizer
from megatron_llama.sft.dataset import (
    Examples,
    ExampleSamples,
    Noise,
    ReadExamples,
    read_examples,
    refuse_problems,
)
from megatron_llama.sft.records import example_files
from megatron_llama.sft.sft_config import SFTConfig

PARTS = ("training", "validation")


class MergedExamples(ReadExamples, Protocol):
    """Examples of which each rank reads a share."""

    def merge(self, others: Iterable[Self]) -> None:
        """Add the shares of other ranks, and restore the order of the files."""

    def report(self) -> Iterator[str]:
        """Yield lines that say what was read and what was left out."""


class FilledSamples(Samples, Protocol):
    """Samples that examples fill."""

    filled: float
    """The share of all places that examples take."""


Read = TypeVar("Read", bound=MergedExamples)
Made = TypeVar("Made", bound=FilledSamples)


class FileData(ABC, Generic[Read, Made]):
    """Training and validation examples of files. Each rank encodes its share of every file and
    receives the rest from the others.

    Creating it is collective. Raises DataError, on every rank, for examples that cannot be used
    (unless they are to be dropped), or if there are too few."""

    def __init__(self, options: SFTConfig, config: Config, world: Axis) -> None:
        self.options = options
        self._made: dict[int, Made] = {}
        self._read = [
            self._read_all(paths, config, world)
            for paths in (options.train_data, options.valid_data)
            if paths
        ]

    @abstractmethod
    def read(self, files: Sequence[Path], config: Config, share: tuple[int, int]) -> Read:
        """Read the examples of a share (r, n): every n-th from the r-th on."""

    @abstractmethod
    def none(self) -> Read:
        """Return no examples, to which shares are added."""

    @abstractmethod
    def fill(self, examples: Read, chosen: range, config: Config, part: int) -> Made:
        """Make samples of the ``chosen`` examples, for training (part 0) or validation (1)."""

    def _read_all(self, paths: tuple[str, ...], config: Config, world: Axis) -> Read:
        with raise_on_all_ranks(world):
            files = example_files(paths)
            share = self.read(files, config, (world.rank, world.size))
        examples = self.none()
        examples.merge(all_gather_object(share, world))
        with raise_on_all_ranks(world):
            refuse_problems(examples, files, self.options)
        return examples

    def report(self, config: Config) -> Iterator[str]:
        """Yield lines that say what was read, and how it fills samples."""
        for examples in self._read:
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

    def _chosen(self, config: Config, part: int) -> range:
        if len(self._read) == 2:
            return range(len(self._read[part]))
        return range(*split_documents(config.data.split, len(self._read[0]))[part])

    def samples(self, config: Config, part: int) -> Made:
        """The samples of training (part 0) or validation (1). Raises DataError if it has no
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


class ExampleData(FileData[Examples, ExampleSamples]):
    """The examples of ``sft``."""

    def __init__(
        self,
        options: SFTConfig,
        config: Config,
        world: Axis,
        tokenizer: ChatTokenizer,
        rendered: str | None = None,
    ) -> None:
        """``rendered``: the day that the template writes into the texts, if it does."""
        self._tokenizer = tokenizer
        self._rendered = rendered
        super().__init__(options, config, world)

    def read(self, files: Sequence[Path], config: Config, share: tuple[int, int]) -> Examples:
        rows = config.model.vocab_size
        length = config.training.seq_length
        return read_examples(
            files, self._tokenizer, self.options, length, share=share, vocab_size=rows
        )

    def none(self) -> Examples:
        return Examples()

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
            rendered=self._rendered,
        )
