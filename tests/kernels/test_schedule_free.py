"""Schedule-free AdamW in one pass against torch's operators, and the weights that it trains with."""

from __future__ import annotations

import pytest
import torch
from megatron_llama.config.schema import OptimizerConfig
from megatron_llama.engine.plan.buckets import BucketKind
from megatron_llama.engine.rules import schedule_free
from megatron_llama.engine.rules.schedule_free import ScheduleFreeAdamW
from megatron_llama.engine.rules.update_rule import Shard

from tests.kernels.closeness import draw, error

pytestmark = pytest.mark.kernels
KIND = BucketKind(decay=True, copies=1, partial_grad=False, tied=False, stage=0, contributions=1, trainable=True, adapter=False)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [64, 5056])
def test_steps_are_those_of_torchs_operators(
    count: int, dtype: torch.dtype, decay: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a warm-up. Skipped steps, the first among them, change no bit; what a resumed run makes of x and z are the bits of the step."""
    options = OptimizerConfig(lr=1e-2, weight_decay=decay, adam_beta2=0.95)
    one, scale = torch.ones((), device=device), torch.tensor(2.5, device=device)
    weights, rules = draw(count, seed=1, device=device), []
    for kernel in (True, False):
        rule = ScheduleFreeAdamW([options])
        shard = Shard(0, 0, torch.zeros(count, dtype=dtype, device=device), torch.float32, KIND, ())
        with monkeypatch.context() as patch:
            patch.setattr(schedule_free, "runs_kernels", lambda device, dtype, kernel=kernel: kernel)
            rule.attach(shard).copy_(weights)
            rule.refresh(0)
        rules.append((kernel, rule, shard))
    for number in range(6):
        grad = draw(count, seed=10 + number, device=device)
        for kernel, rule, shard in rules:
            with monkeypatch.context() as patch:
                patch.setattr(schedule_free, "runs_kernels", lambda device, dtype, kernel=kernel: kernel)
                state = rule.state(0)
                before = [tensor.clone() for tensor in (rule._masters[0], shard.param_shard, *state.values())]
                rule.step(0, grad * torch.nan, scale=scale, skip=one, lr=1e-2)
                for now, then in zip((rule._masters[0], shard.param_shard, *state.values()), before, strict=True):
                    assert torch.equal(now, then)
                rule.step(0, grad.clone(), scale=scale, skip=one - 1, lr=1e-2 * min(1, number / 3))
                stepped = shard.param_shard.clone()
                rule.refresh(0)
                assert torch.equal(shard.param_shard, stepped)
        (_, ours, mine), (_, torchs, other) = rules
        assert error(ours._masters[0], torchs._masters[0]) < 1e-6
        for name in ("z", "exp_avg_sq"):
            assert error(ours.state(0)[name], torchs.state(0)[name]) < 1e-6
        assert error(mine.param_shard.float(), other.param_shard.float()) < (1e-6 if dtype is torch.float32 else 1e-2)
    assert (ours._masters[0] - weights).abs().max() > 1e-3
