"""Locates where a run begins to differ from its twin: the first step, its first tensor, and the
axes without which the run does not differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_llama.engine.plan.buckets import NO_SHARD
from megatron_llama.prove.case import Case
from megatron_llama.prove.compare import Row

ORDER_OF_KINDS = (
    "the run",
    *("ranks alike", "batch size", "samples", "order", "examples", "labels", "loss mask"),
    *("samples that count", "positions", "documents", "read once", "blend", "learning rate"),
    *("loss", "gradient"),
    *(
        "gradient's size",
        "whole gradient",
        "gradient norm",
        "second moment",
        "update",
        "unchanged weight",
        "validation loss",
    ),
)
"""Kinds of rows in the order in which they depend on each other within a step: a different loss
makes gradients differ, and these the norm. Kinds that are not listed come last."""
BACKWARD = (
    *("lm_head", "model.norm.", "post_feedforward_layernorm", "mlp.down_proj", "mlp.gate_up_proj"),
    *("mlp.up_proj", "mlp.gate_proj", "pre_feedforward_layernorm", "post_attention_layernorm"),
    *("self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "self_attn.qkv_proj"),
    *("self_attn.v_proj", "self_attn.k_proj", "self_attn.q_proj", "input_layernorm"),
)
"""Parts of tensors' names in the order of a backward pass within a layer."""

SWITCHES: tuple[tuple[str, str, object], ...] = (
    ("recomputation", "recompute_granularity", "none"),
    ("reductions in bf16", "grad_reduce_in_bf16", False),
    ("gathers of codes", "fp8_gather", False),
    ("FP8", "fp8", "none"),
    ("bf16", "bf16", False),
    ("fp16", "fp16", False),
    ("packing", "packing", False),
    ("offload", "optimizer_offload", "none"),
    ("LoRA", "lora_rank", 0),
    ("frozen weights", "freeze", ()),
    ("tied embeddings", "tie_word_embeddings", False),
    ("the padding token", "pad_token_id", None),
    ("the z-loss", "z_loss_weight", 0.0),
    ("the z-loss of routers", "moe_z_loss_coeff", 0.0),
    ("noise", "neftune_noise_alpha", 0.0),
)
"""Axes that are one option: name, option, and its value without the axis."""
DOCUMENTS = ("reset_attention_mask", "reset_position_ids", "eod_mask_loss")


@dataclass(frozen=True)
class Axis:
    """A feature of a case that was switched off."""

    name: str
    off: Mapping[str, object]
    """Options that switch it off."""
    holds: bool
    """Whether the check holds without it."""


@dataclass(frozen=True)
class Location:
    """The place at which a case begins to be wrong."""

    row: Row
    """First row that does not hold."""
    where: str
    """The same as a sentence."""
    axes: tuple[Axis, ...] = ()
    """Axes that were switched off, one at a time."""
    not_tried: tuple[str, ...] = ()
    """Names of axes for which no time was left."""
    needed: tuple[str, ...] = ()
    """Names of axes without which the case cannot be run or compared."""

    @property
    def named(self) -> tuple[str, ...]:
        """Names of axes without which the check holds."""
        return tuple(axis.name for axis in self.axes if axis.holds)


def first_wrong(rows: Sequence[Row]) -> Row | None:
    """Return the first row that does not hold, by step, then by ORDER_OF_KINDS, then by the
    tensor's distance from the loss. None if all hold."""
    wrong = [row for row in rows if not row.holds]
    return min(wrong, key=_precedence, default=None)


def _precedence(row: Row) -> tuple[float, int, tuple[int, int]]:
    step = row.step if row.step is not None else float("inf")
    kinds = len(ORDER_OF_KINDS)
    kind = ORDER_OF_KINDS.index(row.what) if row.what in ORDER_OF_KINDS else kinds
    if row.what == "the run":
        step = 0
    return step, kind, from_loss(row.tensor or "")


def from_loss(name: str) -> tuple[int, int]:
    """Return a key that sorts tensors in the order of a backward pass: first the head, then the
    last layer, ..., then the embedding."""
    words = name.split(".")
    if "layers" in words and words[words.index("layers") + 1].isdigit():
        layer = -int(words[words.index("layers") + 1])
    elif "embed_tokens" in words:
        layer = 1
    else:
        layer = -(10**6)
    usual = name.replace("feed_forward.", "mlp.")  # LLaMA 4's name of it
    parts = [index for index, name_part in enumerate(BACKWARD) if name_part in usual]
    return layer, min(parts, default=len(BACKWARD))


def sentence(row: Row) -> str:
    """Return a sentence that says what is wrong first."""
    at = "" if row.step is None else f" of step {row.step}"
    why = f": {row.note}" if row.note else ""
    if row.what == "the run":
        return f"the run does not come to what was asked for{why}"
    if row.what in ("loss", "validation loss"):
        return f"the {row.what}{at} differs: the forward pass, or what it reads{why}"
    if row.what == "gradient norm":
        return f"the gradient norm{at} differs, no gradient does{why}"
    of = f" of {row.tensor}" if row.tensor else ""
    nearest = ", the nearest to the loss of those that differ" if row.what == "gradient" else ""
    return f"{row.what}{of}{nearest}{at}{why}"


