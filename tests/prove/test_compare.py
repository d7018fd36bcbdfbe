"""Gradients and updates are read from what torch's own AdamW leaves, and what is wrong by more than rounding does not hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from megatron_llama.config.schema import OptimizerConfig
from megatron_llama.prove.compare import (
    IN_BF16,
    IN_FP32,
    IN_TENSORWISE,
    History,
    Row,
    gradients_of,
    rows_of_changes,
    rows_of_histories,
    rows_of_rates,
    rows_of_updates,
)
from megatron_llama.prove.run import Tensors
from torch import Tensor

OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=1.0, adam_eps=1e-6)
RATES = (0.0, 1e-2, 5e-3, 2e-3)
MATRIX, VECTOR, FROZEN = "model.layers.0.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"
SHAPES = {MATRIX: (24, 16), VECTOR: (16,)}


def drawn_gradients(steps: int = len(RATES)) -> list[dict[str, Tensor]]:
    chance = torch.Generator().manual_seed(7)
    return [{name: torch.randn(shape, generator=chance) for name, shape in SHAPES.items()} for _ in range(steps)]


def train(
    options: OptimizerConfig, rates: Sequence[float], *, decay_vectors: bool = False
) -> tuple[list[Tensors], dict[str, Tensor], list[float]]:
    """States, first weights and norms of torch's AdamW with torch's clipping."""
    weights = {name: torch.nn.Parameter(gradient / 10) for name, gradient in drawn_gradients(1)[0].items()}
    start = {name: weight.detach().clone() for name, weight in weights.items()} | {FROZEN: torch.ones(3, 3)}
    groups = [
        {"params": [weights[MATRIX]], "weight_decay": options.weight_decay},
        {"params": [weights[VECTOR]], "weight_decay": options.weight_decay if decay_vectors else 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=options.lr, betas=(options.adam_beta1, options.adam_beta2), eps=options.adam_eps)
    states, norms = [], []
    for rate, gradients in zip(rates, drawn_gradients(len(rates)), strict=True):
        for name, weight in weights.items():
            weight.grad = gradients[name].clone()
        norms.append(float(torch.nn.utils.clip_grad_norm_(weights.values(), options.clip_grad)))
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.step()
        moments = {
            kind: {name: adamw.state[weight][kind].clone() for name, weight in weights.items()} for kind in ("exp_avg", "exp_avg_sq")
        }
        masters = {name: weight.detach().clone() for name, weight in weights.items()} | {FROZEN: torch.ones(3, 3)}
        states.append(Tensors(masters, moments["exp_avg"], moments["exp_avg_sq"], {}))
    return states, start, norms


def wrong_kinds(rows: Sequence[Row]) -> set[tuple[str, str | None]]:
    return {(row.what, row.tensor) for row in rows if not row.holds}


def test_gradients_and_updates_of_torch_hold_with_room() -> None:
    states, start, norms = train(OPTIMIZER, RATES)
    assert min(norms) > 2, "everything is clipped"
    for found, expected in zip(gradients_of(states, OPTIMIZER, norms), drawn_gradients(), strict=True):
        assert found.keys() == SHAPES.keys(), "a frozen weight has none"
        for name, gradient in found.items():
            assert float((gradient - expected[name]).norm() / expected[name].norm()) < 5e-6
    rows = list(rows_of_updates("one process", states, start, OPTIMIZER, RATES, [True] * 4))
    assert {row.what for row in rows} == {"second moment", "update", "unchanged weight"}
    assert {row.step for row in rows} == {1, 2, 3, 4}
    assert all(row.holds and row.got <= row.bound / 4 for row in rows), max(rows, key=lambda row: row.got - row.bound)


OTHERS: dict[str, tuple[OptimizerConfig, Sequence[float], set[tuple[str, str]]]] = {
    "weight decay": (replace(OPTIMIZER, weight_decay=0.11), RATES, {("update", MATRIX)}),
    "decay of vectors": (OPTIMIZER, RATES, {("update", VECTOR)}),
    "epsilon": (replace(OPTIMIZER, adam_eps=1e-4), RATES, {("update", MATRIX), ("update", VECTOR)}),
    "second beta": (replace(OPTIMIZER, adam_beta2=0.998), RATES, {(what, name) for what in ("second moment", "update") for name in SHAPES}),
    "rate": (OPTIMIZER, (0.0, 1.001e-2, 5e-3, 2e-3), {("update", MATRIX), ("update", VECTOR)}),
    "rate of 0": (OPTIMIZER, (1e-5, 1e-2, 5e-3, 2e-3), {("update", MATRIX), ("update", VECTOR)}),
}


def test_another_update_does_not_hold() -> None:
    for name, (options, rates, expected) in OTHERS.items():
        states, start, _ = train(options, rates, decay_vectors=name == "decay of vectors")
        rows = list(rows_of_updates("one process", states, start, OPTIMIZER, RATES, [True] * 4))
        assert wrong_kinds(rows) == expected, name


def test_a_weight_that_must_stay_and_changes_does_not_hold() -> None:
    states, start, _ = train(OPTIMIZER, RATES)
    states[2] = replace(states[2], master={**states[2].master, FROZEN: torch.full((3, 3), 1 + 2e-7)})
    rows = [row for row in rows_of_updates("one process", states, start, OPTIMIZER, RATES, [True] * 4) if not row.holds]
    assert {(row.what, row.tensor, row.step) for row in rows} == {("unchanged weight", FROZEN, step) for step in (3, 4)}


def test_a_step_that_is_left_out_changes_nothing_and_does_not_count() -> None:
    states, start, _ = train(OPTIMIZER, RATES[1:])
    with_one_left_out = [states[0], states[0], *states[1:]]
    rates = (RATES[1], 7.0, *RATES[2:])
    changed = [True, False, True, True]
    assert wrong_kinds(list(rows_of_updates("precision", with_one_left_out, start, OPTIMIZER, rates, changed))) == set()
    assert wrong_kinds(list(rows_of_updates("precision", with_one_left_out, start, OPTIMIZER, rates, [True] * 4)))


def history(scale: float = 1.0, *, of: str = "", loss: float = 2.0) -> History:
    gradients = drawn_gradients(1)[0]
    scaled = {name: gradient.double() * (scale if name == of else 1.0) for name, gradient in gradients.items()}
    return History((loss,), (3.0,), (scaled,), {1: loss})


def test_one_wrong_tensor_is_named_by_what_rounding_is_measured_to_be() -> None:
    alone, exact = history(), history(1 + 1e-5, of=VECTOR)
    near = list(rows_of_histories("one process", history(1 + 7e-5, of=VECTOR), alone, (alone, exact), IN_FP32))
    assert wrong_kinds([row for row in near if row.what == "gradient"]) == set()
    far = list(rows_of_histories("one process", history(1 + 9e-5, of=VECTOR), alone, (alone, exact), IN_FP32))
    assert wrong_kinds([row for row in far if row.what == "gradient"]) == {("gradient", VECTOR)}
    other = list(rows_of_histories("one process", history(1 + 7e-5, of=MATRIX), alone, (alone, exact), IN_FP32))
    assert ("gradient", MATRIX) in wrong_kinds(other), "its own rounding is nothing"


def test_losses_have_a_floor_and_a_limit() -> None:
    alone = history()
    fewer = replace(alone, gradients=({MATRIX: alone.gradients[0][MATRIX]},))
    assert wrong_kinds(list(rows_of_histories("one process", fewer, alone, (alone, alone), IN_FP32))) == {("gradient", VECTOR)}
    assert not Row("one process", "loss", math.nan, 1.0).holds
    assert [row.holds for row in rows_of_rates("one process", (1e-3, 1e-3, math.nan), (1e-3, 1.1e-3, 1e-3))] == [True, False, False]
    assert not wrong_kinds(list(rows_of_histories("one process", history(loss=2.0 + 1.9e-6), alone, (alone, alone), IN_FP32)))
    wrong = list(rows_of_histories("one process", history(loss=2.0 + 2.1e-6), alone, (alone, alone), IN_FP32))
    assert wrong_kinds(wrong) == {("loss", None), ("validation loss", None)}
    # One process is as wrong as the run: the rounding that it measures allows no more than the limit.
    broken = list(rows_of_histories("precision", history(loss=2.1), alone, (history(loss=2.1), alone), IN_FP32))
    assert ("loss", None) in wrong_kinds(broken)


def test_a_gradient_that_is_missing_never_holds() -> None:
    """Not even where one process is so far from fp32 that six times its rounding is the whole gradient."""
    exact, alone = history(), history(0.8, of=VECTOR)
    missing = list(rows_of_histories("precision", history(0.0, of=VECTOR), exact, (alone, exact), IN_BF16))
    assert ("gradient", VECTOR) in wrong_kinds(missing) and all(row.bound < 1 for row in missing)
    near = list(rows_of_histories("precision", history(1.25, of=VECTOR), exact, (alone, exact), IN_BF16))
    assert ("gradient", VECTOR) not in wrong_kinds(near)


def test_codes_of_two_bits_may_be_rounded_anew_and_leave_no_half_of_a_gradient() -> None:
    """Of few numbers, 0.4 from fp32 in one process, and 0.57 from it in another right run: errors that are at right angles to each other
    and to the gradient. Half or twice the gradient with the same errors is as near to one process, or nearer."""
    gradients = history().gradients[0]
    exact = gradients[VECTOR]
    across = torch.linalg.qr(torch.stack([exact, *drawn_gradients(2)[1][MATRIX].double()[:2]], dim=1)).Q.T * exact.norm()

    def rounded(scale: float, error: int) -> History:
        return replace(history(), gradients=({**gradients, VECTOR: scale * exact + 0.4 * across[error]},))

    alone = rounded(1.0, 1)
    for scale, wrong in ((1.0, set()), (0.85, set()), (0.5, {"gradient's size"}), (2.0, {"gradient", "gradient's size"}), (0.0, {"gradient", "gradient's size"})):
        for steps in (1, 2):
            runs = [replace(run, losses=run.losses * steps, grad_norms=run.grad_norms * steps, gradients=run.gradients * steps) for run in (rounded(scale, 2), alone, history())]
            rows = list(rows_of_histories("precision", runs[0], runs[1], (runs[1], runs[2]), IN_TENSORWISE))
            failed = {row.what for row in rows if not row.holds and row.tensor == VECTOR and row.step == steps}
            assert failed >= wrong and bool(failed) is bool(wrong), (scale, failed)
    size = next(row for row in rows if row.what == "gradient's size" and row.tensor == MATRIX)
    assert size.got == 0.0 and size.bound == IN_TENSORWISE.gradient / 2


def test_a_small_gradient_may_be_as_near_to_one_process_in_its_precision() -> None:
    """Its terms cancel, and rounding leaves little of it; a larger one has no such excuse, nor has one that is missing."""

    def beside(scale: float, whole: float) -> History:
        gradients = history(scale, of=VECTOR).gradients[0]
        return replace(history(), gradients=({VECTOR: gradients[VECTOR], MATRIX: gradients[MATRIX] * whole},))

    for whole, held in ((1000.0, True), (10.0, False)):
        exact, alone = beside(1.0, whole), beside(1.8, whole)
        for scale in (1.65, 0.9, 0.0):
            rows = list(rows_of_histories("precision", beside(scale, whole), exact, (alone, exact), IN_BF16))
            assert (("gradient", VECTOR) not in wrong_kinds(rows)) is (scale == 0.9 or (held and scale > 0))
        steady = list(rows_of_histories("precision", beside(1.3, whole), exact, (exact, exact), IN_BF16))
        assert (("gradient", VECTOR) not in wrong_kinds(steady)) is held, "the rounding of one run does not tell that of the next"
        rows = list(rows_of_histories("one process", beside(1.65, whole), exact, (alone, exact), IN_FP32))
        assert ("gradient", VECTOR) in wrong_kinds(rows), "in fp32 little cancels"


def test_a_change_that_one_process_does_not_make_does_not_hold() -> None:
    """Of ZenFlow, whose columns fp64 updates and fp32 does not: no bound can be made of that."""
    start = {MATRIX: torch.ones(4, 4)}
    same, moved = (Tensors({MATRIX: torch.full((4, 4), value)}, {}, {}, {}) for value in (1.0, 1.1))
    (row,) = rows_of_changes("one process", start, [moved], [same], [moved])
    assert not row.holds and row.bound < 1
    (missing,) = rows_of_changes("one process", start, [same], [moved], [same])
    assert missing.got == 1.0 and not missing.holds


def test_an_update_below_the_last_bits_has_a_bound_below_1() -> None:
    """At a rate of 1e-9 nothing of a weight around 1 changes; in a second step it changes by 1e-3."""
    states, start, _ = train(OPTIMIZER, (1e-9,))
    rows = list(rows_of_updates("one process", states, start, OPTIMIZER, (1e-9,), [True]))
    lost = [row for row in rows if "last bits" in row.note]
    assert {row.what for row in lost} == {"update"} and all(row.holds and row.bound < 1 for row in rows)
    moved = replace(states[0], master={name: weight + 1e-3 for name, weight in states[0].master.items()})
    found = list(rows_of_updates("one process", [moved], start, OPTIMIZER, (1e-9,), [True]))
    assert {("update", MATRIX), ("update", VECTOR)} <= wrong_kinds(found)


def test_validation_losses_of_one_run_alone_do_not_hold() -> None:
    alone = history()
    for here, there, said in (({1: 2.0}, {1: 2.0, 3: 2.1}, "not there"), ({1: 2.0, 3: 2.1}, {1: 2.0}, "must not")):
        found, expected = replace(alone, validation_losses=here), replace(alone, validation_losses=there)
        rows = [row for row in rows_of_histories("one process", found, expected, (expected, expected), IN_FP32) if not row.holds]
        assert [(row.what, row.step) for row in rows] == [("validation loss", 3)] and said in rows[0].note
    theirs = replace(alone, validation_losses=None)
    assert not wrong_kinds(list(rows_of_histories("transformers", theirs, alone, (alone, alone), IN_FP32)))


def test_what_a_checkpoint_lacks_does_not_hold() -> None:
    states, start, _ = train(OPTIMIZER, RATES[1:3])
    states[1] = replace(states[1], master={name: weight for name, weight in states[1].master.items() if name != FROZEN}, exp_avg_sq={})
    rows = [row for row in rows_of_updates("one process", states, start, OPTIMIZER, RATES[1:3], [True] * 2) if not row.holds]
    assert {(row.tensor, row.note.rpartition("have ")[2]) for row in rows} == {
        (FROZEN, "its weight"),
        (MATRIX, "a moment"),
        (VECTOR, "a moment"),
    }
