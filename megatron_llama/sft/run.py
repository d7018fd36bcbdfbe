"""The examples of a run: read by all ranks together, split, and handed out as samples."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_llama.comm.agreement import shared, together
from megatron_llama.config import Config
from megatron_llama.data.stream import split_documents
from megatron_llama.errors import DataError, describe
from megatron_llama.mesh import Mesh
from megatron_llama.sft.chat import ChatTokenizer
from megatron_llama.sft.dataset import Examples, ExampleSamples, Noise, read_examples, refuse_problems
from megatron_llama.sft.options import SFTConfig
from megatron_llama.sft.records import example_files

PARTS = ("training", "validation")


class ExampleData:
    """Training and validation examples. Each rank reads its share of every file and learns the rest from the others.

    Collective. Raises DataError, on every rank, for examples that cannot be used (unless they are to be dropped), or too few."""

    def __init__(self, options: SFTConfig, config: Config, mesh: Mesh, tokenizer: ChatTokenizer) -> None:
        self._options = options
        self._read = [self._read_all(paths, config, mesh, tokenizer) for paths in (options.train_data, options.valid_data) if paths]

    def _read_all(self, paths: tuple[str, ...], config: Config, mesh: Mesh, tokenizer: ChatTokenizer) -> Examples:
        share, length = (mesh.world.rank, mesh.world.size), config.training.seq_length
        with together(mesh.world):
            files = example_files(paths)
            part = read_examples(files, tokenizer, self._options, length, share=share)
        examples = Examples()
        examples.merge(shared(part, mesh.world))
        with together(mesh.world):
            refuse_problems(examples, files, self._options)
        return examples

    def report(self, config: Config) -> Iterator[str]:
        """What was read, and how it fills samples."""
        for examples in self._read:
            yield from examples.report()
        samples = self.samples(config, 0)
        packed = "packed into" if self._options.packing else "one to each of"
        yield f"{len(self._chosen(config, 0)):,} training examples, {packed} {len(samples):,} samples, which are {samples.filled:.1%} full"

    def _chosen(self, config: Config, part: int) -> range:
        if len(self._read) == 2:
            return range(len(self._read[part]))
        return range(*split_documents(config.data.split, len(self._read[0]))[part])

    def samples(self, config: Config, part: int) -> ExampleSamples:
        """A Source of a run. Raises DataError if there is no example in this part."""
        examples, chosen, options = self._read[part if len(self._read) == 2 else 0], self._chosen(config, part), self._options
        if not chosen:
            got, do = f"none of {len(examples)} examples for {PARTS[part]}", "give --valid-data, or change --split"
            raise DataError(describe(f"--split {config.data.split}", got=got, expected="one or more", do=do))
        noise = None
        if part == 0 and options.neftune_noise_alpha:
            noise = Noise(options.neftune_noise_alpha, config.model.hidden_size)
        return ExampleSamples(examples, chosen, config.training.seq_length, packing=options.packing, noise=noise)

