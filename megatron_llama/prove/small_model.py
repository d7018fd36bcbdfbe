"""Sizes of a small model with the structure of a large one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from math import gcd
from types import MappingProxyType
from typing import Any

from megatron_llama.config.schema import Config, LoraConfig, ModelConfig
from megatron_llama.model.plan.experts import is_sparse
from megatron_llama.model.plan.freeze import is_frozen
from megatron_llama.model.plan.params import hf_shapes, parameter_count
from megatron_llama.model.rope import LISTS, ORIGINAL, reads_max_positions
from megatron_llama.model.windows import chunk_of, window_of

HEAD_DIM = 16
"""Usual head dimension: half with many heads, more if no pair of dims would be rotated."""
WIDEST = 128
"""Largest width of all heads together."""
MOST_RANK = 8
"""Largest rank of low-rank additions."""
VOCABULARY = 300
"""Rows of a small embedding: every byte and some more tokens. It is no multiple of PADDING."""
PADDING = 8
"""Multiple of a small vocabulary, for each tensor-parallel rank."""
MOST_EXPERTS = 6
LARGEST_VOCABULARY = 1024
LARGEST: Mapping[str, int] = MappingProxyType(
    {
        "hidden_size": 192,
        "intermediate_size": 768,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "head_dim": 64,
    }
)
"""Bounds of a model that stays as it is, in addition to ``MOST_WORK``."""
MOST_WORK = 1_000_000_000
"""Most parameters of all blocks, of experts those that a token meets, times tokens of a step."""


def is_small(yours: Config) -> bool:
    """Whether a resolved configuration can be run here as it is, except for its vocabulary."""
    model = yours.model
    training = yours.training
    # A token meets some of the experts only.
    active = min(model.num_experts, model.num_experts_per_tok)
    blocks = parameter_count(replace(model, vocab_size=1, num_experts=active))
    tokens = training.global_batch_size * training.seq_length
    return (
        all(getattr(model, name) <= most for name, most in LARGEST.items())
        and training.seq_length <= 128
        and blocks * tokens <= MOST_WORK
    )


def small_vocabulary(model: ModelConfig, tp_yours: int, tp_here: int) -> dict[str, Any]:
    """Return options of a smaller vocabulary, which is padded if that of ``model`` is. The last
    rank has rows that are no padding."""
    if model.vocab_size <= LARGEST_VOCABULARY and tp_here == tp_yours:
        return {}
    padded = model.vocab_size % (model.make_vocab_size_divisible_by * tp_yours) != 0
    unit = PADDING * tp_here
    return {
        "vocab_size": VOCABULARY if padded else -(-VOCABULARY // unit) * unit,
        "make_vocab_size_divisible_by": PADDING,
    }


def small_heads(
    model: ModelConfig, tp_yours: int, tp_here: int, exchanging: int, *, tile: int = 1
) -> dict[str, Any]:
    """Return options of few narrow heads for a resolved ``model``, and the widths that follow. The
    query heads of a rank are divided among ``exchanging`` context-parallel ranks. ``tile``: what
    the widths of a rank's matrices are multiples of.

    Key/value heads remain fewer than the tensor-parallel ranks, as many, or more. The query heads
    of each key/value head, and of each rank, remain one or several."""
    heads = model.num_attention_heads
    groups = model.num_key_value_heads
    if groups == 1 or tp_yours == tp_here == 1 == heads:
        small_groups = 1
    elif groups < tp_yours and tp_here > 1:
        copies = tp_yours // groups
        small_groups = max(1, tp_here // copies) if tp_here % copies == 0 else 1
    elif groups == tp_yours and tp_here > 1:
        small_groups = tp_here
    else:
        small_groups = 2 * tp_here
    per_rank = min(2, heads // tp_yours)
    per_group = min(2, heads // groups)
    small = max(small_groups * per_group, tp_here * per_rank)
    small *= max(1, exchanging) // gcd(max(1, exchanging), small // tp_here)
    head_dim = HEAD_DIM if small * HEAD_DIM <= WIDEST else HEAD_DIM // 2
    if tile > 1:
        head_dim = tile if small_groups <= tp_here else tile // 2
    while not _rotates(model.partial_rotary_factor, head_dim, model.head_dim):
        head_dim *= 2
    wide = small * head_dim
    yours = heads * model.head_dim
    # If all heads together are not as wide as hidden_size, projections are no squares.
    hidden = wide
    if model.hidden_size != yours:
        hidden = wide * 5 // 4 if model.hidden_size > yours else wide * 3 // 4
        hidden = -(-hidden // tile) * tile
    unit = max(8, tile) * tp_here
    ratio = model.intermediate_size / model.hidden_size
    intermediate = max(1, round(min(ratio, 4.0) * hidden / unit)) * unit
    values: dict[str, Any] = {
        "num_attention_heads": small,
        "num_key_value_heads": small_groups,
        "head_dim": head_dim,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
    }
    if model.query_pre_attn_scalar:
        share = model.query_pre_attn_scalar / model.head_dim
        values["query_pre_attn_scalar"] = float(max(1, round(share * head_dim)))
    if abs(model.embedding_multiplier - model.hidden_size**0.5) < 1e-6:
        values["embedding_multiplier"] = hidden**0.5
    return values


def _rotates(factor: float, head_dim: int, yours: int) -> bool:
    """Whether the rotated dims of a narrower head are pairs, and some or all, as of ``yours``."""
    rotated = int(head_dim * factor)
    return (
        rotated > 0 and rotated % 2 == 0 and (rotated == head_dim) == (int(yours * factor) == yours)
    )


def small_experts(
    model: ModelConfig, blocks: Sequence[int], hidden: int, ep: int, *, tile: int
) -> dict[str, Any]:
    """Return options of few narrow experts, and the dense blocks among ``blocks`` of yours. A token
    has one or several, some or all of them, as yours. ``hidden``: the small hidden_size; ``ep``:
    ranks that divide the experts; ``tile``: the width of an expert is a multiple of it."""
    if not model.num_experts:
        return {}
    experts = -(-min(model.num_experts, MOST_EXPERTS) // ep) * ep
    chosen = min(model.num_experts_per_tok, experts // 2)
    if model.num_experts_per_tok == model.num_experts:
        chosen = experts

    def narrow(width: int) -> int:
        return max(1, round(min(4.0, width / model.hidden_size) * hidden / tile)) * tile

    shared = model.moe_shared_expert_intermediate_size
    return {
        "num_experts": experts,
        "num_experts_per_tok": max(1, chosen),
        "moe_intermediate_size": narrow(model.moe_intermediate_size),
        "moe_shared_expert_intermediate_size": narrow(shared) if shared else 0,
        "decoder_sparse_step": 1,
        "mlp_only_layers": tuple(
            number for number, block in enumerate(blocks) if not is_sparse(model, block)
        ),
    }


def small_positions(
    model: ModelConfig, yours: int, here: int, *, cp: tuple[int, int], head_dim: int
) -> dict[str, Any]:
    """Return the window, longest sequence and rotary scaling of a resolved ``model`` for sequences
    of ``here`` tokens instead of ``yours``, each with the same effect as on yours. ``cp`` are the
    ranks of (yours, here) between which keys and values travel."""
    values: dict[str, Any] = {
        "max_position_embeddings": _like(model.max_position_embeddings, yours, here)
    }
    if model.sliding_window:
        values["sliding_window"] = small_window(model.sliding_window, yours, here, *cp)
    if model.attention_chunk_size:
        for name in ("attention_chunk_size", "floor_scale"):
            size = getattr(model, name)
            # Two positions at least: a chunk of one has nothing to attend to.
            short = min(max(2, round(size * here / yours)), here - 1)
            values[name] = 2 * here if size > yours else here if size == yours else short
    scaling = model.rope_scaling
    if scaling is None:
        return values
    small = dict(scaling)
    if ORIGINAL in scaling:
        small[ORIGINAL] = _like(scaling[ORIGINAL], yours, here)
        if reads_max_positions(scaling):
            ratio = model.max_position_embeddings / scaling[ORIGINAL]
            values["max_position_embeddings"] = round(ratio * small[ORIGINAL])
    pairs = int(head_dim * model.partial_rotary_factor) // 2
    for name in LISTS:
        if name in scaling:
            small[name] = [scaling[name][index] for index in _spread(len(scaling[name]), pairs)]
    return {**values, "rope_scaling": small}


def small_window(window: int, yours: int, here: int, cp_yours: int, cp_here: int) -> int:
    """Return a window for sequences of ``here`` tokens instead of ``yours``: as long as they are,
    or shorter. Under context parallelism it ends in the same chunk, counted back from a token's own
    chunk. If it leaves out only few chunks, they are counted from the furthest. Both hold as far as
    there are enough chunks."""
    if window >= yours:
        return here
    if cp_yours == 1 or cp_here == 1:
        return min(max(min(3, window), round(window * here / yours)), here - 1)
    chunk = yours // (2 * cp_yours)
    small_chunk = here // (2 * cp_here)
    reach = chunks_reached(window, yours, cp_yours)
    furthest = 2 * cp_yours - 1
    reach_here = min(reach, 2 * cp_here - 2)
    if reach >= furthest:
        reach_here = 2 * cp_here - 1 + reach - furthest
    depth = window - 1 - (reach - 1) * chunk
    whole = depth == chunk
    small_depth = min(max(1, round(depth * small_chunk / chunk)), small_chunk - (not whole))
    return min(max(1, 1 + (reach_here - 1) * small_chunk + small_depth), here - 1)


def chunks_reached(window: int, length: int, cp: int) -> int:
    """Return the chunks before its own that a window of a chunk's first token reaches, with ``cp``
    context-parallel ranks. A window beyond the first chunk counts as one more chunk."""
    return -(-(window - 1) // (length // (2 * cp)))


def _like(length: int, yours: int, here: int) -> int:
    """Return a length shorter than ``here``, equal or longer, as ``length`` is to ``yours``."""
    return here // 2 if length < yours else here if length == yours else 2 * here


def _spread(count: int, picks: int) -> list[int]:
    """Return ``picks`` of ``count`` places at equal distances, from the first to the last."""
    return [round(pick * (count - 1) / max(1, picks - 1)) for pick in range(picks)]


def blocks_here(yours: Config, count: int) -> list[int]:
    """Return the indices of your blocks for which the ``count`` blocks of a small model stand: the
    first, the last, and between them all kinds, as far as ``count`` allows."""
    kinds = kinds_of_blocks(yours)
    picks = _spread(len(kinds), count)
    for kind in dict.fromkeys(kinds):
        present = [kinds[pick] for pick in picks]
        if kind in present:
            continue
        spare = [place for place, own in enumerate(present) if present.count(own) > 1]
        if spare:
            # The middle one of the spare places is no end, if possible.
            picks[spare[len(spare) // 2]] = kinds.index(kind)
            picks.sort()
    return picks


def kinds_of_blocks(config: Config) -> list[tuple[bool, bool, frozenset[str]]]:
    """Return the kind of each block: whether it has a window or chunks, whether it has experts, and
    its frozen parameters."""
    model = config.model
    return [
        (
            (window_of(model, layer) or chunk_of(model, layer)) > 0,
            is_sparse(model, layer),
            _frozen_in(model, layer, config.optimizer.freeze),
        )
        for layer in range(model.num_hidden_layers)
    ]


def _frozen_in(model: ModelConfig, layer: int, patterns: Sequence[str]) -> frozenset[str]:
    """Return the frozen parameters of a block, by their names after the block's number."""
    if not patterns:
        return frozenset()
    prefix = f"model.layers.{layer}."
    single = replace(model, num_hidden_layers=1, layer_types=(), decoder_sparse_step=1)
    single = replace(single, mlp_only_layers=() if is_sparse(model, layer) else (0,))
    names = (
        name.removeprefix("model.layers.0.") for name in hf_shapes(single) if ".layers.0." in name
    )
    return frozenset(name for name in names if is_frozen(prefix + name, patterns))


def small_freeze(yours: Config, here: ModelConfig, blocks: Sequence[int]) -> tuple[str, ...]:
    """Return the patterns of --freeze for a small model whose blocks stand for ``blocks`` of yours:
    the same patterns if they have the same meaning, else the names of the frozen parameters."""
    patterns = yours.optimizer.freeze
    names = list(hf_shapes(here))
    frozen = [name for name in names if is_frozen(_yours(name, blocks), patterns)]
    same = [name for name in names if is_frozen(name, patterns)] == frozen
    if same and all(any(fnmatchcase(name, pattern) for name in names) for pattern in patterns):
        return patterns
    return tuple(frozen)


def _yours(name: str, blocks: Sequence[int]) -> str:
    """Return a parameter's name in your model."""
    words = name.split(".")
    if words[1] == "layers":
        words[2] = str(blocks[int(words[2])])
    return ".".join(words)


def small_lora(lora: LoraConfig) -> dict[str, Any]:
    """Return a smaller rank, with alpha in proportion to it."""
    rank = min(lora.lora_rank, MOST_RANK)
    alpha = lora.lora_alpha * rank / lora.lora_rank if lora.lora_rank else lora.lora_alpha
    return {"lora_rank": rank, "lora_alpha": alpha}
