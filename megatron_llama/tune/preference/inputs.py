"""The inputs of ``align``: judged answers, the tokenizer and the template that encode them, and the
reference's scores of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TypedDict

from megatron_llama.config.parse import Parsed
from megatron_llama.config.schema import Config
from megatron_llama.data.loader import Samples
from megatron_llama.data.tokenizer.base import Tokenizer
from megatron_llama.data.tokenizer.fingerprint import Fingerprint
from megatron_llama.engine.comm.object_collectives import raise_on_all_ranks
from megatron_llama.engine.mesh import Mesh
from megatron_llama.errors import ConfigError
from megatron_llama.metrics.log import LossNames
from megatron_llama.pipeline.objective import OBJECTIVE
from megatron_llama.train.setup.deciders import ready_of
from megatron_llama.train.setup.draft import By, Decider, Draft, Need, refuses
from megatron_llama.train.setup.inputs import Reading, Ready
from megatron_llama.train.setup.start import resumed
from megatron_llama.tune.preference.align_config import WITH_REFERENCE, AlignConfig
from megatron_llama.tune.preference.objective import Preferences
from megatron_llama.tune.preference.option_problems import objective_changes
from megatron_llama.tune.preference.reference import ReferencedSamples
from megatron_llama.tune.preference.references import (
    Reference,
    open_scores,
    reference_of,
    with_references,
)
from megatron_llama.tune.preference.run import PairData
from megatron_llama.tune.sft.fingerprint import text_digest
from megatron_llama.tune.sft.inputs import chat_tokenizer
from megatron_llama.tune.sft.records import example_files
from megatron_llama.tune.sft.sft_config import SFTConfig
from megatron_llama.tune.sft.template import ChatTemplate


class _Files(TypedDict):
    template: str
    train_file: Path
    valid_file: Path | None


class PairInputs:
    """The reader of a run of ``align``: of the preferences first (``deciders``), and of the
    reference's scores when the processes have a mesh."""

    def __init__(self, *, hashes_weights: bool = True) -> None:
        """``hashes_weights``: identify the first model of a fresh run, which reads all its weights.
        A dry run need not do that."""
        self._hashes_weights = hashes_weights
        self._reference: Reference | None = None
        self._template = ""

    @property
    def deciders(self) -> tuple[Decider, ...]:
        """The deciders of the inputs of ``align``."""
        return (Decider(Need.FILES, By.ALL_TOGETHER, fills=("reading", "notes"), decide=self.read),)

    @property
    def checks(self) -> tuple[Decider, ...]:
        """The refusals of ``complete``, for a dry run, which does not call it."""
        return (refuses(needs=Need.SAMPLES, by=By.ALL_TOGETHER)(self.require_scores),)

    def read(self, draft: Draft) -> Draft:
        """Read the preferences of --train-data. Collective. Raises UserError."""
        options = draft.parsed.get(SFTConfig)
        align = draft.parsed.get(AlignConfig)
        config = draft.config
        world = draft.processes.world
        _require_kind(config, align)
        meta = resumed(config.checkpoint, draft.start)
        before = (meta.state.data or {}).get(OBJECTIVE) if meta is not None else None
        changes = (
            objective_changes(str(meta.folder), before, align)
            if meta is not None and before is not None
            else ()
        )
        tokenizer, rendered, warnings = chat_tokenizer(draft, options)
        data = PairData(options, align, config, world, tokenizer, rendered)
        with raise_on_all_ranks(world):
            assert draft.vocabulary.tokenizer is not None
            self._template = template_of(draft.vocabulary.tokenizer, tokenizer.template, rendered)
            notes = (
                f"method {align.method}; chat template: {tokenizer.template.name}",
                *warnings,
                *(f"warning: {change}" for change in changes),
                *data.report(config),
            )
        if align.method in WITH_REFERENCE:
            self._reference = self._find_reference(draft, goes_on=meta is not None)
        unit = "answers" if align.method == "kto" else "pairs"
        reading = Reading(
            lambda config, part: self._samples(data, config, part),
            tokenizer,
            tokenizer.prompt,
            same_data=options.on_changed_data == "stop",
            objective=Preferences(align),
            names=LossNames("loss", unit, perplexity=False),
        )
        return replace(draft, reading=reading, notes=(*draft.notes, *notes))

    def require_scores(self, draft: Draft) -> None:
        """Refuse all that ``complete`` would refuse. Collective. Raises UserError."""
        if self._reference is None or not self._hashes_weights:
            return
        options = draft.parsed.get(SFTConfig)
        align = draft.parsed.get(AlignConfig)
        world = draft.processes.world
        open_scores(ready_of(draft), self._reference, align, world, **self._files(options))

    def complete(self, parsed: Parsed, inputs: Ready, mesh: Mesh) -> Ready:
        """Give the samples the reference's scores, if the method has a reference. Collective.
        Raises UserError."""
        if self._reference is None:
            return inputs
        options = parsed.get(SFTConfig)
        return with_references(
            inputs, self._reference, parsed.get(AlignConfig), mesh, **self._files(options)
        )

    def _files(self, options: SFTConfig) -> _Files:
        """Return the identity of the texts of scores, and the files of the samples."""
        return {
            "template": self._template,
            "train_file": _first_file(options.train_data),
            "valid_file": _first_file(options.valid_data) if options.valid_data else None,
        }

    def _find_reference(self, draft: Draft, *, goes_on: bool) -> Reference:
        if self._hashes_weights or goes_on:
            return reference_of(draft.config, draft.start, draft.processes.world)
        return Reference("not read", resumed=False)

    def _samples(self, data: PairData, config: Config, part: int) -> Samples:
        samples = data.samples(config, part)
        if self._reference is None:
            return samples
        return ReferencedSamples(samples, self._reference.digest)


def _require_kind(config: Config, align: AlignConfig) -> None:
    """Raise ConfigError for a reward model that is to write text."""
    if config.model.num_labels and align.method != "reward":
        raise ConfigError(
            f"--method {align.method}",
            got="a reward model, which has a score and no output head",
            expected="a language model",
            do="give --method reward to train it on, or another --init-from-hf or --load",
        )


def _first_file(paths: tuple[str, ...]) -> Path:
    return example_files(paths)[0]


def template_of(tokenizer: Tokenizer, template: ChatTemplate, rendered: str | None) -> str:
    """Return the identity of the encoding: tokenizer, template, and the day that it writes."""
    fingerprint = Fingerprint.of(tokenizer, tokenizer.vocab_size).entry()
    entry = {
        "tokenizer": fingerprint,
        "template": text_digest(*template.sources),
        "rendered": rendered,
    }
    return json.dumps(entry, sort_keys=True)
