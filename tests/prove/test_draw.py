"""Drawn configurations: every option is drawn, a seed is always the same, floors hold, refusals are clear."""

import random
import re
from collections import Counter

import pytest
from megatron_llama.config.parse import options_of
from megatron_llama.errors import UserError
from megatron_llama.model.families import FAMILIES
from megatron_llama.prove import draw as module
from megatron_llama.prove.case import Case
from megatron_llama.prove.draw import (
    EACH_FAMILY,
    EACH_SCHEDULE,
    SCHEDULES,
    THREE_AXES,
    TOPICS,
    axis_sizes,
    configured,
    draw,
    refusal,
    with_floors,
)
from megatron_llama.prove.given import LEFT_OUT, SECTIONS

COUNT = 32


@pytest.fixture(scope="module")
def drawn() -> tuple[Case, ...]:
    return draw(1, COUNT)


def proposed(case: Case) -> set[str]:
    """Options that something of the draw can set."""
    chance = random.Random(1)
    names = set(case.options)
    for topic in TOPICS.values():
        for _ in range(60):
            names |= topic(chance, case).keys()
    return names


def test_every_option_is_drawn_or_cannot_change_what_is_computed() -> None:
    case = Case("", {**module.layout(random.Random(6))[0], **module._model(random.Random(1))}, 8)
    known = options_of(SECTIONS).keys()
    assert known - proposed(case) - LEFT_OUT == set(), "give the field draws=(...), or small=left_out(...)"
    assert proposed(case) <= known | {module.WORLD_SIZE}


@pytest.mark.long
def test_a_draw_depends_on_the_seed_alone(drawn: tuple[Case, ...]) -> None:
    assert draw(1, COUNT) == drawn
    assert draw(2, 2) == draw(2, 2) != draw(3, 2)


def test_both_recipes_of_fp8_are_drawn_and_mostly_run() -> None:
    """In layouts of all kinds, codes that are gathered too; only what shares heads among ranks, or has another fault, is refused."""
    chance = random.Random(3)
    ran: Counter[tuple[object, object]] = Counter()
    for _ in range(400):
        base = module._spread(chance)
        if base is None or refusal(base) is not None:
            continue
        options = module._fp8(chance, base)
        case = module._with(base, dict(options))
        ran[(options["fp8"], options["fp8_gather"]) if case else ("refused", options["fp8"])] += 1
        if case:
            training = configured(case).training
            assert (training.fp8, training.fp8_gather) == (options["fp8"], options["fp8_gather"])
    assert min(ran[kind] for kind in (("blockwise", False), ("tensorwise", False), ("tensorwise", True))) >= 2, ran
    assert ran["tensorwise", False] + ran["tensorwise", True] > ran["refused", "tensorwise"], ran


def test_a_draw_keeps_its_floors(drawn: tuple[Case, ...]) -> None:
    assert len({repr((case.options, case.world_size)) for case in drawn}) == COUNT
    runs = [case for case in drawn if refusal(case) is None]
    assert 0.7 * COUNT < len(runs) < COUNT
    # A wrong value may stand for the schedule or the family of a case that is refused.
    sizes = [axis_sizes(case) for case in drawn]
    assert max(case.world_size for case in drawn) <= 8
    assert sum(sum(size > 1 for size in each.values()) >= 3 for each in sizes) >= COUNT * THREE_AXES // 64
    schedules = Counter(case.options.get("pipeline_schedule", "1f1b") for case in drawn if axis_sizes(case)["pp"] > 1)
    families = Counter(case.options.get("model_type", "llama") for case in drawn)
    assert sum(schedules[name] >= COUNT * EACH_SCHEDULE // 64 for name in SCHEDULES) >= len(SCHEDULES) - 1, schedules
    assert sum(families[name] >= COUNT * EACH_FAMILY // 64 for name in FAMILIES) >= len(FAMILIES) - 1, families
    assert any(case.sft for case in runs) and any(3 in axis_sizes(case).values() for case in runs)
    for case in runs:
        assert configured(case).parallel.tensor_model_parallel_size == axis_sizes(case)["tp"]
        assert configured(case).model.model_type == case.options.get("model_type", "llama")
    for text in (str(error) for case in drawn if (error := refusal(case)) is not None):
        assert all(re.fullmatch(r"  - .+: got .+, expected .+; .+", line) for line in text.splitlines()[1:]), text


def test_an_error_that_is_no_refusal_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draw must not throw away what it is there to find."""

    def broken(case: Case) -> UserError | None:
        if "seed" in case.options:
            raise ZeroDivisionError
        return None

    monkeypatch.setattr(module, "refusal", broken)
    case = Case("", {}, 1)
    assert module._with(case, {"seed": 7}) == Case("", {"seed": 7}, 1)


def test_floors_are_reached_where_candidates_are_rare() -> None:
    chance = random.Random(1)
    found = with_floors(
        lambda: chance.randrange(1000), lambda n: ("rare" if n % 50 == 0 else "",), lambda n: n != 3, (Counter({"rare": 5}),), 10
    )
    assert sum(n % 50 == 0 for n in found) == 5 and len(set(found)) == 10
