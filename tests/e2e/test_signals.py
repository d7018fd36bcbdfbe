"""What schedulers and bad luck do to a run: SIGTERM ends it orderly, SIGKILL costs no more than the steps since the last save."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from signal import Signals

import pytest
from megatron_llama.metrics.events import FAULT
from megatron_llama.planner.run.folder import read_run

from tests.e2e.killing import SHORT_STEPS, kill_at_random
from tests.e2e.product import DP2, PP2, TP2_PP2, Layout, Product, assert_same_state, exact_curve, steps

LONG = 16
"""Steps of a run that is stopped on its way."""


def long_run(product: Product, folder: Path) -> dict[str, object]:
    return {"save": folder, "load": folder, "train_iters": LONG, "lr_decay_iters": LONG, "num_layers": 2}


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "number", "ranks"),
    [(PP2, Signals.SIGTERM, [1]), (DP2, Signals.SIGINT, None)],
    ids=["one pipeline stage", "control-C"],
)
def test_a_signal_saves_and_ends_every_rank(layout: Layout, number: Signals, ranks: list[int] | None, product: Product, tmp_path: Path) -> None:
    """With the status of a shell: what follows the run in a script must not take it for done."""
    product.train(layout, **long_run(product, tmp_path / "straight"))
    folder = tmp_path / "stopped"
    run = product.start(layout, **long_run(product, folder))
    run.until(lambda: len(steps(folder)) >= 3)
    run.signal(number, ranks)
    stopped = run.wait().ok(128 + number)
    last = steps(folder)[-1]["iteration"]
    assert 3 <= last < LONG
    assert stopped.out.endswith(f" saved {folder}/iter_{last:07d}\n stopped by {number.name} after iteration {last}\n")
    product.train(layout, **long_run(product, folder))
    assert exact_curve(folder) == exact_curve(tmp_path / "straight")
    assert_same_state(folder / f"iter_{LONG:07d}", tmp_path / "straight" / f"iter_{LONG:07d}")


@pytest.mark.long
@pytest.mark.tries("exit_zero_on_signal")
def test_a_signal_ends_a_run_that_saves_nothing(product: Product) -> None:
    """Here the scheduler takes other statuses than 0 for failures."""
    run = product.start(DP2, train_iters=100_000, exit_zero_on_signal=True)
    run.until(lambda: "2/100000 | " in run.text())
    run.signal(Signals.SIGTERM, [1])
    assert " stopped by SIGTERM after iteration " in run.wait().ok().out.splitlines()[-1]


@pytest.mark.long
@pytest.mark.parametrize(("layout", "victim"), [pytest.param(DP2, 0, id="replica 0"), pytest.param(TP2_PP2, 2, id="rank 2 of 4")])
def test_the_death_of_one_rank_is_named_by_the_others(layout: Layout, victim: int, product: Product) -> None:
    run = product.start(layout, train_iters=100_000)
    run.until(lambda: "2/100000 | " in run.text())
    run.signal(Signals.SIGKILL, [victim])
    ended = run.wait()
    assert ended.codes[victim] == -9
    for rank, (code, said) in enumerate(zip(ended.codes, ended.errs, strict=True)):
        if rank != victim:
            # A rank that is stuck in a message to a third one is ended by its watch.
            named = rf"rank {victim}: got no answer, expected all ranks at work; |was stuck, and was ended: rank {victim} does not answer"
            assert code == 1 and re.search(named, said.splitlines()[-1]), (rank, code, said)
            assert "Traceback" not in said, said


LATER = 150
"""A step in which every rank has told where it is, more than a second after the start."""


@pytest.mark.tries("distributed_timeout_minutes")
@pytest.mark.long
def test_a_rank_that_hangs_is_noticed_after_the_timeout(product: Product, tmp_path: Path) -> None:
    """All others say which it is, where it was last seen, and where they wait; and end. The word of rank 0 stays in the run's folder."""
    run = product.start(TP2_PP2, save=tmp_path, train_iters=100_000, num_layers=2, seq_length=8, distributed_timeout_minutes=0.05)
    run.until(lambda: f"{LATER}/100000 | " in run.text())
    run.signal(Signals.SIGSTOP, [2])
    run.until(lambda: all(run.pids[rank] in product.launcher.ended for rank in (0, 1, 3)))
    run.signal(Signals.SIGKILL, [2])
    ended = run.wait()
    assert ended.codes == (1, 1, -9, 1)
    for rank in (0, 1, 3):
        words = ended.errs[rank].splitlines()[-1]
        assert words.startswith(f"rank {rank} was stuck, and was ended: rank 2 does not answer; "), words
        assert re.search(r"; rank 2 was last seen in .+ \(iteration [1-9]\d+\)", words), words
        assert re.search(r"; ranks? [013, ]+ (is|are) in .+ \(iteration [1-9]\d+\), waiting for (\w+ on (tp|pp)|message (to|from) rank)", words)
        assert words.endswith("; nothing went on for 3 s (--distributed-timeout-minutes)") and "Traceback" not in ended.errs[rank]
    told = [one for one in read_run(str(tmp_path)).events if one.what == FAULT]
    assert [one.details["words"] for one in told] == [ended.errs[0].splitlines()[-1]]


