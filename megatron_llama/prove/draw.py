"""Draws configurations from a seed: a sample of all combinations of options, with least numbers of
rare ones.

The rules of combination are not repeated here. A case begins with a layout and a family. Options
are then added one by one, without those that the trainer's own checks refuse together with the
options before. Fields have the values to draw (``draws``); options that are drawn together are
here. Some cases keep a wrong value, to test its refusal."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar, get_args, get_origin

from megatron_llama.config.parse import options_of
from megatron_llama.config.schema import Config, PipelineSchedule
from megatron_llama.engine.plan.buckets import BY_TRAFFIC, NO_SHARD
from megatron_llama.errors import UserError
from megatron_llama.model.families import FAMILIES
from megatron_llama.model.plan.fp8 import BLOCKWISE, MULTIPLE, SIDE, TENSORWISE
from megatron_llama.model.plan.lora import PROJECTIONS
from megatron_llama.model.rope import ORIGINAL, ROPE_FIELDS
from megatron_llama.model.windows import FULL, SLIDING
from megatron_llama.prove.case import STEPS, Case
from megatron_llama.prove.given import EXAMPLES, LEFT_OUT, PRETRAIN, SECTIONS, read_given
from megatron_llama.schedule import ScheduleError, placement_of
from megatron_llama.train.api.common.options import read_options
from megatron_llama.tune.sft.repair import Repair

T = TypeVar("T")
Options = dict[str, Any]
Topic = Callable[[random.Random, Case], Options]
"""Draws options that belong together, for a case that already has others."""

DOUBLINGS = 3
"""Base-2 logarithm of the largest number of processes."""
WORLD_SIZE = "world_size"
"""Key of the number of processes among the options of a topic that changes it."""
GLOBAL_BATCH_SIZE = 8
SCHEDULES: tuple[PipelineSchedule, ...] = get_args(PipelineSchedule)
STRATEGIES = (NO_SHARD, *BY_TRAFFIC)
DOCUMENTS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
LAYERS = (4, 6, 8, 12, 16, 24)
BUCKETS = (1, 3_000, 20_000, 1_000_000)

OF = 64
"""Number of cases to which the floors below refer."""
THREE_AXES = 20
"""Least number of cases with three or more axes above 1."""
EACH_SCHEDULE = 8
"""Least number of cases with a pipeline for each schedule."""
EACH_FAMILY = 4
"""Least number of cases of each family."""
THREE = "three axes"
MOST_TOPICS = 18
"""Most options and groups of options that are tried in addition to layout and family."""
ODD = 0.2
"""Share of the cases with an axis of three."""
OF_FAMILY = 0.4
"""Share of the cases with an option, for each option that only some families have."""
WRONG = 0.15
"""Share of the cases that have a wrong value."""
TUNED = 0.25
"""Share of the cases that are tuned on conversations."""


def draw(seed: int, count: int) -> tuple[Case, ...]:
    """Return ``count`` cases, always the same for a seed. The trainer refuses some of them. For
    fewer than 64 cases the floors are smaller in proportion."""
    chance = random.Random(seed)
    spread = with_floors(
        lambda: _spread(chance),
        traits,
        lambda case: refusal(case) is None,
        floors(count, by_family=True),
        count,
    )
    defaults = {name: option.default for name, option in options_of(SECTIONS).items()}
    cases = []
    for number, base in enumerate(spread):
        case = _furnished(chance, base)
        options = {name: v for name, v in case.options.items() if v != defaults[name]}
        cases.append(replace(case, name=f"drawn {number} of seed {seed}", options=options))
    return tuple(cases)


def floors(count: int, *, by_family: bool = False) -> tuple[Counter[str], ...]:
    """Return the least number of each trait among ``count`` drawn cases."""
    families = tuple(FAMILIES) * (count * EACH_FAMILY // OF)
    return (
        Counter({THREE: count * THREE_AXES // OF}),
        Counter(SCHEDULES * (count * EACH_SCHEDULE // OF)),
        *([Counter(families)] if by_family else []),
    )


def traits(case: Case) -> tuple[str, ...]:
    """Return the trait of a case in each floor."""
    schedule = str(case.options["pipeline_schedule"]) if axis_sizes(case)["pp"] > 1 else ""
    above = sum(size > 1 for size in axis_sizes(case).values())
    return THREE if above >= 3 else "", schedule, str(case.options["model_type"])


def axis_sizes(case: Case) -> dict[str, int]:
    """Return the sizes of tp, cp, pp and dp."""
    values = {axis: case.options.get(name, 1) for axis, name in AXES.items()}
    # A case that is refused may have any value here.
    sizes = {a: size if isinstance(size, int) and size > 0 else 1 for a, size in values.items()}
    return sizes | {"dp": case.world_size // math.prod(sizes.values())}


AXES: Mapping[str, str] = MappingProxyType(
    {
        "tp": "tensor_model_parallel_size",
        "cp": "context_parallel_size",
        "pp": "pipeline_model_parallel_size",
    }
)
"""Options of the axes. The size of dp follows from the number of processes."""


def with_floors(
    candidate: Callable[[], T | None],
    traits_of: Callable[[T], Sequence[str]],
    runs: Callable[[T], bool],
    wanted: Sequence[Counter[str]],
    count: int,
) -> list[T]:
    """Return ``count`` different candidates that can run, with at least the ``wanted`` number of
    each trait. A candidate of None is drawn again. ``traits_of`` returns a trait for each floor."""
    chosen: list[T] = []
    left = [Counter(floor) for floor in wanted]
    while len(chosen) < count:
        drawn = candidate()
        if drawn is None or drawn in chosen:
            continue
        missing = list(zip(left, traits_of(drawn), strict=True))
        # The last places are kept for missing traits. A candidate can count for all floors at once,
        # so all floors are always reached.
        places = count - len(chosen)
        if all(floor.total() < places or floor[trait] for floor, trait in missing) and runs(drawn):
            chosen.append(drawn)
            for floor, trait in missing:
                floor[trait] -= min(1, floor[trait])
    return chosen


def configured(case: Case) -> Config:
    """Return the configuration of a case, as ``prove`` reads it. Raises UserError."""
    return read_given(read_options(None, case.options, SECTIONS), case.world_size).resolved


def refusal(case: Case) -> UserError | None:
    """Return the trainer's refusal of a case before a process starts; None if it accepts it."""
    try:
        configured(case)
    except UserError as error:
        return error
    return None


