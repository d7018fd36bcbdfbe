"""What the planner says of tensor-parallel messages in pieces."""

from __future__ import annotations

from dataclasses import replace

import pytest
from megatron_llama.planner.coefficients import Coefficients
from megatron_llama.planner.kernels import Kernels
from megatron_llama.planner.links import rank_groups
from megatron_llama.planner.steps import block_time
from megatron_llama.planner.training_job import TrainingJob, job_of
from megatron_llama.train.setup.resolve import resolve

from tests.planner.test_plan import config, machine

FIT = Coefficients(latency=0.0, hop_inside=0.0, parameters_exposed=0.0)
"""Messages take no time to start, and cost products nothing."""


def job(pieces: str, *, peak: float, sequence: bool = True) -> TrainingJob:
    """LLaMA-70B at tp 8 on GPUs of this speed, in FLOP/s, and with endless memory bandwidth."""
    layout = {"tensor_model_parallel_size": 8, "sequence_parallel": sequence, "tp_comm_overlap": pieces}
    own = machine(8)
    gpu = replace(own.gpu, peak=peak, hbm=1e30)
    return job_of(resolve(config("llama3.1-70b", 8, **layout), 8), replace(own, gpu=gpu))


def exposed(work: TrainingJob) -> tuple[float, float]:
    """Of a block's passes, in multiples of a message: a gather, or with whole rows an all-reduce."""
    groups = rank_groups(work, FIT)
    block = block_time(work, groups, Kernels(work, FIT), FIT)
    message = (groups.tp.gather if work.sequence_parallel else groups.tp.reduce)(work.stream)
    return block.forward.tensor / message, block.backward.tensor / message


@pytest.mark.parametrize(("pieces", "forward", "backward"), [("0", 4, 4), ("2", 1, 2), ("4", 0.5, 2)])
def test_slow_products_hide_all_but_the_last_piece(pieces: str, forward: float, backward: float) -> None:
    """The last piece of both sums is left; what column-parallel layers send backward is counted whole, as always."""
    assert exposed(job(pieces, peak=1e9)) == pytest.approx((forward, backward))


@pytest.mark.parametrize(("pieces", "forward"), [("0", 2), ("4", 0.5)])
def test_slow_products_hide_sums_of_whole_rows(pieces: str, forward: float) -> None:
    assert exposed(job(pieces, peak=1e9, sequence=False)) == pytest.approx((forward, 2))


def test_the_weight_gradient_of_the_mlp_hides_the_gradient_of_the_attention() -> None:
    """Products between: those of the attention's output, a quarter of the columns' and a seventh of the MLP's, are too short by themselves."""
    cut = job("4", peak=8e14)
    block = block_time(cut, rank_groups(cut, FIT), Kernels(cut, FIT), FIT)
    split = replace(cut, bubble=0.5)
    put_off = block_time(split, rank_groups(split, FIT), Kernels(split, FIT), FIT)
    gather = rank_groups(cut, FIT).tp.gather(cut.stream)
    assert block.forward.tensor == put_off.forward.tensor
    assert put_off.backward.tensor - block.backward.tensor > 0.2 * gather


def test_products_that_take_no_time_hide_nothing() -> None:
    assert exposed(job("4", peak=1e30)) == pytest.approx((4, 4))
    assert exposed(job("4", peak=1e30, sequence=False)) == pytest.approx((2, 2))


def test_what_is_hidden_delays_what_hides_it() -> None:
    whole, cut = (job(pieces, peak=1e9) for pieces in ("0", "4"))
    delaying = replace(FIT, parameters_exposed=0.25)
    groups = rank_groups(cut, FIT)
    message = groups.tp.gather(cut.stream)
    forward = block_time(cut, groups, Kernels(cut, delaying), delaying).forward.tensor / message
    assert forward == pytest.approx(0.5 + 0.25 * 3.5)
    same = [block_time(whole, groups, Kernels(whole, fit), fit).forward.tensor for fit in (FIT, delaying)]
    assert same[0] == same[1]
