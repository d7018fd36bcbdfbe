"""Says where a run begins to differ from its twin: the first step, in it the first tensor, and the
axes without which it does not."""

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
        "whole gradient",
        "gradient norm",
        "second moment",
        "update",
        "unchanged weight",
        "validation loss",
    ),
)
"""What of a step comes before what: a loss that differs makes the gradients differ, and these the
norm. Kinds that are not listed come last."""
BACKWARD = (
    *("lm_head", "model.norm.", "post_feedforward_layernorm", "mlp.down_proj", "mlp.gate_up_proj"),
    *("mlp.up_proj", "mlp.gate_proj", "pre_feedforward_layernorm", "post_attention_layernorm"),
    *("self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "self_attn.qkv_proj"),
    *("self_attn.v_proj", "self_attn.k_proj", "self_attn.q_proj", "input_layernorm"),
)
"""Parts of the names of tensors, in the order in which a backward pass comes to them within a
layer."""

SWITCHES: tuple[tuple[str, str, object], ...] = (
    ("recomputation", "recompute_granularity", "none"),
    ("reductions in bf16", "grad_reduce_in_bf16", False),
    ("bf16", "bf16", False),
    ("fp16", "fp16", False),
    ("packing", "packing", False),
    ("offload", "optimizer_offload", "none"),
    ("LoRA", "lora_rank", 0),
    ("frozen weights", "freeze", ()),
    ("tied embeddings", "tie_word_embeddings", False),
    ("the padding token", "pad_token_id", None),
    ("the z-loss", "z_loss_weight", 0.0),
    ("noise", "neftune_noise_alpha", 0.0),
)
"""Axes that are one option: name, option, and its value without the axis."""
DOCUMENTS = ("reset_attention_mask", "reset_position_ids", "eod_mask_loss")


@dataclass(frozen=True)
class Axis:
    """Something that a case has and that was switched off."""

    name: str
    off: Mapping[str, object]
    """The options without it."""
    holds: bool
    """Whether the check holds without it."""


@dataclass(frozen=True)
class Location:
    """Where a case begins to be wrong."""

    row: Row
    """The first number that is wrong."""
    where: str
    """The same as a sentence."""
    axes: tuple[Axis, ...] = ()
    """What was switched off, one at a time."""
    not_tried: tuple[str, ...] = ()
    """Names of axes for which no time was left."""
    needed: tuple[str, ...] = ()
    """Names of axes without which the case cannot be run, or not be compared."""

    @property
    def named(self) -> tuple[str, ...]:
        """The axes without which the check holds."""
        return tuple(axis.name for axis in self.axes if axis.holds)


def first_wrong(rows: Sequence[Row]) -> Row | None:
    """The first row that does not hold: by step, then by what comes first in a step, then the
    tensor that is nearest to the loss. None if all hold."""
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
    """Where a backward pass comes to a tensor: first the head, the last layer, ..., the
    embedding."""
    words = name.split(".")
    if "layers" in words and words[words.index("layers") + 1].isdigit():
        layer = -int(words[words.index("layers") + 1])
    elif "embed_tokens" in words:
        layer = 1
    else:
        layer = -(10**6)
    parts = [index for index, part in enumerate(BACKWARD) if part in name]
    return layer, min(parts, default=len(BACKWARD))


def sentence(row: Row) -> str:
    """Say what is wrong first."""
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
    """Everything that can be switched off, with the case that is left."""
    options = case.options

    def has(name: str, default: object) -> bool:
        return options.get(name, default) != default

    def size(name: str) -> int:
        found = options.get(name, 1)
        assert isinstance(found, int)
        return found

    def without(off: Mapping[str, object], shrunk: int = 1) -> Case:
        return replace(
            case,
            name=f"{case.name}, without {', '.join(off)}",
            # Options take one value at least: what has none is left out.
            options={name: value for name, value in {**options, **off}.items() if value != ()},
            world_size=case.world_size // shrunk,
        )

    tp, pp, cp = (
        size(f"{axis}_parallel_size") for axis in ("tensor_model", "pipeline_model", "context")
    )
    dp = case.world_size // (tp * pp * cp)
    one_chunk: dict[str, object] = {
        "virtual_pipeline_model_parallel_size": 1,
        "pipeline_layer_split": (),
        "pipeline_schedule": "1f1b",
    }
    slots: dict[str, object] = {"param_slots": "default", "grad_slots": 2, "prefetch_bytes": 0}
    if tp > 1 and options.get("sequence_parallel"):
        yield "sequence parallelism", without({"sequence_parallel": False})
    if cp > 1:
        yield "context parallelism", without({"context_parallel_size": 1}, cp)
        if has("cp_comm_type", "all_gather"):
            yield "the ring of keys and values", without({"cp_comm_type": "all_gather"})
    if tp > 1:
        single = {"tensor_model_parallel_size": 1, "sequence_parallel": False}
        yield "tensor parallelism", without(single, tp)
    if pp > 1:
        if any(has(name, value) for name, value in one_chunk.items()):
            yield "the pipeline's schedule and split", without(one_chunk)
        yield "pipeline parallelism", without({"pipeline_model_parallel_size": 1, **one_chunk}, pp)
    micro = size("micro_batch_size")
    batch = size("global_batch_size") if options.get("global_batch_size") else micro * dp
    if dp > 1:
        yield "data parallelism", without({"global_batch_size": batch}, dp)
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
    if any(options.get(name) for name in DOCUMENTS):
        yield "documents", without(dict.fromkeys(DOCUMENTS, False))


def locate(
    case: Case,
    rows: Sequence[Row],
    again: Callable[[Case], Sequence[Row] | None],
    *,
    time_left: Callable[[Case], bool],
) -> Location | None:
    """Say where rows of a check that does not hold are wrong first, and run the check ``again``
    without each axis, where there is ``time_left`` for that case. ``again`` returns None for a case
    that cannot be run or compared. None if all rows hold."""
    first = first_wrong(rows)
    if first is None:
        return None
    tried: list[Axis] = []
    not_tried: list[str] = []
    needed: list[str] = []
    for name, other in axes_of(case):
        if not time_left(other):
            not_tried.append(name)
            continue
        found = again(other)
        if found is None:
            needed.append(name)
            continue
        off = {
            option: value
            for option, value in other.options.items()
            if case.options.get(option) != value
        }
        tried.append(Axis(name, off, all(row.holds for row in found)))
    return Location(first, sentence(first), tuple(tried), tuple(not_tried), tuple(needed))
