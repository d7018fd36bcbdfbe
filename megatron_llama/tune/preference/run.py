"""The pairs of a run: read by all ranks together, split, and handed out as samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_llama.config.schema import Config
from megatron_llama.engine.mesh import Axis
from megatron_llama.tune.preference.align_config import AlignConfig
from megatron_llama.tune.preference.dataset import (
    Pairs,
    PairSamples,
    likelihood_of,
    no_pairs,
    pair_rounds,
)
from megatron_llama.tune.preference.option_problems import objective_fields
from megatron_llama.tune.sft.chat import ChatTokenizer
from megatron_llama.tune.sft.run import FileData
from megatron_llama.tune.sft.sft_config import SFTConfig


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
        """``rendered``: the day in the texts, if the template writes it."""
        self._align = align
        super().__init__(options, config, world, tokenizer, rendered)

    def none(self) -> Pairs:
        return no_pairs(self._align)

    def rounds(
        self, files: Sequence[Path], config: Config, share: tuple[int, int]
    ) -> Iterator[Pairs]:
        return pair_rounds(
            files,
            self.tokenizer,
            self.options,
            self._align,
            config.training.seq_length,
            share=share,
            vocab_size=config.model.vocab_size,
        )

    def reading(self) -> dict[str, Any]:
        return {"method": self._align.method, "format": self._align.preference_format}

    def fill(self, examples: Pairs, chosen: range, config: Config, part: int) -> PairSamples:
        return PairSamples(
            examples,
            chosen,
            config.training.seq_length,
            packing=self.options.packing,
            method=self._align.method,
            likelihood=likelihood_of(self._align),
            rendered=self.rendered,
            objective=objective_fields(self._align),
        )
