"""Checks of ``--freeze``."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from shlex import join as quoted

from megatron_llama.config.schema import MODEL_SIZES, ModelConfig
from megatron_llama.errors import describe
from megatron_llama.model.plan.freeze import is_frozen
from megatron_llama.model.plan.params import has_tied_head, stage_units, whole_model


def freeze_problems(model: ModelConfig, patterns: tuple[str, ...]) -> Iterator[str]:
    """Yield patterns that match nothing, or everything, and weights that would be partly frozen.

    Weights that some layout stores as one (q, k and v; gate and up) are frozen as one in every
    layout: a checkpoint may be resumed in another layout."""
    sizes = [getattr(model, name) for name in (*MODEL_SIZES, "make_vocab_size_divisible_by")]
    if not patterns or min(sizes) <= 0:
        return
    units = stage_units(model, whole_model(model), 0)
    groups = [[piece.name for piece in spec.slices] for unit in units for spec in unit.params]
    names = [name for group in groups for name in group]
    for pattern in patterns:
        if not any(is_frozen(name, (pattern,)) for name in names):
            near = get_close_matches(pattern, names, 1)
            if has_tied_head(model) and is_frozen("lm_head.weight", (pattern,)):
                near = ["model.embed_tokens.weight"]  # the head is the embedding
            if "," in pattern:
                do = f"separate patterns by spaces: --freeze {quoted(pattern.split(','))}"
            elif near:
                do = f"did you mean {near[0]}?"
            else:
                do = f"give names as {names[-1]}, or parts of them as '*.mlp.*'"
            yield describe(
                "--freeze", got=pattern, expected="a pattern of the model's parameters", do=do
            )
    if all(is_frozen(name, patterns) for name in names):
        yield describe(
            "--freeze",
            got=f"all {len(names)} parameters",
            expected="one or more that are trained",
            do="leave out a pattern",
        )
    parted = [group for group in groups if len({is_frozen(name, patterns) for name in group}) == 2]
    missing = [name for group in parted for name in group if not is_frozen(name, patterns)]
    if missing:
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        yield describe(
            "--freeze",
            got=" ".join(patterns),
            expected=f"also {', '.join(missing[:4])}{more}, which are stored with them",
            do="freeze all or none of what is stored as one weight",
        )
