"""AdamW in one pass against torch's, and its copy."""

from __future__ import annotations

import math

import pytest
import torch
from torch.optim.adamw import adamw as torch_adamw

from tests.kernels.closeness import draw, error

pytestmark = pytest.mark.kernels
NUMBERS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}


@pytest.mark.parametrize("count", [1, 2048, 5000])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("narrow", [None, torch.bfloat16, torch.float16], ids=str)
def test_steps_are_torchs(count: int, decay: float, narrow: torch.dtype | None, device: torch.device) -> None:
    """Four of them: one is skipped, and its gradient is no number. Against torch's operators: its fused kernel for CUDA takes 1 - beta2 of a
    beta2 in fp32, which is wrong by 13 millionths."""
    from megatron_llama.engine.rules.adamw_kernel import adamw

    master, scale = draw(count, seed=1, device=device), torch.tensor(2.5, device=device)
    ours = [master.clone(), torch.zeros_like(master), torch.zeros_like(master), torch.zeros((), device=device)]
    torchs = [tensor.clone() for tensor in ours]
    copy = None if narrow is None else torch.zeros(count, device=device, dtype=narrow)
    for number in range(4):
        grad, skip = (draw(count, seed=10 + number, device=device), torch.tensor(float(number == 2), device=device))
        if number == 2:
            grad[0] = float("nan")
        before = [tensor.clone() for tensor in ours]
        average, square, step = ours[1:]
        adamw(ours[0], grad, average, square, step, copy, scale=scale, skip=skip, decay=decay, **NUMBERS)
        if number == 2:
            assert all(torch.equal(now, then) for now, then in zip(ours, before, strict=True))
            continue
        state = [[tensor] for tensor in torchs[:3]]
        plain = {"foreach": False, "fused": False, "amsgrad": False, "maximize": False, "weight_decay": decay}
        torch_adamw(state[0], [grad / scale], *state[1:], [], [torchs[3]], **plain, **NUMBERS)
        assert float(step) == float(torchs[3])
        for found, expected in zip(ours[:3], torchs[:3], strict=True):
            assert error(found, expected) < 1e-6
        # The update itself, which is a thousandth of the parameter.
        assert error(ours[0] - master, torchs[0] - master) < 1e-3
        if copy is not None:
            assert torch.equal(copy, ours[0].to(narrow))


@pytest.mark.parametrize("narrow", [(True, True), (False, True)], ids=str)
def test_moments_in_bf16_are_rounded_when_they_are_kept(narrow: tuple[bool, bool], device: torch.device) -> None:
    """The master sees them before. A skipped step changes no bit."""
    from megatron_llama.engine.rules.adamw_kernel import adamw

    dtypes = [torch.bfloat16 if each else torch.float32 for each in narrow]
    master, one = draw(3000, seed=1, device=device), torch.ones((), device=device)
    ours = [master.clone(), *(torch.zeros_like(master, dtype=dtype) for dtype in dtypes), torch.zeros((), device=device)]
    exact = [tensor.clone() for tensor in ours]
    for number in range(3):
        grad = draw(3000, seed=10 + number, device=device)
        # From what is kept, in fp32.
        wide = [exact[0], *(tensor.float() for tensor in exact[1:3]), exact[3]]
        for tensors in (ours, wide):
            adamw(*tensors[:1], grad, *tensors[1:], None, scale=one, skip=one - 1, decay=0.1, **(NUMBERS | {"beta2": 0.95}))
        exact = [wide[0], *(tensor.to(dtype) for tensor, dtype in zip(wide[1:3], dtypes, strict=True)), wide[3]]
        before = [tensor.clone() for tensor in ours]
        adamw(*ours[:1], grad, *ours[1:], None, scale=one, skip=one, decay=0.1, **NUMBERS)
        for found, expected, same in zip(ours, exact, before, strict=True):
            assert torch.equal(found, expected) and torch.equal(found, same)


