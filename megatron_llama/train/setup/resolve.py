"""Options -> a configuration that can run.

``assemble`` combines preset, HuggingFace folder, YAML and flags. ``resolve`` fills in derived
values. ``check`` does the same and refuses a configuration that cannot run, with all problems. The
checks themselves are in ``train/setup/checks``, by subject. Nothing here starts a process or opens
a dataset.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, get_type_hints

from megatron_llama.config.batch_ramp import length_problems, planned_iterations, with_decay
from megatron_llama.config.blend import blend_problems
from megatron_llama.config.parse import Parsed, flag
from megatron_llama.config.schema import MODEL_SHAPE, Config, ModelConfig
from megatron_llama.config.world import dp_size, world_problem
from megatron_llama.engine.offload_options import ZenFlowConfig
from megatron_llama.engine.options import MUON
from megatron_llama.errors import ConfigError, describe, listing
from megatron_llama.model.families import FAMILIES
from megatron_llama.model.hf import padding_token, read_hf_config
from megatron_llama.model.hf_fields import IGNORE
from megatron_llama.model.plan.lora import PROJECTIONS, projections
from megatron_llama.model.presets import PRESETS
from megatron_llama.model.rope import normal_rope, rope_problems
from megatron_llama.model.windows import CHUNKED, LAYER_TYPES, SLIDING, normal_windows
from megatron_llama.train.setup.checks.batch import batch_problems
from megatron_llama.train.setup.checks.freeze import freeze_problems
from megatron_llama.train.setup.checks.lora import lora_problems
from megatron_llama.train.setup.checks.model import (
    missing_model_problems,
    model_problems,
    reward_problems,
)
from megatron_llama.train.setup.checks.optimizer import (
    moment_problems,
    optimizer_problems,
    schedule_free_problems,
)
from megatron_llama.train.setup.checks.parallel import parallel_problems
from megatron_llama.train.setup.checks.ranges import bound_problems, range_problems
from megatron_llama.train.setup.checks.run import (
    attention_problems,
    bad_step_problems,
    data_order_problems,
    restart_problems,
    run_problems,
    split_shares,
)
from megatron_llama.train.setup.checks.warnings import warnings_of

RESIZE = flag("resize_embeddings")


@dataclass(frozen=True)
class Resolved:
    """A configuration that can run."""

    config: Config
    notes: tuple[str, ...]
    """Decisions made for the user, one line each."""
    warnings: tuple[str, ...]
    """Options that can run but are probably not meant, one line each."""


def assemble(parsed: Parsed, trained: ModelConfig | None = None) -> Config:
    """Return the whole configuration: the model fields of the preset, of the HuggingFace folder or
    of the checkpoint to load (``trained``), then YAML, then flags.

    ``parsed`` holds the sections of ``Config``. Raises ConfigError for an unknown preset, or for a
    folder of weights with other shapes than those asked for; CheckpointError for a folder that
    cannot be read.
    """
    kinds = get_type_hints(Config)
    config = Config(**{item.name: parsed.get(kinds[item.name]) for item in fields(Config)})
    given = {
        item.name: getattr(config.model, item.name)
        for item in fields(ModelConfig)
        if item.name in parsed.explicit
    }
    preset = config.model.preset
    base = trained or ModelConfig() if preset is None else _preset(preset, given)
    if trained is not None:  # a preset has the sizes of the weights, and no padding token
        base = replace(base, pad_token_id=trained.pad_token_id)
    folder = config.checkpoint.init_from_hf
    if folder is not None:
        from_folder = read_hf_config(folder, ignored=config.checkpoint.ignore_hf_config_fields)
        asked = {} if preset is None else {name: getattr(base, name) for name in MODEL_SHAPE}
        problems = [
            describe(
                flag(name),
                got=value,
                expected=f"{getattr(from_folder, name)} as in {folder}/config.json",
                do=f"leave {name} out"
                + (f", or give {RESIZE} to add rows" if name == "vocab_size" else ""),
            )
            for name, value in (asked | given).items()
            # A size of 0 means a derived one; the False of tie_word_embeddings is a value.
            if name in MODEL_SHAPE
            # A language model may become a reward model.
            and name != "num_labels"
            and (value is False or value != 0)
            and value != getattr(from_folder, name)
            and not (
                name == "vocab_size"
                and config.checkpoint.resize_embeddings
                and value > from_folder.vocab_size
            )
        ]
        if problems:
            raise ConfigError(listing(f"The weights of {folder} have other shapes:", problems))
        base = from_folder
    model = replace(base, **given)
    if model.num_labels and not base.num_labels and "pad_token_id" not in given:
        model = replace(model, pad_token_id=padding_token(model))
    family = FAMILIES.get(model.model_type)
    if family is not None and preset is None and trained is None and folder is None:
        model = family.complete(model, given)
    elif family is not None and preset is not None:
        # Values derived from a size are derived from a given one too.
        rules = {name: rule for name, rule in family.derived.items() if name not in given}
        model = replace(model, **{name: rule(model) for name, rule in rules.items()})
    config = replace(config, model=model)
    if config.zenflow.zenflow_config is None:
        return config
    from megatron_llama.train.setup.checks.zenflow import with_file  # which few runs need

    return with_file(config, parsed.explicit)


def _preset(name: str, given: dict[str, Any]) -> ModelConfig:
    if name not in PRESETS:
        near = get_close_matches(name, PRESETS, 1)
        do = f"did you mean {near[0]}?" if near else "give one of these or the model's fields"
        raise ConfigError(
            describe("--model", got=name, expected=f"one of {', '.join(PRESETS)}", do=do)
        )
    preset = PRESETS[name]
    if given.get("vocab_size", preset.vocab_size) != preset.vocab_size:
        # Special tokens belong to the published vocabulary; with another one they are the
        # tokenizer's.
        preset = replace(preset, bos_token_id=None, eos_token_id=None)
    return preset


def check(config: Config, world_size: int, *, needs_data: bool = False) -> Resolved:
    """Derive and check. ``needs_data``: the run reads a dataset, so --data-path must be there.

    ``model.vocab_size`` may stay 0 (the tokenizer's) when a tokenizer or dataset is named: fill it
    in, then build. Raises ConfigError with every problem.
    """
    all_problems = problems(config, world_size)
    if needs_data and not config.data.data_path:
        all_problems.append(
            describe(
                "--data-path",
                got="nothing",
                expected="PREFIX of PREFIX.bin and PREFIX.idx",
                do="give --data-path PREFIX",
            )
        )
    if all_problems:
        raise ConfigError(
            listing(f"This configuration cannot run on {world_size} processes:", all_problems)
        )
    resolved = resolve(config, world_size)
    warnings = list(warnings_of(resolved))
    if config.training.eval_interval != resolved.training.eval_interval:
        split = config.data.split
        warnings.append(
            f"--eval-interval is ignored: --split {split} leaves nothing for validation"
        )
    return Resolved(resolved, tuple(_notes(config, resolved)), tuple(warnings))


def resolve(config: Config, world_size: int) -> Config:
    """Fill in derived values. Values that would be derived from invalid ones stay, for
    ``problems``."""
    model = config.model
    training = config.training
    parallel = config.parallel
    heads = model.num_attention_heads
    divisible = heads > 0 and model.hidden_size % heads == 0
    valid_rope = not rope_problems("", model.rope_scaling or {})
    window = model.sliding_window
    layer_types = model.layer_types
    known = len(layer_types) in (0, model.num_hidden_layers) and not {*layer_types} - {*LAYER_TYPES}
    # All of them full beside chunks is a mistake, which the checks name.
    has_chunks = model.attention_chunk_size > 0 and len(layer_types) > 0
    known = known and not (has_chunks and CHUNKED not in layer_types)
    if known and (window or SLIDING not in layer_types):
        window, layer_types = normal_windows(window, layer_types)
    model = replace(
        model,
        num_key_value_heads=model.num_key_value_heads or heads,
        head_dim=model.head_dim or (model.hidden_size // heads if divisible else 0),
        max_position_embeddings=model.max_position_embeddings or training.seq_length,
        rope_scaling=normal_rope(model.rope_scaling) if valid_rope else model.rope_scaling,
        sliding_window=window,
        layer_types=layer_types,
    )
    lora = config.lora
    if lora.lora_rank and lora.lora_target_modules == PROJECTIONS and model.model_type in FAMILIES:
        lora = replace(lora, lora_target_modules=projections(model))
    if training.micro_batch_size > 0 and world_problem(config, world_size) is None:
        size = training.global_batch_size or training.micro_batch_size * dp_size(config, world_size)
        training = replace(training, global_batch_size=size)
    training = replace(training, train_iters=training.train_iters or planned_iterations(training))
    shares = split_shares(config.data.split)
    if len(shares) == 3 and shares[1] == 0:
        training = replace(training, eval_interval=0)
    # One tensor-parallel rank cannot split the sequence.
    split_sequence = parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1
    return replace(
        config,
        model=model,
        training=training,
        lora=lora,
        optimizer=with_decay(config.optimizer, training),
        parallel=replace(parallel, sequence_parallel=split_sequence),
    )


def _notes(given: Config, resolved: Config) -> Iterator[str]:
    if resolved.zenflow.zenflow_config is not None:
        from megatron_llama.train.setup.checks.zenflow import zenflow_notes

        yield from zenflow_notes(resolved)
    if given.checkpoint.ignore_hf_config_fields:
        names = " ".join(given.checkpoint.ignore_hf_config_fields)
        yield f"{IGNORE} {names}: the model is computed as if config.json did not have them"
    if given.parallel.sequence_parallel and not resolved.parallel.sequence_parallel:
        yield "--sequence-parallel is ignored: it needs --tensor-model-parallel-size 2 or more"
    if given.parallel.tp_comm_overlap != "0" and given.parallel.tensor_model_parallel_size == 1:
        yield "--tp-comm-overlap is ignored: it needs --tensor-model-parallel-size 2 or more"
    if given.training.global_batch_size == 0:
        size = resolved.training.global_batch_size
        micro = given.training.micro_batch_size
        yield f"--global-batch-size {size}: micro_batch_size {micro} x dp {size // micro}"


def _chosen_problems(config: Config) -> Iterator[str]:
    """Yield problems of what few runs have: its checks are imported with it."""
    if config.training.cuda_graph_scope != "none":
        from megatron_llama.train.setup.checks.graphs import graph_problems

        yield from graph_problems(config)
    if config.training.fp8 != "none":
        from megatron_llama.train.setup.checks.fp8 import fp8_problems

        yield from fp8_problems(config)
    if config.training.fp8_gather:
        from megatron_llama.train.setup.checks.fp8 import fp8_gather_problems

        yield from fp8_gather_problems(config)
    if config.optimizer.optimizer == MUON:
        from megatron_llama.train.setup.checks.muon import muon_problems

        yield from muon_problems(config)
    if config.optimizer.param_group:
        from megatron_llama.train.setup.checks.param_groups import param_group_problems

        yield from param_group_problems(config)
    if config.model.num_experts:
        from megatron_llama.train.setup.checks.experts import expert_problems

        yield from expert_problems(config)
    if config.training.has_router_losses or config.training.moe_aux_loss_coeff > 0:
        from megatron_llama.train.setup.checks.experts import router_loss_problems

        yield from router_loss_problems(config)
    if config.zenflow != ZenFlowConfig():
        from megatron_llama.train.setup.checks.zenflow import zenflow_problems

        yield from zenflow_problems(config)


def problems(config: Config, world_size: int) -> list[str]:
    """Return every problem of a configuration, resolved or not, one line each."""
    too_large = list(bound_problems(config, world_size))
    if too_large:
        return too_large
    lacking = restart_problems(config)
    config = resolve(config, world_size)
    return [
        *lacking,
        *range_problems(config),
        *length_problems(config.training),
        *missing_model_problems(config),
        *model_problems(config.model),
        *reward_problems(config),
        *parallel_problems(config, world_size),
        *batch_problems(config, world_size),
        *blend_problems(config.data.data_path),
        *optimizer_problems(config.optimizer, config.training),
        *schedule_free_problems(config),
        *moment_problems(config),
        *freeze_problems(config.model, config.optimizer.freeze),
        *lora_problems(config),
        *bad_step_problems(config),
        *attention_problems(config),
        *_chosen_problems(config),
        *run_problems(config),
        *data_order_problems(config),
    ]