def axes_of(case: Case) -> Iterator[tuple[str, Case]]:
    """Yield each axis that can be switched off, with the case without it."""
    options = case.options

    def has(name: str, default: object) -> bool:
        return options.get(name, default) != default

    def size(name: str) -> int:
        value = options.get(name, 1)
        assert isinstance(value, int)
        return value

    def without(off: Mapping[str, object], shrunk: int = 1) -> Case:
        return replace(
            case,
            name=f"{case.name}, without {', '.join(off)}",
            # A list option takes at least one value, so an empty one is left out.
            options={name: value for name, value in {**options, **off}.items() if value != ()},
            world_size=case.world_size // shrunk,
        )

    tp, pp, cp = (
        size(f"{axis}_parallel_size") for axis in ("tensor_model", "pipeline_model", "context")
    )
    dp = case.world_size // (tp * pp * cp)
    whole_experts = {"expert_model_parallel_size": 1}
    one_chunk: dict[str, object] = {
        "virtual_pipeline_model_parallel_size": 1,
        "pipeline_layer_split": (),
        "pipeline_schedule": "1f1b",
    }
    slots: dict[str, object] = {"param_slots": "default", "grad_slots": 2, "prefetch_bytes": 0}
    if tp > 1 and options.get("tp_comm_overlap", "0") != "0":
        yield "tensor-parallel messages in pieces", without({"tp_comm_overlap": "0"})
    if tp > 1 and options.get("sequence_parallel"):
        yield "sequence parallelism", without({"sequence_parallel": False})
    if cp > 1:
        comm = options.get("cp_comm_type", "all_gather")
        gathered: dict[str, object] = {"cp_comm_type": "all_gather"}
        if has("hierarchical_context_parallel_sizes", ()):
            gathered["hierarchical_context_parallel_sizes"] = ()
        one: dict[str, object] = {"context_parallel_size": 1}
        yield "context parallelism", without(one | gathered if len(gathered) > 1 else one, cp)
        if comm != "all_gather":
            way = "ring of keys and values" if comm == "ring" else "exchange of heads"
            yield f"the {way}", without(gathered)
    if tp > 1:
        single = {"tensor_model_parallel_size": 1, "sequence_parallel": False}
        yield "tensor parallelism", without(single, tp)
    if pp > 1:
        if any(has(name, value) for name, value in one_chunk.items()):
            yield "the pipeline's schedule and split", without(one_chunk)
        yield "pipeline parallelism", without({"pipeline_model_parallel_size": 1, **one_chunk}, pp)
    micro = size("micro_batch_size")
    batch = size("global_batch_size") if options.get("global_batch_size") else micro * dp
    divides_experts = size("expert_model_parallel_size") > 1
    if divides_experts:
        if has("moe_token_dispatcher_type", "allgather"):
            yield "the exchange of tokens", without({"moe_token_dispatcher_type": "allgather"})
        yield "expert parallelism", without(whole_experts)
    if dp > 1:
        alone = {"global_batch_size": batch} | (whole_experts if divides_experts else {})
        yield "data parallelism", without(alone, dp)
    if dp * cp > 1 and options.get("data_parallel_shard_size"):
        yield "replicas of shards", without({"data_parallel_shard_size": 0})
    if any(has(name, value) for name, value in slots.items()):
        yield "slots and prefetching", without(slots)
    if dp * cp > 1 and options.get("data_parallel_sharding_strategy") != NO_SHARD:
        whole = {"data_parallel_sharding_strategy": NO_SHARD, "data_parallel_shard_size": 0}
        yield "sharding", without(whole | slots)
    if batch > micro * dp and not options.get("rampup_batch_size"):
        yield "microbatches", without({"micro_batch_size": batch // dp})
    for name, option, default in SWITCHES:
        if has(option, default):
            yield name, without({option: default})
    if has("moe_router_load_balancing_type", "none"):
        none = {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
        yield "the balance of experts", without(none)
    if any(options.get(name) for name in DOCUMENTS):
        yield "documents", without(dict.fromkeys(DOCUMENTS, False))


def locate(
    case: Case,
    rows: Sequence[Row],
    again: Callable[[Case], Sequence[Row] | None],
    *,
    time_left: Callable[[Case], bool],
) -> Location | None:
    """Return the place at which the rows of a check are wrong first. The check is run ``again``
    without each axis, if ``time_left`` for that case. ``again`` returns None for a case that cannot
    be run or compared. None if all rows hold."""
    first = first_wrong(rows)
    if first is None:
        return None
    tried: list[Axis] = []
    not_tried: list[str] = []
    needed: list[str] = []
    for name, simpler in axes_of(case):
        if not time_left(simpler):
            not_tried.append(name)
            continue
        rows_without = again(simpler)
        if rows_without is None:
            needed.append(name)
            continue
        off = {
            option: value
            for option, value in simpler.options.items()
            if case.options.get(option) != value
        }
        tried.append(Axis(name, off, all(row.holds for row in rows_without)))
    return Location(first, sentence(first), tuple(tried), tuple(not_tried), tuple(needed))
