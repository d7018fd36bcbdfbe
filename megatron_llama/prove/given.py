"""Reads the configuration to prove: complete, valid, and with everything decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_llama.config.parse import Parsed, flag, options_of
from megatron_llama.config.schema import (
    CheckpointConfig,
    Config,
    LaunchConfig,
    LogConfig,
    ModelConfig,
    ParallelConfig,
    TrainingConfig,
)
from megatron_llama.config.sections import config_sections
from megatron_llama.errors import ConfigError, counted
from megatron_llama.model.presets import LLAMA_VOCABULARY
from megatron_llama.option import Small
from megatron_llama.prove.case import STEPS, Note
from megatron_llama.prove.world import World
from megatron_llama.train.setup.deciders import MODEL
from megatron_llama.train.setup.draft import Draft
from megatron_llama.train.setup.driver import decide
from megatron_llama.train.setup.layout import AutoParallelConfig
from megatron_llama.train.setup.processes import imagined_processes
from megatron_llama.train.setup.resolve import check
from megatron_llama.train.setup.vocabulary import find_vocabulary
from megatron_llama.tune.sft.sft_config import SFTConfig

PRETRAIN: tuple[type[Any], ...] = (*config_sections(), AutoParallelConfig)
SECTIONS: tuple[type[Any], ...] = (SFTConfig, *PRETRAIN)
"""Sections of sft, which include all of pretrain."""
SMALL: Mapping[str, Small] = MappingProxyType(
    {
        name: option.rules.small
        for name, option in options_of(SECTIONS).items()
        if option.rules.small is not None
    }
)
"""Fate of each option in a small run, by its field."""
LEFT_OUT = frozenset(name for name, small in SMALL.items() if small.fate == "left out")
"""Options that no case has."""
EXAMPLES = frozenset(item.name for item in fields(SFTConfig))
"""Options that make a run one of ``sft``."""


@dataclass(frozen=True)
class Given:
    """A user's configuration."""

    config: Config
    """Configuration as given, in which derived values may be open."""
    resolved: Config
    examples: SFTConfig
    sft: bool
    world: World
    notes: tuple[Note, ...]
    """Notes on values that were open and have been decided."""
    left_out: Mapping[str, object]
    """Given options that no case has, by name."""


def processes_of(parsed: Parsed, asked: int) -> tuple[int, str]:
    """Return the number of processes of the run, and a sentence if it was not given. The number is
    ``asked``, else that of the YAML's launch block, else enough for two data-parallel ranks, or for
    those that divide experts, if a step has samples for them."""
    launch = parsed.get(LaunchConfig)
    if asked or launch.nodes * launch.gpus_per_node:
        return asked or launch.nodes * launch.gpus_per_node, ""
    parallel = parsed.get(ParallelConfig)
    training = parsed.get(TrainingConfig)
    model_parallel = (
        parallel.tensor_model_parallel_size
        * parallel.context_parallel_size
        * parallel.pipeline_model_parallel_size
    )
    # A size of 0 is refused later, with the name of its option.
    ranks = max(2, parallel.expert_model_parallel_size)
    shared = training.global_batch_size % (ranks * max(1, training.micro_batch_size)) == 0
    world_size = model_parallel * ranks if shared else model_parallel
    said = "--world-size is not given, and there is no launch: block"
    return world_size, f"note: {said}: taken for {counted(world_size, 'process', 'processes')}"


def read_given(parsed: Parsed, world_size: int) -> Given:
    """Return the configuration of a run on ``world_size`` processes. Folders of checkpoints and
    logs are ignored, and data and tokenizer may be missing.

    Raises UserError if the run itself could not start, and for --auto-parallel."""
    if parsed.get(AutoParallelConfig).auto_parallel:
        raise ConfigError(
            "--auto-parallel",
            got="true",
            expected="the layout that it chooses",
            do="let pretrain --auto-parallel --dry-run print it, and give its options",
        )
    processes = imagined_processes(world_size, 0, are_here=False)
    draft = decide(Draft(_with_what_is_read(parsed), processes), MODEL)
    config, notes = _decided(_without_folders(draft.config))
    resolved = check(config, world_size).config
    return Given(
        config,
        resolved,
        parsed.get(SFTConfig),
        bool(EXAMPLES & parsed.explicit),
        World.of(resolved, world_size),
        notes,
        {name: value for name, value in parsed.differences().items() if name in LEFT_OUT},
    )


def _with_what_is_read(parsed: Parsed) -> Parsed:
    """Return the options without weights that are not read: an --init-from-hf that is not on this
    machine, if a preset has the shapes, and --load, if something else gives the model."""
    checkpoint = parsed.get(CheckpointConfig)
    model = parsed.get(ModelConfig)
    folder = checkpoint.init_from_hf
    if folder is not None and model.preset is not None and not Path(folder).exists():
        checkpoint = replace(checkpoint, init_from_hf=None)
    if folder or model.preset or model.hidden_size:
        checkpoint = replace(checkpoint, load=None)
    return replace(parsed, instances={**parsed.instances, CheckpointConfig: checkpoint})


def _without_folders(config: Config) -> Config:
    """Return the configuration without options that need folders, and with a length."""
    training = replace(config.training, early_stop_patience=0)
    if not (training.train_iters or training.train_samples or training.epochs):
        training = replace(training, train_iters=STEPS)
    # Every run here saves its steps, as --on-bad-step rollback needs.
    saving = CheckpointConfig(save="checkpoints", save_interval=1)
    return replace(config, training=training, checkpoint=saving, log=LogConfig())


def _decided(config: Config) -> tuple[Config, tuple[Note, ...]]:
    """Return the configuration after decisions by tokenizer and device memory, with notes."""
    notes = []
    if not config.model.vocab_size:
        size = _vocabulary(config)
        if size is None:
            size = LLAMA_VOCABULARY
            why = "the tokenizer is not here; --vocab-size says how large the vocabulary is"
            notes.append(Note("--vocab-size", "not known", f"taken for {size}", why))
        config = replace(config, model=replace(config.model, vocab_size=size))
    chosen: dict[str, Any] = {}
    if config.parallel.data_parallel_sharding_strategy == "auto":
        chosen["data_parallel_sharding_strategy"] = "optim_grads_params"
    if config.parallel.param_slots == "auto":
        chosen["param_slots"] = "2"
    if config.parallel.recompute_num_layers == "auto":
        chosen["recompute_num_layers"] = "1"
    why = "a run decides by the memory of its devices; pretrain --dry-run there prints what"
    notes += [Note(flag(name), "auto", value, why) for name, value in chosen.items()]
    return replace(config, parallel=replace(config.parallel, **chosen)), tuple(notes)


def _vocabulary(config: Config) -> int | None:
    """Return the size of the vocabulary of tokenizer or dataset; None if neither is here."""
    path = config.data.tokenizer_model
    if path is not None and not Path(path).exists():
        return None
    return find_vocabulary(config, None).size or None
