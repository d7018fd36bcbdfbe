"""Checks of ``--param-group``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from megatron_llama.config.schema import Config, ModelConfig
from megatron_llama.engine.plan.specs import ParamSpec
from megatron_llama.errors import describe
from megatron_llama.model.plan.lora import is_adapter
from megatron_llama.model.plan.param_groups import (
    FLAG,
    INIT_STD,
    Malformed,
    ParamGroup,
    conflict,
    merged,
    read_group,
    with_values,
)
from megatron_llama.model.plan.params import has_tied_head
from megatron_llama.train.setup.checks.whole_units import whole_units


def param_group_problems(config: Config) -> Iterator[str]:
    """Yield groups that cannot be read, match nothing that is trained, contradict each other, or
    cut what some layout stores as one weight (q, k and v; gate and up)."""
    groups = []
    for text in config.optimizer.param_group:
        try:
            groups.append(read_group(text))
        except Malformed as problem:
            yield str(problem)
    specs = [spec for unit in whole_units(config) for spec in unit.params]
    if not groups or not specs:
        return
    for group in groups:
        yield from _match_problems(group, specs, config.model)
    names = [piece.name for spec in specs for piece in spec.slices]
    for first, second, key in dict.fromkeys(
        clash for name in names if (clash := _conflict_of(groups, name)) is not None
    ):
        name = next(name for name in names if _conflict_of(groups, name) == (first, second, key))
        yield describe(
            FLAG,
            got=f"two values of {key} for {name}: {first} and {second}",
            expected="one",
            do="narrow one of the patterns",
        )
    for spec in specs:
        values = {str(merged(groups, piece.name)): piece.name for piece in spec.slices}
        if len(values) > 1:
            yield describe(
                FLAG,
                got=f"other values for {' than for '.join(values.values())}",
                expected="the same for what is stored as one weight",
                do="give a pattern that has all of them or none",
            )
            break  # the other layers have the same problem
    for text, name in {str(merged(groups, name)): name for name in reversed(names)}.items():
        options = with_values(config.optimizer, merged(groups, name))
        if text != "{}" and options.min_lr > options.lr:
            yield describe(
                FLAG,
                got=f"min_lr {options.min_lr:g} for {name}",
                expected=f"at most its lr {options.lr:g}",
                do="lower min_lr or raise lr",
            )


def _conflict_of(groups: Sequence[ParamGroup], name: str) -> tuple[str, str, str] | None:
    clash = conflict(groups, name)
    return None if clash is None else (clash[0].text, clash[1].text, clash[2])


def _match_problems(
    group: ParamGroup, specs: Sequence[ParamSpec], model: ModelConfig
) -> Iterator[str]:
    matched = [
        (piece.name, spec) for spec in specs for piece in spec.slices if group.matches(piece.name)
    ]
    if not matched:
        names = [piece.name for spec in specs for piece in spec.slices if spec.trainable]
        near = get_close_matches(group.pattern, names, 1)
        if has_tied_head(model) and group.matches("lm_head.weight"):
            near = ["model.embed_tokens.weight"]  # the head is the embedding
        do = f"did you mean {near[0]}?" if near else f"some are {_examples(names)}"
        yield describe(
            FLAG, got=group.pattern, expected="a pattern of the model's parameters", do=do
        )
    elif not any(spec.trainable for _, spec in matched):
        yield describe(
            FLAG,
            got=f"{group.pattern}, whose parameters are all frozen",
            expected="some that are trained",
            do="leave it out, or freeze less",
        )
    elif INIT_STD in group.values and all(
        len(spec.shape) < 2 or is_adapter(name) for name, spec in matched
    ):
        yield describe(
            FLAG,
            got=f"{INIT_STD} for {matched[0][0]}, which is not drawn",
            expected="matrices",
            do=f"leave {INIT_STD} out",
        )


def _examples(names: Sequence[str]) -> str:
    """Return the names of one block, and of the parameters before and behind the blocks."""
    return ", ".join(name for name in names if ".layers." not in name or ".layers.0." in name)