@pytest.mark.long
def test_others_end_when_the_host_of_the_store_hangs(product: Product) -> None:
    """Nobody can be asked then: each rank ends by itself, soon after the timeout, before the backend's own."""
    run = product.start(DP2, train_iters=100_000, distributed_timeout_minutes=0.05)
    run.until(lambda: "2/100000 | " in run.text())
    run.signal(Signals.SIGSTOP, [0])
    run.until(lambda: run.pids[1] in product.launcher.ended)
    run.signal(Signals.SIGKILL, [0])
    ended = run.wait()
    assert ended.codes == (-9, 1) and "rank 1 was stuck, and was ended: rank 0 does not answer; " in ended.errs[1]
    assert re.search(r"; rank 1 is in .+ \(iteration \d+\)", ended.errs[1])


KILLS, KILLS_OF_A_SOAK = 6, 200


@pytest.mark.long
@pytest.mark.parametrize("saving", [{}, {"async_save": True, "save_retain": 3}], ids=["waited for", "in the background"])
def test_killed_at_random_moments_and_resumed(saving: dict[str, object], soak: bool, product: Product, tmp_path: Path) -> None:
    """Every other kill waits for the folder in which a save is written, the others for a step; then both ranks are struck, some
    milliseconds later by chance. Curve and weights end up as if nothing had happened, and no restart loses a saved step."""
    wanted_kills = KILLS_OF_A_SOAK if soak else KILLS
    length = 8 * wanted_kills
    options = {**SHORT_STEPS, "train_iters": length, "lr_decay_iters": length, **saving}
    product.start(DP2, save=tmp_path / "straight", **options).wait(timeout=600.0).ok()
    folder, chance = tmp_path / "killed", random.Random(20)
    kills = in_a_save = 0
    while kills < wanted_kills or in_a_save < wanted_kills // 2:
        assert kills < 3 * wanted_kills, f"only {in_a_save} of {kills} kills met a save"
        kill = kill_at_random(product, DP2, folder, chance, at_a_save=kills % 2 == 0, **options)
        assert -9 in kill.codes and kill.after >= kill.before
        kills, in_a_save = kills + 1, in_a_save + kill.in_a_save
    product.start(DP2, save=folder, load=folder, **options).wait(timeout=600.0).ok()
    assert exact_curve(folder) == exact_curve(tmp_path / "straight")
    last = f"iter_{length:07d}"
    assert_same_state(folder / last, tmp_path / "straight" / last)
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in (tmp_path / "straight").iterdir())


@pytest.mark.long
def test_a_rank_that_dies_behind_its_last_step_is_named_by_who_waits_for_its_part_of_the_save(product: Product, tmp_path: Path) -> None:
    """Rank 0 waits for its own process then, which waits for that of rank 1, and nobody communicates."""
    run = product.start(DP2, save=tmp_path, async_save=True)
    children = Path(f"/proc/{run.pids[1]}/task/{run.pids[1]}/children")
    run.until(lambda: bool(children.read_text().split()))
    os.kill(int(children.read_text().split()[0]), Signals.SIGSTOP)  # its writing process, which would be done at once
    run.until(lambda: " saving " in run.text())
    run.signal(Signals.SIGKILL, [1])
    ended = run.wait()
    assert ended.codes == (1, -9) and "rank 1: got no answer, expected all ranks at work; " in ended.errs[0], ended