# Layouts


def layout(chance: random.Random) -> tuple[Options, int]:
    """Draw a layout of a model of 4 heads: options, and up to 8 processes. Some layouts cannot run.
    Raises ScheduleError if the pipeline has no stages."""
    doublings = chance.randint(0, DOUBLINGS)
    pp = 2**doublings
    left = DOUBLINGS - doublings
    sizes: dict[str, int] = {}
    for axis in chance.sample(("tp", "cp", "dp"), 3):
        doublings = chance.randint(0, min(2, left))
        sizes[axis] = 2**doublings
        left -= doublings
    options: Options = {AXES[axis]: sizes[axis] for axis in ("tp", "cp")} | {AXES["pp"]: pp}
    options["virtual_pipeline_model_parallel_size"] = chance.choice((1, 2, 3)) if pp > 1 else 1
    options["sequence_parallel"] = sizes["tp"] > 1 and chance.random() < 0.5
    options["tp_comm_overlap"] = chance.choice(("0", "2", "4")) if sizes["tp"] > 1 else "0"
    options |= _context(chance, sizes["cp"])
    options["data_parallel_sharding_strategy"] = chance.choice(STRATEGIES)
    microbatches = chance.choice((1, 2, 4, 8))
    # A global batch that is too small leaves microbatches without samples, which is refused.
    options["micro_batch_size"] = GLOBAL_BATCH_SIZE // (sizes["dp"] * microbatches)
    options["global_batch_size"] = GLOBAL_BATCH_SIZE
    options["pipeline_schedule"] = chance.choice(SCHEDULES) if pp > 1 else "1f1b"
    options["num_key_value_heads"] = chance.choice((4, 2, 1))
    options["recompute_granularity"] = chance.choice(("none", "selective", "full"))
    options["tie_word_embeddings"] = chance.random() < 0.5
    options |= dict.fromkeys(DOCUMENTS, chance.random() < 0.5)
    options["reduce_bucket_size"] = chance.choice(BUCKETS)
    options |= _sharding(chance, options, sizes["dp"] * sizes["cp"]) | _stages(chance, options)
    return options, pp * sizes["tp"] * sizes["cp"] * sizes["dp"]