@pytest.mark.parametrize("kept", [("8bit", "8bit"), ("fp32", "8bit"), ("8bit", "bf16")], ids=" ".join)
@pytest.mark.parametrize("count", [64, 2048, 5056])
def test_moments_in_8_bits_are_those_of_torchs_operators(kept: tuple[str, str], count: int, device: torch.device) -> None:
    """Byte by byte, but for what a last bit rounds to a neighbour. A skipped step changes no bit."""
    from megatron_llama.config.schema import OptimizerConfig
    from megatron_llama.engine.rules.adamw_kernel import adamw
    from megatron_llama.engine.rules.moments import Tables, open_moment
    from megatron_llama.engine.rules.update_rule import rounded_adamw_step

    tables, one = Tables.on(device), torch.ones((), device=device)
    ours, torchs = draw(count, seed=1, device=device), draw(count, seed=1, device=device)
    counts = [torch.zeros((), device=device) for _ in range(2)]
    found, expected = ([open_moment(ours, name, tables, signed=number == 0) for number, name in enumerate(kept)] for _ in range(2))
    config = OptimizerConfig(adam_beta2=0.95)
    for number in range(6):
        grad = draw(count, seed=10 + number, device=device)
        grad[:100] *= 1e-6  # what is small beside the largest of its block
        grad[-30:] = 0.0
        for skip in (one, one - 1):
            before = [ours.clone(), *(t.clone() for moment in found for t in moment.tensors.values())]
            gradient = grad * (torch.nan if skip else 1.0)
            numbers = NUMBERS | {"beta2": 0.95, "decay": 0.1, "scale": one, "skip": skip, "tables": tables}
            adamw(ours, gradient, found[0].kept, found[1].kept, counts[0], None, **numbers)
            if skip:
                after = [ours, *(t for moment in found for t in moment.tensors.values())]
                assert all(torch.equal(now, then) for now, then in zip(after, before, strict=True))
        rounded_adamw_step(torchs, grad.clone(), *expected, counts[1], config, decay=0.1, scale=one, skip=one - 1, lr=NUMBERS["lr"])
        assert torch.equal(*counts)
        for mine, wanted in zip(found, expected, strict=True):
            for name, tensor in mine.tensors.items():
                if tensor.dtype == torch.uint8:
                    assert (tensor.int() - wanted.tensors[name].int()).abs().max() <= 1 and (
                        tensor != wanted.tensors[name]
                    ).float().mean() <= 2e-3
                else:
                    torch.testing.assert_close(tensor, wanted.tensors[name], rtol=1e-2, atol=1e-6)
            # What goes on is the same, so that only this step can differ in the next comparison.
            for name, tensor in mine.tensors.items():
                tensor.copy_(wanted.tensors[name])
        assert error(ours, torchs) < 1e-6
        ours.copy_(torchs)


def test_the_first_moment_may_have_no_memory(device: torch.device) -> None:
    from megatron_llama.engine.rules.adamw_kernel import adamw

    tensors = [draw(3, seed=1, device=device), *(torch.zeros(3, device=device) for _ in range(2)), torch.zeros((), device=device)]
    grad, one = draw(3, seed=2, device=device), torch.ones((), device=device)
    adamw(tensors[0], grad, *tensors[1:], None, scale=one, skip=one - 1, decay=0.0, **(NUMBERS | {"beta1": 0.0}))
    assert torch.equal(tensors[1], grad) and tensors[0].isfinite().all()


@pytest.mark.parametrize("beta2", [0.95, 0.999])
@pytest.mark.parametrize("before", [0, 1, 9, 999, 99_999])
def test_corrections_are_those_of_fp64(before: int, beta2: float, device: torch.device) -> None:
    """Rounded to fp32 once, at the end. A skipped step is not counted."""
    from megatron_llama.engine.rules.adamw_kernel import _count_step, _logarithm

    step, corrections = torch.full((), float(before), device=device), torch.empty(2, device=device)
    for skip in (1.0, 0.0):
        logarithms = {"LOG1": _logarithm(0.9), "LOG2": _logarithm(beta2)}
        _count_step[(1,)](step, torch.full((), skip, device=device), corrections, **logarithms, num_warps=1)
        assert step.item() == before + 1 - skip
    time = torch.tensor(before + 1.0, dtype=torch.float64)
    exact = [-torch.expm1(time * math.log(0.9)), (-torch.expm1(time * math.log(beta2))).sqrt()]
    assert corrections.tolist() == torch.stack(exact).to(torch.float32).tolist()
