"""The pairs of a run: read by all ranks together, split, and handed out as samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_llama.config.schema import Config
from megatron_llama.distributed.mesh import Axis
from megatron_llama.preference.align_config import AlignConfig
from megatron_llama.preference.dataset import Pairs, PairSamples, likelihood_of, read_pairs
from megatron_llama.preference.option_problems import objective_fields
from megatron_llama.sft.chat import ChatTokenizer
from megatron_llama.sft.run import FileData
from megatron_llama.sft.sft_config import SFTConfig


class PairData(FileData[Pairs, PairSamples]):
    """The pairs of ``align``, for kto its single completions."""

    def __init__(
        self,
        options: SFTConfig,
        align: AlignConfig,
        config: Config,
        world: Axis,
        tokenizer: ChatTokenizer,
        rendered: str | None = None,
    ) -> None:
        """``rendered``: the day that the template writes into the texts, if it does."""
        self._align = align
        self._tokenizer = tokenizer
        self._rendered = rendered
        super().__init__(options, config, world)

    def read(self, files: Sequence[Path], config: Config, share: tuple[int, int]) -> Pairs:
        return read_pairs(
            files,
            self._tokenizer,
            self.options,
            self._align,
            config.training.seq_length,
            share=share,
            vocab_size=config.model.vocab_size,
        )

    def none(self) -> Pairs:
        return Pairs(1 if self._align.method == "kto" else 2)

    def fill(self, examples: Pairs, chosen: range, config: Config, part: int) -> PairSamples:
        return PairSamples(
            examples,
            chosen,
            config.training.seq_length,
            packing=self.options.packing,
            method=self._align.method,
            likelihood=likelihood_of(self._align),
            rendered=self._rendered,
            objective=objective_fields(self._align),
        )
