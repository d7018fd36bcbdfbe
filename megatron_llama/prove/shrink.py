"""Makes a user's configuration small: widths, depth, vocabulary, lengths and processes shrink, and
every structure stays.

A structure decides which code runs and which ranks communicate: which axes are above 1, whether
key/value heads have copies, whether the vocabulary is padded, whether a window is shorter than the
sequence, whether microbatches are a multiple of the pipeline ranks. The field of each option says
whether it is kept, scaled or left out, and why (``Small`` of ``option.py``). ``small_model.py`` and
``small_run.py`` compute the values that depend on other options. Small values stay as they are, so
shrinking twice is the same as shrinking once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from math import prod
from typing import Any

from megatron_llama.config.parse import Parsed, differences, flag
from megatron_llama.config.schema import OWN_TEXT, Config, ModelConfig
from megatron_llama.errors import ConfigError
from megatron_llama.model.families import FAMILIES
from megatron_llama.model.plan.fp8 import SIDE
from megatron_llama.prove.case import NOT_HERE, STEPS, Case, Note
from megatron_llama.prove.given import LEFT_OUT, PRETRAIN, SECTIONS, SMALL, Given, read_given
from megatron_llama.prove.reasons import needs_of, reasons_of
from megatron_llama.prove.small_model import (
    blocks_here,
    is_small,
    small_experts,
    small_freeze,
    small_heads,
    small_lora,
    small_positions,
    small_vocabulary,
)
from megatron_llama.prove.small_run import (
    datasets,
    lowered_values,
    shard_size_here,
    small_batch,
    small_blend,
    small_buffers,
    small_context,
    small_division,
    small_intervals,
    small_length_of_samples,
    small_schedule,
    small_stages,
)
from megatron_llama.prove.world import World, worlds
from megatron_llama.train.api.common.options import read_options
from megatron_llama.train.setup.resolve import assemble, check, resolve
from megatron_llama.tune.sft.built_in_templates import BUILT_IN
from megatron_llama.tune.sft.sft_config import SFTConfig

AS_GIVEN = "as given"
LAST_TOKEN = -1
"""A pad_token_id that is the last row of the embedding. ``materials.py`` ends documents and answers
with that token, so the padding token is among the tokens here."""


def shrink(parsed: Parsed, world_size: int, ranks: int) -> tuple[Case, ...]:
    """Return the cases of at most ``ranks`` processes that show what a run of ``world_size``
    processes does: one case, or several if its axes do not fit into ``ranks`` together.

    Raises UserError if the run could not start, for --auto-parallel, and if no axis fits into
    ``ranks``."""
    given = read_given(parsed, world_size)
    if is_small(given.resolved) and world_size <= ranks:
        return (_case(given, given.world, (given.world,)),)
    needs = needs_of(given.resolved, given.world)
    cases = worlds(given.world, ranks, needs)
    return tuple(_case(given, here, cases) for here in cases)


def _case(given: Given, here: World, cases: Sequence[World]) -> Case:
    """Return the case of the world ``here``. ``cases`` are the worlds of all cases."""
    small = _small(given, here)
    examples = _small_examples(given.examples)
    options = _options(small, examples if given.sft else SFTConfig())
    _require_valid(options, here.world_size, sft=given.sft)
    resolved = resolve(small, here.world_size)
    before, after = _values(given.resolved, given.examples), _values(resolved, examples)
    reasons = reasons_of(given.resolved, given.world, resolved, here, cases)
    scaled = [*given.notes, *_world_notes(given, here), *_scaled_notes(before, after, reasons)]
    name = str(here) if any(note.is_scaled for note in scaled) else AS_GIVEN
    restated = _restated_notes(given, {note.option for note in scaled})
    notes = (*scaled, *restated, *_left_out_notes(given), *_kept_notes(before, after, options))
    return Case(name, options, here.world_size, given.sft, notes)


def _small(given: Given, here: World) -> Config:
    """Return the configuration for the world ``here``."""
    yours = given.resolved
    world = given.world
    keeps_sizes = here == world and is_small(yours)
    small = given.config if keeps_sizes else yours
    small = _with(small, small_vocabulary(yours.model, world.tp, here.tp))
    if yours.model.pad_token_id is not None:
        small = _with(small, {"pad_token_id": LAST_TOKEN})
    if not keeps_sizes:
        small = _with(small, _sizes(given, here))
        buffers = small_buffers(yours, world, resolve(small, here.world_size), here)
        small = _with(small, buffers)
    # Without a share for validation there are no evaluations, so their interval can stay.
    small = _with(small, {"eval_interval": yours.training.eval_interval})
    if yours.training.epochs or yours.training.train_iters > STEPS:
        if keeps_sizes and yours.training.rampup_batch_size:
            start, increment, samples = yours.training.rampup_batch_size
            soon = (start, increment, min(samples, yours.training.global_batch_size))
            small = _with(small, {"rampup_batch_size": soon})
        intervals = lowered_values(yours) | small_intervals(yours)
        small = _with(small, small_schedule(yours, small) | intervals)
    return _with(small, small_blend(yours.data.data_path))


def _sizes(given: Given, here: World) -> dict[str, Any]:
    """Return the options that shrink with the sizes of the model and of the world."""
    yours = given.resolved
    world = given.world
    context = small_context(yours, here)
    exchanging = _with(yours, context).parallel.head_ranks
    in_fp8 = yours.training.fp8 != "none"
    heads = small_heads(yours.model, world.tp, here.tp, exchanging, tile=SIDE if in_fp8 else 1)
    length = small_length_of_samples(yours, here, sft=given.sft)
    stages = small_stages(yours, here)
    positions = small_positions(
        yours.model,
        yours.training.seq_length,
        length,
        cp=(world.cp // max(1, yours.parallel.head_ranks), here.cp // max(1, exchanging)),
        head_dim=heads["head_dim"],
    )
    blocks = blocks_here(yours, stages["num_hidden_layers"])
    types = tuple(yours.model.layer_types[block] for block in blocks if yours.model.layer_types)
    ep = small_division(yours, world, here)
    values: dict[str, Any] = {
        **heads,
        **_experts(yours.model, blocks, heads, ep, tile=SIDE if in_fp8 else 8),
        "expert_model_parallel_size": ep,
        **stages,
        **positions,
        **context,
        **small_batch(yours, world, here),
        **(small_lora(yours.lora) if yours.lora.lora_rank else {}),
        "layer_types": types,
        "seq_length": length,
        "tensor_model_parallel_size": here.tp,
        "sequence_parallel": yours.parallel.sequence_parallel and here.tp > 1,
        "data_parallel_shard_size": shard_size_here(yours, world, here),
    }
    if in_fp8:
        most = (stages["num_hidden_layers"] - 1) // 2
        values["fp8_bf16_layers"] = min(yours.training.fp8_bf16_layers, most)
    model = _with(yours, values).model
    return {**values, "freeze": small_freeze(yours, model, blocks)}


def _experts(
    model: ModelConfig, blocks: Sequence[int], heads: Mapping[str, Any], ep: int, *, tile: int
) -> dict[str, Any]:
    """Return the options of experts, with the width that the family gives them."""
    values = small_experts(model, blocks, heads["hidden_size"], ep, tile=tile)
    if not values:
        return {}
    rules = FAMILIES[model.model_type].derived
    small = replace(model, **heads, **values)
    return values | {name: rules[name](small) for name in values.keys() & rules.keys()}


def _small_examples(examples: SFTConfig) -> SFTConfig:
    """Return the options of sft, without a template that is a file, and with a placeholder for
    files of evaluations."""
    if examples.chat_template not in BUILT_IN:
        examples = replace(examples, chat_template=None)
    return replace(examples, valid_data=("valid",)) if examples.valid_data else examples


def _with(config: Config, values: Mapping[str, Any]) -> Config:
    """Return the configuration with other values of some options."""
    changed = {}
    for item in fields(Config):
        section = getattr(config, item.name)
        own = {name: value for name, value in values.items() if hasattr(section, name)}
        changed[item.name] = replace(section, **own)
    return Config(**changed)


def _options(small: Config, examples: SFTConfig) -> dict[str, object]:
    """Return the options that have to be given for a configuration, in their order."""
    sections = [examples, *(getattr(small, item.name) for item in fields(Config))]
    options = {n: value for n, value in differences(sections).items() if n not in LEFT_OUT}
    # A family's values count unless an option is given, even with the default of LLaMA.
    given = {name: value for name, value in options.items() if hasattr(small.model, name)}
    completed = FAMILIES[small.model.model_type].complete(ModelConfig(**given), given)
    for item in fields(ModelConfig):
        value = getattr(small.model, item.name)
        if item.name not in LEFT_OUT and getattr(completed, item.name) != value:
            options[item.name] = value
    return options


def _require_valid(options: Mapping[str, object], world_size: int, *, sft: bool) -> None:
    """Raise ConfigError if the trainer refuses the options, so that no small case was found."""
    length = {} if {"train_samples", "epochs"} & options.keys() else {"train_iters": STEPS}
    saving = {"save": "checkpoints", "save_interval": 1}
    sections = SECTIONS if sft else PRETRAIN
    try:
        check(assemble(read_options(None, {**length, **saving, **options}, sections)), world_size)
    except ConfigError as error:
        title = "No small configuration with this structure was found. The one that was tried:"
        raise ConfigError(f"{title}\n{error}") from error


def _world_notes(given: Given, here: World) -> Iterator[Note]:
    """Yield notes on the axes."""
    yours = given.world
    if yours.dp != here.dp:
        why = "every rank reads samples of its own, as with more"
        if here.dp == 1:
            why = "another case has it"
        yield Note("data-parallel ranks", str(yours.dp), str(here.dp), why)
    missing = [axis for axis in yours.above_one if axis not in here.above_one]
    if missing:
        needs = needs_of(given.resolved, yours)
        whole = prod(needs.get(axis, 2) for axis in yours.above_one)
        why = f"another case has {' and '.join(missing)}; --ranks {whole} shows all together"
        yield Note("axes seen together", str(yours), str(here), why)


def _scaled_notes(
    before: Mapping[str, Any], after: Mapping[str, Any], reasons: Mapping[str, str]
) -> Iterator[Note]:
    """Yield a note for every option with another value here, with the reason of this case or of the
    option's field."""
    for name, small in SMALL.items():
        if small.fate == "scaled" and before[name] != after[name]:
            why = reasons.get(name, small.why)
            yield Note(flag(name), *_change(before[name], after[name]), why)


