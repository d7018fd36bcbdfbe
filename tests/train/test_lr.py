import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron_llama.config.batch_ramp import BatchSizes, with_decay
from megatron_llama.config.schema import OptimizerConfig, TrainingConfig
from megatron_llama.train.run.lr import learning_rate

PEAK = 3e-4


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)


def megatron(optimizer: torch.optim.SGD, style: str, *, warmup: float, decay: int, wsd: int | None, end: str | None) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    weight_decay = {"start_wd": 0.0, "end_wd": 0.0, "wd_incr_steps": 0, "wd_incr_style": "constant"}
    rates = {"init_lr": 0.0, "max_lr": PEAK, "min_lr": PEAK / 10, "lr_warmup_steps": warmup, "lr_decay_steps": decay, "lr_decay_style": style}
    return OptimizerParamScheduler(optimizer, **rates, **weight_decay, wsd_decay_steps=wsd, lr_wsd_decay_style=end)


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(
    "style", ["constant", "linear", "cosine", *(f"WSD {end}" for end in ("exponential", "linear", "cosine", "minus_sqrt"))]
)
def test_as_megatron(style: Any, warmup: int) -> None:
    style, _, end = style.partition(" ")
    optimizer = sgd()
    scheduler = megatron(optimizer, style, warmup=warmup, decay=20, wsd=5 if end else None, end=end or None)
    wsd: dict[str, Any] = {"lr_wsd_decay_style": end, "lr_wsd_decay_iters": 5} if end else {}
    config = OptimizerConfig(lr=PEAK, min_lr=PEAK / 10, lr_decay_style=style, lr_decay_iters=20, lr_warmup_iters=warmup, **wsd)
    for iteration in range(30):
        expected = optimizer.param_groups[0]["lr"]
        assert math.isclose(learning_rate(config, 1000, iteration), expected, rel_tol=1e-12, abs_tol=1e-16)
        scheduler.step(1)


RAMP = BatchSizes(12, (4, 4, 40))


@pytest.mark.parametrize("share", [0.0, 0.21])
@pytest.mark.parametrize("sizes", [BatchSizes(12), RAMP], ids=["one size", "ramp"])
@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "WSD"])
def test_in_samples_as_megatron(style: Any, sizes: BatchSizes, share: float) -> None:
    """Megatron's scheduler is stepped by the samples of each batch; a share of the decay as warm-up need not be a whole number."""
    decay, optimizer = 173, sgd()
    warmup = share * decay or 30
    scheduler = megatron(optimizer, style, warmup=warmup, decay=decay, wsd=50, end="cosine")
    given = OptimizerConfig(lr=PEAK, min_lr=PEAK / 10, lr_decay_style=style, lr_wsd_decay_style="cosine", lr_wsd_decay_samples=50)
    given = replace(given, lr_warmup_samples=0 if share else 30, lr_warmup_fraction=share)
    config = with_decay(given, TrainingConfig(train_samples=decay))
    consumed, rates = 0, set()
    for iteration in range(25):
        rate = learning_rate(config, 1000, iteration, consumed)
        assert math.isclose(rate, optimizer.param_groups[0]["lr"], rel_tol=1e-12, abs_tol=1e-16)
        rates.add(rate)
        scheduler.step(sizes.at(consumed))
        consumed += sizes.at(consumed)
    assert consumed > decay and len(rates) > 3


def test_a_share_of_the_iterations() -> None:
    by_share, by_length = (OptimizerConfig(lr=1.0, lr_warmup_fraction=0.25), OptimizerConfig(lr=1.0, lr_warmup_iters=10))
    assert [learning_rate(by_share, 40, step) for step in range(40)] == [learning_rate(by_length, 40, step) for step in range(40)]


def test_decay_ends_at_the_last_iteration_by_default() -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.1, lr_decay_style="cosine")
    assert learning_rate(config, 10, 5) == pytest.approx(0.55, rel=1e-12)
    assert learning_rate(config, 10, 10) == learning_rate(config, 10, 99) == 0.1