def _context(chance: random.Random, cp: int) -> Options:
    """Draw how context-parallel ranks see each other's keys and values."""
    comm = "all_gather"
    if cp > 1:
        comm = chance.choice(("all_gather", "ring", "a2a", "a2a+p2p")[: 2 + cp // 2])
    sizes = (2, cp // 2) if comm == "a2a+p2p" else ()
    return {"cp_comm_type": comm, "hierarchical_context_parallel_sizes": sizes}


def _sharding(chance: random.Random, options: Mapping[str, Any], ranks: int) -> Options:
    """Draw the buffers of parameters and gradients, and whether shards are replicated."""
    strategy = options["data_parallel_sharding_strategy"]
    if strategy == NO_SHARD:
        return {}
    slots = "default"
    if strategy == BY_TRAFFIC[-1]:  # parameters too
        slots = chance.choice(("default", "2", "2", "3", "all"))
    sizes = [size for size in (1, 2) if size < ranks]
    return {
        "param_slots": slots,
        "grad_slots": chance.choice((1, 2, 3)),
        "data_parallel_shard_size": chance.choice(sizes) if sizes and chance.random() < 0.3 else 0,
        "prefetch_bytes": chance.choice((0, 0, 60_000)),
    }


def _stage_count(options: Mapping[str, Any]) -> int:
    virtual = options["virtual_pipeline_model_parallel_size"]
    return len(placement_of(options["pipeline_schedule"], options[AXES["pp"]], virtual))


def _stages(chance: random.Random, options: Mapping[str, Any]) -> Options:
    """Draw the blocks of every stage: equal shares or a random split."""
    stages = _stage_count(options)
    layers = chance.choice([count for count in LAYERS if stages <= count <= stages + 4])
    if stages == 1 or chance.random() < 0.5:
        return {"num_hidden_layers": layers}
    cuts = [0, *sorted(chance.sample(range(1, layers), stages - 1)), layers]
    split = tuple(stop - start for start, stop in itertools.pairwise(cuts))
    return {"num_hidden_layers": layers, "pipeline_layer_split": split}


# Everything else


def _spread(chance: random.Random) -> Case | None:
    """Draw a case with layout, family and sizes; None if its pipeline has no stages."""
    try:
        options, world_size = layout(chance)
    except ScheduleError:
        return None
    sft = chance.random() < TUNED
    options |= _model(chance)
    if sft:
        # A conversation has at least a question and the beginning of an answer.
        options["seq_length"] = chance.choice((48, 64))
    case = Case("", options, world_size, sft)
    if chance.random() < ODD:
        more = _three(chance, case)
        case = replace(case, world_size=more.pop(WORLD_SIZE), options={**case.options, **more})
    names = case.options.keys() - (STREAMS if sft else ())
    kept = {name: value for name, value in case.options.items() if name in names and value != ()}
    return replace(case, options=kept)


def _furnished(chance: random.Random, case: Case) -> Case:
    """Return the case with some of all other options. Options of few families are more frequent."""
    own = (*FAMILIES[str(case.options["model_type"])].fields, "windows")
    names = [name for name in own if chance.random() < OF_FAMILY]
    for name in [*names, *chance.sample(sorted(TOPICS), chance.randint(0, MOST_TOPICS))]:
        if name not in (STREAMS if case.sft else EXAMPLES):
            case = _with(case, TOPICS[name](chance, case)) or case
    return _spoiled(chance, case) if chance.random() < WRONG else case


def _with(case: Case, more: Options) -> Case | None:
    """Return the case with ``more`` options; None if the trainer then refuses it. A case that
    raises any other error is kept, since it shows a fault."""
    world_size = more.pop(WORLD_SIZE, case.world_size)
    # An empty list means the same as leaving the option out.
    options = {name: value for name, value in {**case.options, **more}.items() if value != ()}
    added = replace(case, options=options, world_size=world_size)
    try:
        return None if refusal(added) else added
    except Exception:
        return added


def _spoiled(chance: random.Random, case: Case) -> Case:
    """Return the case with a wrong value of one of three drawn options: the first refused one."""
    known = options_of(SECTIONS if case.sft else PRETRAIN)
    for name in chance.sample(sorted(known.keys() - LEFT_OUT), 3):
        spoiled = replace(case, options={**case.options, name: _wrong(chance, known[name].kind)})
        if _with(spoiled, {}) is None:
            return spoiled
    return case


def _wrong(chance: random.Random, kind: Any) -> object:
    """Draw a value that is wrong for most options of a kind."""
    numbers = (-1, 0, 3, 97)
    if kind in (int, int | None):
        return chance.choice(numbers)
    if kind is float:
        return chance.choice((-1.0, 0.0, 1.5, 1e30))
    if get_origin(kind) is tuple:
        return tuple(chance.choices(numbers, k=chance.randint(0, 3)))
    return chance.choice((*numbers, "none of these"))


def _model(chance: random.Random) -> Options:
    """Draw the family, and sizes for the 4 heads of a layout."""
    family = chance.choice(tuple(FAMILIES))
    intermediate = chance.choice((64, 88, 160))
    return {
        "model_type": family,
        **_experts(chance, family, intermediate),
        "num_attention_heads": 4,
        "head_dim": chance.choice((8, 12, 16, 24)),
        "hidden_size": chance.choice((32, 48, 64)),
        "intermediate_size": intermediate,
        "vocab_size": chance.choice((260, 300, 384, 511, 600)),
        "seq_length": chance.choice((16, 32, 48)),
    }


def _experts(chance: random.Random, family: str, intermediate: int) -> Options:
    """Draw experts, and blocks without them where a family has such; of a dense family nothing."""
    spelling = FAMILIES[family].experts
    if spelling is None:
        widths = ("moe_intermediate_size", "moe_shared_expert_intermediate_size")
        counts = ("num_experts", "num_experts_per_tok")
        none = dict.fromkeys((*counts, *widths), 0)
        sparse = {"decoder_sparse_step": 1, "mlp_only_layers": ()}
        return {**none, **_chunks(chance, False), **sparse, **_router_losses("none", 0.0)}
    experts = chance.choice((2, 3, 6))
    has_dense = "moe_intermediate_size" not in FAMILIES[family].derived
    has_chunks = "attention_chunk_size" in spelling.names
    width = chance.choice((24, 40)) if has_dense else intermediate
    kind = chance.choice(("none", "none", "seq_aux_loss", "global_aux_loss", "hf_aux_loss"))
    z_loss = chance.choice((0.0, 0.0, 0.01))
    return {
        **_chunks(chance, has_chunks),
        "num_experts": experts,
        "num_experts_per_tok": chance.randint(1, experts),
        "moe_intermediate_size": width,
        "moe_shared_expert_intermediate_size": width if has_chunks else 0,
        "decoder_sparse_step": chance.choice((1, 1, 2)) if has_dense else 1,
        "mlp_only_layers": chance.choice(((), (0,), (1,))) if has_dense else (),
        **(_router_losses("none", 0.0) if has_chunks else _router_losses(kind, z_loss)),
    }


def _router_losses(kind: str, z_loss: float) -> Options:
    coefficient = 0.0 if kind == "none" else 0.1
    balance = {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": coefficient}
    return {**balance, "moe_z_loss_coeff": z_loss}


def _chunks(chance: random.Random, has_chunks: bool) -> Options:
    """Draw what only LLaMA 4 has, if the family is that one."""
    return {
        "attention_chunk_size": chance.choice((3, 7, 64)) if has_chunks else 0,
        "attn_temperature_tuning": has_chunks and chance.random() < 0.5,
        "floor_scale": chance.choice((2, 5)) if has_chunks else 8192,
        "attn_scale": 0.5 if has_chunks else 0.1,
        "moe_router_score_function": "sigmoid" if has_chunks else "softmax",
        "moe_apply_probs_on_input": has_chunks,
    }


VALUES: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        name: option.rules.draws
        for name, option in options_of(SECTIONS).items()
        if option.rules.draws
    }
)
"""Options that are drawn one by one, and their values."""
STREAMS = frozenset(("data_path", "megatron_data_order", *DOCUMENTS))
"""Options and topics of token streams, which ``sft`` does not read."""


def _heads(chance: random.Random, case: Case) -> Options:
    heads = 8
    return {"num_attention_heads": heads, "num_key_value_heads": chance.choice((1, 2, 4, 8))}


def _three(chance: random.Random, case: Case) -> Options:
    """Draw an axis of 3, and perhaps an axis of 2: sizes that are no power of two."""
    three, second = chance.sample(sorted(axis_sizes(case)), 2)
    sizes = dict.fromkeys(axis_sizes(case), 1) | {three: 3, second: chance.choice((1, 2, 2))}
    micro = chance.choice((1, 2))
    return {
        **{AXES[axis]: sizes[axis] for axis in AXES},
        WORLD_SIZE: math.prod(sizes.values()),
        "num_attention_heads": 6,
        "hidden_size": 48,
        "num_key_value_heads": chance.choice((1, 2, 3, 6)),
        "intermediate_size": 96,
        "seq_length": 72 if case.sft else 36,
        "micro_batch_size": micro,
        "global_batch_size": micro * sizes["dp"] * chance.choice((1, 2, 3)),
        "data_parallel_shard_size": 0,
        **_blocks(chance, {**case.options, AXES["pp"]: sizes["pp"]}),
    }


def _blocks(chance: random.Random, options: Mapping[str, Any], ends: int = 0) -> Options:
    """Return equal shares of blocks for a pipeline, with embedding and head as ``ends`` blocks."""
    stages = _stage_count(options)
    return {"num_hidden_layers": 2 * stages - ends, "pipeline_layer_split": ()}


def _ends(chance: random.Random, case: Case) -> Options:
    """Draw whether the embedding, the head or both count as blocks of their stages."""
    embedding, loss = chance.choice(((True, False), (False, True), (True, True)))
    return {
        "account_for_embedding_in_pipeline_split": embedding,
        "account_for_loss_in_pipeline_split": loss,
        **_blocks(chance, case.options, embedding + loss),
    }


def _buffers(chance: random.Random, case: Case) -> Options:
    """Draw an option that is decided by the available memory."""
    slots = {"param_slots": "auto", "data_parallel_sharding_strategy": "optim_grads_params"}
    return chance.choice(({"data_parallel_sharding_strategy": "auto"}, slots))


def _rope(chance: random.Random, case: Case) -> Options:
    """Draw a rotary scaling whose numbers change frequencies and positions of a short text."""
    head_dim = int(str(case.options["head_dim"]))
    partial = float(str(case.options.get("partial_rotary_factor", 1.0)))
    pairs = int(head_dim * partial) // 2
    numbers: Mapping[str, object] = {
        "factor": chance.choice((2.0, 8.0)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        ORIGINAL: chance.choice((8, 20, 64)),
        "attention_factor": 1.3,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
        "truncate": False,
        "finetuned": True,
        "short_factor": [1.0 + 0.1 * pair for pair in range(pairs)],
        "long_factor": [2.0 + 0.7 * pair for pair in range(pairs)],
    }
    kind = chance.choice([kind for kind in ROPE_FIELDS if kind != "default"])
    known = ROPE_FIELDS[kind]
    chosen = [*known.needed, *(name for name in known.optional if chance.random() < 0.3)]
    return {"rope_scaling": {"rope_type": kind, **{name: numbers[name] for name in chosen}}}


def _windows(chance: random.Random, case: Case) -> Options:
    """Draw a window that is shorter than the samples, in all layers or in some."""
    layers = int(str(case.options["num_hidden_layers"]))
    types = chance.choices((FULL, SLIDING), k=layers) if chance.random() < 0.6 else ()
    return {"sliding_window": chance.choice((2, 5, 11)), "layer_types": tuple(types)}


def _batches(chance: random.Random, case: Case) -> Options:
    """Draw another number of samples in a step, which may grow."""
    dp = axis_sizes(case)["dp"]
    micro = chance.choice((1, 2, 3))
    microbatches = chance.choice((2, 3, 4, 5))
    full = micro * dp * microbatches
    options: Options = {"micro_batch_size": micro, "global_batch_size": full}
    if chance.random() < 0.5:
        start = micro * dp * chance.randint(1, microbatches)
        options["rampup_batch_size"] = (start, micro * dp, chance.choice((1, 2, 3)) * full)
    return options


def _half(chance: random.Random, case: Case) -> Options:
    """Draw options of float16. At the highest scale the first steps overflow and are skipped."""
    return {
        "fp16": True,
        "initial_loss_scale": chance.choice((1024.0, 65536.0, 2.0**32)),
        "min_loss_scale": chance.choice((1.0, 16.0)),
        "loss_scale_window": chance.choice((1, 2, 1000)),
        "hysteresis": chance.choice((1, 2)),
    }


def _fp8(chance: random.Random, case: Case) -> Options:
    """Draw a recipe of FP8, with widths that it can multiply on every rank."""
    options: Options = {"bf16": True, "fp8_bf16_layers": chance.choice((0, 1))}
    tp = axis_sizes(case)["tp"]
    if chance.random() < 0.5:
        sizes = {"hidden_size": SIDE * chance.choice((1, 2)), "intermediate_size": SIDE * tp}
        sizes |= _expert_widths(case, SIDE, sizes["intermediate_size"])
        # Codes of tiles are not gathered.
        return {**options, "fp8": BLOCKWISE, "fp8_gather": False, "head_dim": SIDE, **sizes}
    gathers = tp > 1 and chance.random() < 0.5
    intermediate = MULTIPLE * tp * chance.choice((2, 5))
    return {
        **options,
        **_expert_widths(case, MULTIPLE * chance.choice((1, 3)), intermediate),
        "fp8": TENSORWISE,
        "fp8_gather": gathers,
        "sequence_parallel": gathers or bool(case.options.get("sequence_parallel")),
        # Pieces have no scale.
        "tp_comm_overlap": "0",
        "head_dim": MULTIPLE,
        "hidden_size": MULTIPLE * chance.choice((2, 3, 4)),
        "intermediate_size": intermediate,
    }


def _expert_widths(case: Case, width: int, intermediate: int) -> dict[str, int]:
    """Return widths of experts for those that a case has, where the family does not take the
    intermediate size."""
    if not case.options.get("num_experts"):
        return {}
    family = FAMILIES[str(case.options["model_type"])]
    width = intermediate if "moe_intermediate_size" in family.derived else width
    shared = width * bool(case.options.get("moe_shared_expert_intermediate_size"))
    return {"moe_intermediate_size": width, "moe_shared_expert_intermediate_size": shared}


def _spikes(chance: random.Random, case: Case) -> Options:
    return {
        "on_bad_step": chance.choice(("skip", "rollback")),
        "loss_spike_factor": chance.choice((1.01, 1.5, 3.0)),
        "loss_spike_window": chance.choice((1, 2, 3)),
        "max_bad_steps": chance.choice((5, 10)),
    }


def _evaluation(chance: random.Random, case: Case) -> Options:
    return {
        "eval_interval": chance.choice((1, 2, 4)),
        "eval_iters": chance.choice((0, 1, 2)),
        "split": chance.choice(("80,20,0", "50,30,20")),
    }


def _schedule(chance: random.Random, case: Case) -> Options:
    """Draw the schedule of the learning rate, in iterations, in samples or as a share."""
    style = chance.choice(("constant", "linear", "cosine", "WSD"))
    options: Options = {"lr_decay_style": style}
    if style == "WSD":
        options["lr_wsd_decay_style"] = chance.choice(
            ("exponential", "linear", "cosine", "minus_sqrt")
        )
    unit, per_step = chance.choice((("iters", 1), ("samples", options_batch(case))))
    if unit == "samples":
        options["train_samples"] = 2 * STEPS * per_step
    whole = chance.choice((4, STEPS, 2 * STEPS))
    options[f"lr_decay_{unit}"] = whole * per_step
    if chance.random() < 0.5:
        options[f"lr_warmup_{unit}"] = chance.choice((1, 2)) * per_step
    else:
        options["lr_warmup_fraction"] = chance.choice((0.2, 0.5))
    if style == "WSD":
        options[f"lr_wsd_decay_{unit}"] = chance.choice((1, 2)) * per_step
    return options


def options_batch(case: Case) -> int:
    """Return the number of samples of a step."""
    return int(str(case.options["global_batch_size"]))


def _length(chance: random.Random, case: Case) -> Options:
    """Draw the length of a run in samples or in passes over them."""
    samples = {"train_samples": options_batch(case) * chance.choice((STEPS, 2 * STEPS)) + 1}
    return chance.choice((samples, {"epochs": chance.choice((0.5, 2.0, 20.0))}))


def _freeze(chance: random.Random, case: Case) -> Options:
    patterns = ("model.embed_tokens.*", "*.layers.0.*", "*.mlp.*", "*.self_attn.*", "*norm*")
    return {"freeze": tuple(chance.sample((*patterns, "lm_head.*"), chance.randint(1, 3)))}


def _offload(chance: random.Random, case: Case) -> Options:
    return {
        "optimizer_offload": "exact",
        "optimizer_offload_fraction": chance.choice((1.0, 0.5, 0.0)),
        "offload_speculative": chance.random() < 0.5,
        "speculation_bytes": chance.choice((0, 20_000, 4_294_967_296)),
    }


def _zenflow(chance: random.Random, case: Case) -> Options:
    return {
        "optimizer_offload": "zenflow",
        "optimizer_offload_fraction": chance.choice((1.0, 0.5)),
        "zenflow_topk_ratio": chance.choice((0.1, 0.5, 1.0)),
        "zenflow_select_strategy": chance.choice(("auto", "step", "epoch")),
        "zenflow_select_interval": chance.choice(("auto", "1", "4")),
        "zenflow_update_interval": chance.choice(("auto", "1", "2", "4")),
        "zenflow_update_interval_cap": chance.choice((2, 16)),
        "zenflow_full_warm_up_rounds": chance.choice((0, 2)),
        "zenflow_overlap_step": chance.random() < 0.5,
    }


def _lora(chance: random.Random, case: Case) -> Options:
    targets = chance.sample(PROJECTIONS, chance.randint(1, len(PROJECTIONS)))
    return {
        "lora_rank": chance.choice((1, 2, 5)),
        "lora_alpha": chance.choice((4.0, 16.0)),
        "lora_dropout": chance.choice((0.0, 0.0, 0.0, 0.1)),
        "lora_target_modules": PROJECTIONS if chance.random() < 0.5 else tuple(targets),
    }


def _blend(chance: random.Random, case: Case) -> Options:
    """Draw several datasets, which are written when the case is run."""
    return {
        "data_path": chance.choice((("a", "b"), ("0.7", "a", "0.3", "b"), ("2", "a", "1", "b")))
    }


def _repairs(chance: random.Random, case: Case) -> Options:
    known = get_args(Repair)
    return {"repair_conversations": tuple(chance.sample(known, chance.randint(1, len(known))))}


def _single(name: str) -> Topic:
    return lambda chance, case: {name: chance.choice(VALUES[name])}


TOPICS: Mapping[str, Topic] = MappingProxyType(
    {name: _single(name) for name in VALUES}
    | {
        "heads": _heads,
        "ends as blocks": _ends,
        "buffers by memory": _buffers,
        "rotary scaling": _rope,
        "windows": _windows,
        "batches": _batches,
        "fp16": _half,
        "fp8": _fp8,
        "spikes": _spikes,
        "evaluation": _evaluation,
        "learning rate": _schedule,
        "length": _length,
        "freeze": _freeze,
        "offload": _offload,
        "zenflow": _zenflow,
        "lora": _lora,
        "data_path": _blend,
        "repair_conversations": _repairs,
    }
)
"""Topics that are drawn independently in addition to layout and family."""