def _restated_notes(given: Given, told: Collection[str]) -> Iterator[Note]:
    """Yield notes on windows and kinds of layers that are restated in fewer words, if untold."""
    for name in ("sliding_window", "layer_types"):
        written, meant = (getattr(config.model, name) for config in (given.config, given.resolved))
        if written != meant and flag(name) not in told:
            yield Note(flag(name), _shown(written), _shown(meant), "all layers are alike")


def _left_out_notes(given: Given) -> Iterator[Note]:
    """Yield a note for every given option that no case has."""
    for name, value in given.left_out.items():
        yield Note(flag(name), _shown(value), NOT_HERE, SMALL[name].why)
    paths = given.resolved.data.data_path
    if paths and not datasets(paths):
        yield Note("--data-path", _shown(paths), NOT_HERE, OWN_TEXT.why)


def _kept_notes(
    before: Mapping[str, Any], after: Mapping[str, Any], options: Mapping[str, object]
) -> Iterator[Note]:
    """Yield a note for every option with its value kept, first those that may have no effect."""
    kept = [name for name in options if before[name] == after[name]]
    without_effect = {
        name: small.why for name, small in SMALL.items() if small.fate == "kept" and small.why
    }
    for name in sorted(kept, key=lambda name: name not in without_effect):
        value = _shown(after[name])
        yield Note(flag(name), value, value, without_effect.get(name, ""))


def _values(config: Config, examples: SFTConfig) -> dict[str, Any]:
    """Return all options by name."""
    sections = [examples, *(getattr(config, item.name) for item in fields(Config))]
    values = {name: value for section in sections for name, value in vars(section).items()}
    # Datasets have other names here. Only the number of datasets of a blend is kept.
    return values | {"data_path": datasets(config.data.data_path)}


def _change(before: object, after: object) -> tuple[str, str]:
    """Return both values, each on one line. Of two mappings only differing entries are shown."""
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return _shown(before), _shown(after)
    differing = [name for name in before if before[name] != after.get(name)]
    yours = _shown({name: before[name] for name in differing})
    return yours, _shown({name: after[name] for name in differing})


def _shown(value: object) -> str:
    """Return a value on one line, or the length of a long list."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(item)}" for name, item in value.items())
    if isinstance(value, tuple | list):
        words = [str(item) for item in value]
        return " ".join(words) if len(words) <= 8 else f"{len(words)} values"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value in (None, ""):
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
