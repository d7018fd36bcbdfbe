"""Options -> a configuration that can run: precedence, derived values, and every cross-field
problem at once.

``assemble`` puts preset, HuggingFace folder, YAML and flags together; ``check`` fills in what is
derived and refuses what cannot run. Nothing here starts a process or opens a dataset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, get_type_hints

from megatron_llama.config.batch_ramp import (
    BatchSizes,
    length_problems,
    planned_iterations,
    size_problems,
    with_decay,
)
from megatron_llama.config.blend import blend_problems
from megatron_llama.config.hf import normal_rope, read_hf_config, rope_problems
from megatron_llama.config.parse import Parsed, flag
from megatron_llama.config.presets import PRESETS
from megatron_llama.config.schema import (
    Config,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    TrainingConfig,
)
from megatron_llama.errors import ConfigError, describe, listing
from megatron_llama.plans.buckets import NO_SHARD, by_unit
from megatron_llama.plans.checks.lora import lora_problems
from megatron_llama.plans.checks.run import (
    bad_step_problems,
    optimizer_problems,
    run_problems,
    split_shares,
)
from megatron_llama.plans.checks.zenflow import (
    with_file,
    zenflow_notes,
    zenflow_problems,
    zenflow_warnings,
)
from megatron_llama.plans.offload import offload_problems, offload_warnings
from megatron_llama.plans.params import is_frozen, partition_of, stage_units, whole_model
from megatron_llama.plans.schedule import ScheduleError, placement_of, schedule_problems

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
"""Model fields that nothing derives."""
SHAPE = ("vocab_size", *SIZES, "num_key_value_heads", "head_dim", "tie_word_embeddings")
"""Model fields that decide the shapes of the weights."""

_PARALLEL_POSITIVE = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "reduce_bucket_size",
    "grad_slots",
    "exchange_chunk_bytes",
    "distributed_timeout_minutes",
)
_POSITIVE = (
    ("parallel", _PARALLEL_POSITIVE),
    ("training", ("seq_length", "micro_batch_size")),
    (
        "training",
        (
            "initial_loss_scale",
            "min_loss_scale",
            "loss_scale_window",
            "hysteresis",
            "loss_spike_window",
        ),
    ),
    ("model", ("rms_norm_eps", "rope_theta", "make_vocab_size_divisible_by")),
    ("optimizer", ("adam_eps",)),
    ("lora", ("lora_alpha",)),
    ("log", ("log_interval", "tensorboard_queue_size", "sample_tokens")),
)
_NOT_NEGATIVE = (
    (
        "model",
        (
            "vocab_size",
            *SIZES,
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "initializer_range",
        ),
    ),
    ("model", ("bos_token_id", "eos_token_id")),
    (
        "training",
        (
            "global_batch_size",
            "eval_interval",
            "eval_iters",
            "seed",
            "loss_spike_factor",
            "max_bad_steps",
        ),
    ),
    (
        "training",
        ("train_samples", "epochs", "exit_interval", "exit_duration_in_mins", "z_loss_weight"),
    ),
    ("training", ("early_stop_patience",)),
    ("log", ("sample_interval",)),
    ("training", ("check_weight_hash_across_dp_replicas_interval",)),
    (
        "optimizer",
        (
            "lr",
            "min_lr",
            "lr_decay_iters",
            "lr_warmup_iters",
            "lr_wsd_decay_iters",
            "weight_decay",
            "clip_grad",
        ),
    ),
    (
        "optimizer",
        ("lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples", "lr_warmup_fraction"),
    ),
    ("lora", ("lora_rank",)),
    ("checkpoint", ("save_interval", "save_retain", "save_retain_interval")),
    ("offload", ("speculation_bytes",)),
    ("launch", ("nodes", "gpus_per_node")),
    ("log", ("profile_step_start",)),
    ("parallel", ("data_parallel_shard_size", "prefetch_bytes")),
)


@dataclass(frozen=True)
class Resolved:
    """A configuration that can run."""

    config: Config
    notes: tuple[str, ...]
    """What was decided for the user, one line each."""
    warnings: tuple[str, ...]
    """What can run but is probably not meant, one line each."""


def assemble(parsed: Parsed, trained: ModelConfig | None = None) -> Config:
    """The whole configuration: the model fields of the preset, of the HuggingFace folder or of the
    checkpoint to load (``trained``), then YAML, then flags.

    ``parsed`` holds the sections of ``Config``. Raises ConfigError for an unknown preset, or when
    weights are to be read from a folder whose shapes are not those asked for; CheckpointError when
    the folder cannot be read.
    """
    kinds = get_type_hints(Config)
    config = Config(**{item.name: parsed.get(kinds[item.name]) for item in fields(Config)})
    given = {
        item.name: getattr(config.model, item.name)
        for item in fields(ModelConfig)
        if item.name in parsed.explicit
    }
    base = (
        _preset(config.model.preset, given)
        if config.model.preset is not None
        else trained or ModelConfig()
    )
    folder = config.checkpoint.init_from_hf
    if folder is not None:
        from_folder = read_hf_config(folder)
        asked = (
            {name: getattr(base, name) for name in SHAPE} if config.model.preset is not None else {}
        )
        problems = [
            describe(
                flag(name),
                got=value,
                expected=f"{getattr(from_folder, name)} as in {folder}/config.json",
                do=f"leave {name} out",
            )
            for name, value in (asked | given).items()
            # A size of 0 means derived; the False of tie_word_embeddings is a value.
            if name in SHAPE
            and (value is False or value != 0)
            and value != getattr(from_folder, name)
        ]
        if problems:
            raise ConfigError(listing(f"The weights of {folder} have other shapes:", problems))
        base = from_folder
    return with_file(replace(config, model=replace(base, **given)), parsed.explicit)


def _preset(name: str, given: dict[str, Any]) -> ModelConfig:
    if name not in PRESETS:
        from difflib import get_close_matches

        near = get_close_matches(name, PRESETS, 1)
        do = f"did you mean {near[0]}?" if near else "give one of these or the model's fields"
        raise ConfigError(
            describe("--model", got=name, expected=f"one of {', '.join(PRESETS)}", do=do)
        )
    preset = PRESETS[name]
    if given.get("vocab_size", preset.vocab_size) != preset.vocab_size:
        # Special tokens belong to the published vocabulary: with another one they are the
        # tokenizer's.
        preset = replace(preset, bos_token_id=None, eos_token_id=None)
    return preset


def check(config: Config, world_size: int, *, needs_data: bool = False) -> Resolved:
    """Derive and check. ``needs_data``: the run reads a dataset, so --data-path must be there.

    ``model.vocab_size`` may stay 0 (the tokenizer's) when a tokenizer or dataset is named: fill it
    in, then build. Raises ConfigError with every problem.
    """
    found = problems(config, world_size)
    if needs_data and not config.data.data_path:
        found.append(
            describe(
                "--data-path",
                got="nothing",
                expected="PREFIX of PREFIX.bin and PREFIX.idx",
                do="give --data-path PREFIX",
            )
        )
    if found:
        raise ConfigError(
            listing(f"This configuration cannot run on {world_size} processes:", found)
        )
    resolved = resolve(config, world_size)
    return Resolved(resolved, tuple(_notes(config, resolved)), tuple(_warnings(resolved)))


def dp_size(config: Config, world_size: int) -> int:
    """Data-parallel ranks: processes / (tp x cp x pp). Raises ConfigError when that is no whole
    number."""
    problem = _world_problem(config, world_size)
    if problem is not None:
        raise ConfigError(problem)
    return world_size // _model_parallel(config)


def resolve(config: Config, world_size: int) -> Config:
    """Fill in derived values. What cannot be derived from invalid values is left as it is, for
    ``problems`` to name."""
    model = config.model
    training = config.training
    optimizer = config.optimizer
    heads = model.num_attention_heads
    divisible = heads > 0 and model.hidden_size % heads == 0
    model = replace(
        model,
        num_key_value_heads=model.num_key_value_heads or heads,
        head_dim=model.head_dim or (model.hidden_size // heads if divisible else 0),
        max_position_embeddings=model.max_position_embeddings or training.seq_length,
        rope_scaling=model.rope_scaling
        if rope_problems("", model.rope_scaling or {})
        else normal_rope(model.rope_scaling),
    )
    if _world_problem(config, world_size) is None and training.micro_batch_size > 0:
        dp = world_size // _model_parallel(config)
        training = replace(
            training, global_batch_size=training.global_batch_size or training.micro_batch_size * dp
        )
    training = replace(training, train_iters=training.train_iters or planned_iterations(training))
    if len(shares := split_shares(config.data.split)) == 3 and shares[1] == 0:
        training = replace(training, eval_interval=0)
    optimizer = with_decay(optimizer, training)
    sequence_parallel = (
        config.parallel.sequence_parallel and config.parallel.tensor_model_parallel_size > 1
    )
    parallel = replace(config.parallel, sequence_parallel=sequence_parallel)
    return replace(config, model=model, training=training, optimizer=optimizer, parallel=parallel)


def _notes(given: Config, resolved: Config) -> Iterator[str]:
    yield from zenflow_notes(resolved)
    if given.parallel.sequence_parallel and not resolved.parallel.sequence_parallel:
        yield "--sequence-parallel is ignored: it needs --tensor-model-parallel-size 2 or more"
    if given.training.global_batch_size == 0:
        size = resolved.training.global_batch_size
        micro = given.training.micro_batch_size
        yield f"--global-batch-size {size}: micro_batch_size {micro} x dp {size // micro}"
    if given.training.eval_interval != resolved.training.eval_interval:
        yield f"--eval-interval is ignored: --split {given.data.split} leaves nothing for validation"


def _warnings(config: Config) -> Iterator[str]:
    length = config.training.seq_length
    longest = config.model.max_position_embeddings
    if length > longest:
        yield f"--seq-length {length} is beyond max_position_embeddings {longest}: the exported model will claim the shorter one"
    if (
        config.parallel.recompute_num_layers != "all"
        and config.parallel.recompute_granularity == "none"
    ):
        wanted = config.parallel.recompute_num_layers
        yield f"--recompute-num-layers {wanted} without --recompute-granularity selective or full: nothing is recomputed"
    parallel = config.parallel
    if parallel.param_slots != "default" and not by_unit(parallel):
        strategy = parallel.data_parallel_sharding_strategy
        yield f"--param-slots {parallel.param_slots} has no effect under {strategy}: parameters stay whole"
    if config.checkpoint.load is None and (
        config.checkpoint.finetune or not config.checkpoint.load_optim
    ):
        yield "--finetune and --no-load-optim have no effect without --load"
    if config.log.tensorboard_dir is None:
        chosen = (
            "log_timers_to_tensorboard",
            "log_batch_size_to_tensorboard",
            "log_validation_ppl_to_tensorboard",
        )
        given_ones = " ".join([flag(name) for name in chosen if getattr(config.log, name)])
        if given_ones:
            yield f"{given_ones} without --tensorboard-dir: nothing is written"
    yield from offload_warnings(config)
    yield from zenflow_warnings(config)
    if config.lora.lora_rank == 0 and config.lora != LoraConfig():
        yield "options of --lora without --lora-rank: there are no additions, the model itself is trained"
    if config.checkpoint.save_interval > 0 and config.checkpoint.save is None:
        yield f"--save-interval {config.checkpoint.save_interval} without --save: nothing will be saved"


def problems(config: Config, world_size: int) -> list[str]:
    """Every cross-field problem, one line each. ``config`` may be resolved or not."""
    config = resolve(config, world_size)
    return [
        *_range_problems(config),
        *length_problems(config.training),
        *_missing_problems(config),
        *_model_problems(config.model),
        *_parallel_problems(config, world_size),
        *_batch_problems(config, world_size),
        *blend_problems(config.data.data_path),
        *optimizer_problems(config.optimizer, config.training),
        *_freeze_problems(config.model, config.optimizer.freeze),
        *lora_problems(config),
        *bad_step_problems(config),
        *offload_problems(config),
        *zenflow_problems(config),
        *run_problems(config),
    ]


def _range_problems(config: Config) -> Iterator[str]:
    for table, words, lowest in (
        (_POSITIVE, "a positive number", 1),
        (_NOT_NEGATIVE, "0 or more", 0),
    ):
        for section, names in table:
            for name in names:
                value = getattr(getattr(config, section), name)
                if value is not None and (value < 0 or (lowest == 1 and value == 0)):
                    yield describe(flag(name), got=value, expected=words, do=f"give {flag(name)} N")


def _missing_problems(config: Config) -> Iterator[str]:
    missing = [name for name in SIZES if getattr(config.model, name) == 0]
    if (
        config.model.vocab_size == 0
        and config.data.tokenizer_model is None
        and not config.data.data_path
    ):
        missing.append("vocab_size")
    if missing:
        remedy = f"give --model NAME (such as {next(iter(PRESETS))}), --init-from-hf FOLDER, or {' '.join(map(flag, missing))}"
        yield describe(
            "model", got=f"no {', '.join(missing)}", expected="the shape of a model", do=remedy
        )


def _model_problems(model: ModelConfig) -> Iterator[str]:
    heads = model.num_attention_heads
    groups = model.num_key_value_heads
    if model.hidden_size > 0 and heads > 0 and model.head_dim == 0:
        do = "change one of them or give --head-dim"
        yield describe(
            "--hidden-size",
            got=model.hidden_size,
            expected=f"a multiple of num_attention_heads {heads}",
            do=do,
        )
    if model.head_dim > 0 and model.head_dim % 2:
        do = "rotary embeddings turn pairs: change --head-dim or --num-attention-heads"
        yield describe("--head-dim", got=model.head_dim, expected="an even number", do=do)
    if heads > 0 and groups > 0 and heads % groups:
        do = f"choose {nearest_divisors(heads, groups)}"
        yield describe(
            "--num-key-value-heads",
            got=groups,
            expected=f"a divisor of num_attention_heads {heads}",
            do=do,
        )
    for name, wanted in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
        if getattr(model, name) != wanted:
            yield describe(
                flag(name),
                got=getattr(model, name),
                expected=f"{wanted}, as in every LLaMA",
                do=f"leave {name} out",
            )
    for name in ("bos_token_id", "eos_token_id"):
        token = getattr(model, name)
        if token is not None and token >= model.vocab_size > 0:
            do = f"give {flag(name)} of your tokenizer"
            yield describe(
                flag(name), got=token, expected=f"an id below vocab_size {model.vocab_size}", do=do
            )
    if model.rope_scaling is not None:
        yield from rope_problems("rope_scaling", model.rope_scaling)


def _parallel_problems(config: Config, world_size: int) -> Iterator[str]:
    model = config.model
    parallel = config.parallel
    tp = parallel.tensor_model_parallel_size
    pp = parallel.pipeline_model_parallel_size
    cp = parallel.context_parallel_size
    world = _world_problem(config, world_size)
    if world is not None and min(tp, pp, cp) > 0:
        yield world
    if min(tp, pp, cp, parallel.virtual_pipeline_model_parallel_size) <= 0:
        return
    for name in ("num_attention_heads", "intermediate_size"):
        size = getattr(model, name)
        if size > 0 and size % tp:
            yield _not_a_divisor("tensor_model_parallel_size", tp, name, size)
    heads = model.num_key_value_heads
    if heads > 0 and heads % tp and tp % heads:
        wanted = f"a divisor or a multiple of num_key_value_heads {heads}"
        do = f"choose {nearest_divisors(heads, tp) if tp < heads else nearest_multiples(tp, heads)}"
        yield describe("--tensor-model-parallel-size", got=tp, expected=wanted, do=do)
    yield from _sequence_problems(config)
    yield from _sharding_problems(config, 0 if world is not None else world_size // (tp * pp))
    if model.num_hidden_layers > 0:
        yield from list(_pipeline_problems(config)) or _recompute_problems(config)


def _recompute_problems(config: Config) -> Iterator[str]:
    wanted = config.parallel.recompute_num_layers
    largest = max(map(len, partition_of(config).layers))
    if wanted not in ("all", "auto") and not (
        wanted.isascii() and wanted.isdecimal() and int(wanted) <= largest
    ):
        expected = f"all, auto, or a number from 0 to {largest}, the blocks of the largest stage"
        yield describe(
            "--recompute-num-layers",
            got=wanted,
            expected=expected,
            do="give one of these or leave it out",
        )


def _sharding_problems(config: Config, ranks: int) -> Iterator[str]:
    """``ranks``: data-parallel ones, context-parallel ones included; 0: unknown."""
    parallel = config.parallel
    shards = parallel.data_parallel_shard_size
    slots = parallel.param_slots
    strategy = parallel.data_parallel_sharding_strategy
    if shards > 0 and strategy == NO_SHARD:
        do = "leave it out, or choose another --data-parallel-sharding-strategy"
        yield describe(
            "--data-parallel-shard-size",
            got=shards,
            expected=f"nothing, since {NO_SHARD} shards nothing",
            do=do,
        )
    elif shards > 0 and ranks and ranks % shards:
        wanted = f"a divisor of the {ranks} data- and context-parallel ranks"
        yield describe(
            "--data-parallel-shard-size",
            got=shards,
            expected=wanted,
            do=f"choose {nearest_divisors(ranks, shards)}",
        )
    if slots not in ("default", "all", "auto") and not (
        slots.isascii() and slots.isdecimal() and int(slots) > 0
    ):
        yield describe(
            "--param-slots",
            got=slots,
            expected="default, all, auto, or a number of 1 or more",
            do="give one of these",
        )


def _sequence_problems(config: Config) -> Iterator[str]:
    parallel = config.parallel
    length = config.training.seq_length
    cp = parallel.context_parallel_size
    tp = parallel.tensor_model_parallel_size
    unit = (2 * cp if cp > 1 else 1) * (tp if parallel.sequence_parallel else 1)
    if length > 0 and length % unit:
        parts = [f"2 x cp {cp}"] * (cp > 1) + [f"tp {tp}"] * parallel.sequence_parallel
        do = f"choose {nearest_multiples(length, unit)}"
        yield describe(
            "--seq-length",
            got=length,
            expected=f"a multiple of {' x '.join(parts)} = {unit}",
            do=do,
        )


def _pipeline_problems(config: Config) -> Iterator[str]:
    parallel = config.parallel
    layers = config.model.num_hidden_layers
    ranks = parallel.pipeline_model_parallel_size
    virtual = parallel.virtual_pipeline_model_parallel_size
    try:
        stages = len(placement_of(parallel.pipeline_schedule, ranks, virtual))
    except ScheduleError as error:
        yield str(error)
        return
    if parallel.pipeline_layer_split:
        split = parallel.pipeline_layer_split
        if len(split) != stages or sum(split) != layers or min(split) < 1:
            wanted = f"{stages} numbers of 1 or more (one per stage) that add up to num_hidden_layers {layers}"
            got = f"{' '.join(map(str, split))} (sum {sum(split)})"
            yield describe("--pipeline-layer-split", got=got, expected=wanted, do="change the list")
        return
    ends = (
        parallel.account_for_embedding_in_pipeline_split
        + parallel.account_for_loss_in_pipeline_split
    )
    if (layers + ends) % stages or layers + ends < 2 * stages * bool(ends) or layers < stages:
        counted = f" + {ends} for embedding and loss" if ends else ""
        counted += "" if (layers + ends) % stages else " that leaves every stage a block"
        name = (
            "virtual_pipeline_model_parallel_size"
            if virtual > 1
            else "pipeline_model_parallel_size"
        )
        do = f"choose {nearest_divisors(layers + ends, stages)} stages, or give --pipeline-layer-split"
        yield describe(
            flag(name),
            got=f"{stages} stages",
            expected=f"a divisor of num_hidden_layers {layers}{counted}",
            do=do,
        )


def _not_a_divisor(name: str, value: int, whole: str, size: int) -> str:
    return describe(
        flag(name),
        got=value,
        expected=f"a divisor of {whole} {size}",
        do=f"choose {nearest_divisors(size, value)}",
    )


def _model_parallel(config: Config) -> int:
    parallel = config.parallel
    return (
        parallel.tensor_model_parallel_size
        * parallel.context_parallel_size
        * parallel.pipeline_model_parallel_size
    )


def _world_problem(config: Config, world_size: int) -> str | None:
    tp, pp, cp = (
        getattr(config.parallel, f"{name}_size")
        for name in ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
    )
    if min(tp, pp, cp) <= 0:
        return describe(
            "tp x cp x pp",
            got=f"{tp} x {cp} x {pp}",
            expected="positive sizes",
            do="give positive sizes",
        )
    if world_size > 0 and world_size % (tp * cp * pp) == 0:
        return None
    counts = nearest_multiples(world_size, tp * cp * pp)
    do = f"start {counts} processes, or change --tensor-model-parallel-size, --context-parallel-size or --pipeline-model-parallel-size"
    return describe(
        "processes",
        got=world_size,
        expected=f"a multiple of tp {tp} x cp {cp} x pp {pp} = {tp * cp * pp}",
        do=do,
    )


def _batch_problems(config: Config, world_size: int) -> Iterator[str]:
    training = config.training
    if (
        _world_problem(config, world_size) is None
        and training.micro_batch_size > 0
        and training.global_batch_size > 0
    ):
        dp = world_size // _model_parallel(config)
        unit = training.micro_batch_size * dp
        yield from size_problems(training, unit)
        if training.global_batch_size % unit:
            wanted = (
                f"a multiple of micro_batch_size {training.micro_batch_size} x dp {dp} = {unit}"
            )
            do = f"choose {nearest_multiples(training.global_batch_size, unit)}"
            yield describe(
                "--global-batch-size", got=training.global_batch_size, expected=wanted, do=do
            )
        else:
            yield from _schedule_problems(config.parallel, _kinds_of_steps(training, unit))
    precisions = [f"--{name}" for name in ("bf16", "fp16", "fp64") if getattr(training, name)]
    if len(precisions) > 1:
        yield describe(
            " ".join(precisions),
            got=f"{len(precisions)} precisions",
            expected="at most one",
            do="leave the others out",
        )
    lowest = training.min_loss_scale
    first = training.initial_loss_scale
    if lowest > first > 0:
        yield describe(
            "--min-loss-scale",
            got=lowest,
            expected=f"at most initial_loss_scale {first}",
            do="lower one or raise the other",
        )


def _kinds_of_steps(training: TrainingConfig, unit: int) -> list[int]:
    """Microbatches of the first steps and of the last: where the first two of a ramp are multiples
    of something, all of it are."""
    sizes = [] if list(size_problems(training, unit)) else [*BatchSizes.of(training).all()][:2]
    return sorted({size // unit for size in (*sizes, training.global_batch_size)})


def _schedule_problems(parallel: ParallelConfig, counts: Sequence[int]) -> Iterator[str]:
    """What the schedule itself has to say about the first of these numbers of microbatches that it
    does not take."""
    ranks = parallel.pipeline_model_parallel_size
    virtual = parallel.virtual_pipeline_model_parallel_size
    try:
        placement_of(parallel.pipeline_schedule, ranks, virtual)
    except ScheduleError:
        return  # named with the pipeline's own problems
    for microbatches in counts:
        found = schedule_problems(
            parallel.pipeline_schedule, ranks=ranks, microbatches=microbatches, virtual=virtual
        )
        if found:
            ramp = "" if microbatches == counts[-1] else " (in a step of --rampup-batch-size)"
            yield from (f"{problem}{ramp}" for problem in found)
            return


def _freeze_problems(model: ModelConfig, patterns: tuple[str, ...]) -> Iterator[str]:
    """What is stored as one is frozen as one, in whatever layout: a checkpoint may be resumed in
    another."""
    if (
        not patterns
        or min(getattr(model, name) for name in (*SIZES, "make_vocab_size_divisible_by")) <= 0
    ):
        return
    units = stage_units(model, whole_model(model), 0)
    groups = [[part.name for part in spec.slices] for unit in units for spec in unit.params]
    names = [name for group in groups for name in group]
    for pattern in patterns:
        if not any(is_frozen(name, (pattern,)) for name in names):
            wanted = "a pattern of the model's parameters"
            yield describe(
                "--freeze",
                got=pattern,
                expected=wanted,
                do=f"did you mean {_nearest_parameter(model, pattern, names)}?",
            )
    if all(is_frozen(name, patterns) for name in names):
        yield describe(
            "--freeze",
            got=f"all {len(names)} parameters",
            expected="one or more that are trained",
            do="leave out a pattern",
        )
    apart = [group for group in groups if len({is_frozen(name, patterns) for name in group}) == 2]
    missing = [name for group in apart for name in group if not is_frozen(name, patterns)]
    if missing:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        wanted = f"also {', '.join(missing[:4])}{more}, which are stored with them"
        yield describe(
            "--freeze",
            got=" ".join(patterns),
            expected=wanted,
            do="freeze all or none of what is stored as one weight",
        )


def _nearest_parameter(model: ModelConfig, pattern: str, names: list[str]) -> str:
    from difflib import get_close_matches

    if model.tie_word_embeddings and is_frozen("lm_head.weight", (pattern,)):
        return "model.embed_tokens.weight"  # the head is the embedding
    return get_close_matches(pattern, names, 1, cutoff=0.0)[0]


def nearest_divisors(whole: int, value: int) -> str:
    """The divisors of ``whole`` next to ``value``, below and above: ``2 or 4``. Both positive."""
    divisors = [n for n in range(1, whole + 1) if whole % n == 0]
    below = [n for n in divisors if n < value]
    above = [n for n in divisors if n > value]
    return " or ".join(map(str, below[-1:] + above[:1]))


def nearest_multiples(value: int, unit: int) -> str:
    """The positive multiples of ``unit`` next to ``value``: ``96 or 128``."""
    below = max(value, 0) // unit * unit
    return " or ".join(str(n) for n in (below, below + unit) if n > 0)
