"""torchao's plain-torch conversion as a second opinion on codes and scales, with its scales rounded to powers of two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.kernels import runs_kernels
from megatron_llama.launch.launcher import Place
from megatron_llama.model.nn.fp8 import ops, tensorwise
from torch import Tensor

from tests import torch_twin
from tests.model.nn.fp8.numbers import hard_tiles, normal
from tests.parallel.cases import OPTIMIZER, deviation, global_samples, train
from tests.parallel.test_fp8_tensorwise import Tensorwise
from tests.torch_twin import adamw, hf_model, next_token_loss

pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore")]
LEAST = 1e-12
"""torchao gives all below it the same scale, and knows none for infinity and NaN."""


def by_torchao(x: Tensor, per_row: bool) -> tuple[Tensor, Tensor]:
    """Bytes of codes, and scales."""
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    rows = {"scaling_granularity": ScalingGranularity.AXISWISE, "axiswise_dim": -1} if per_row else {}
    made = hp_tensor_to_float8_dynamic(x, torch.float8_e4m3fn, LinearMMConfig(), round_scales_to_power_of_2=True, **rows)
    return made._data.view(torch.uint8), made._scale.reciprocal()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_codes_are_torchaos(dtype: torch.dtype) -> None:
    x = torch.cat([hard_tiles(dtype), normal(2000, 128, seed=1, dtype=dtype)])
    largest = x.abs().amax(1).float()
    fraction, _ = torch.frexp(largest)
    # One unit of fp32 above 448 times a power of two torchao's logarithm rounds to a whole number, and the largest code is clamped.
    known = largest.isfinite() & (largest >= LEAST) & (fraction.sub(0.875).mul(2.0**24) != 1)
    assert int(known.sum()) > 2025
    codes, scales = ops.tiles(x[known])
    their_codes, their_scales = by_torchao(x[known], per_row=True)
    assert torch.equal(codes.view(torch.uint8), their_codes) and torch.equal(scales, their_scales)
    for seed in range(20):
        block = normal(128, 128, seed=seed, dtype=dtype)
        (codes, scale), (their_codes, their_scale) = ops.blocks(block), by_torchao(block, per_row=False)
        assert torch.equal(codes.view(torch.uint8), their_codes) and float(scale) == float(their_scale)


@pytest.mark.usefixtures("device")  # which mends the interpreter's conversions
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("code", [tensorwise.NUMBERS, tensorwise.GRADIENTS], ids=str)
def test_codes_of_whole_tensors_are_torchaos(dtype: torch.dtype, code: torch.dtype) -> None:
    """To the bit, infinity and NaN too, of which torchao decodes as little."""
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    for x in (*hard_tiles(dtype), *normal(200, 1, 128, seed=1, dtype=dtype), normal(64, 48, seed=2, dtype=dtype)):
        made, theirs = tensorwise.codes(x, code), hp_tensor_to_float8_dynamic(x, code, LinearMMConfig())
        if bool(x.isfinite().all()):
            assert torch.equal(made.codes.view(torch.uint8), theirs._data.view(torch.uint8))
            assert torch.equal(made.scale, theirs._scale.reciprocal())
        else:
            assert tensorwise.decoded(made).isnan().all()


STEPS = 20


def losses_of_hf(code: bool) -> list[float]:
    """Of HuggingFace's LLaMA in bf16 with fp32 masters; with ``code`` torchao multiplies in its inner layers, whose weight gradients are
    in bf16 as ours."""
    from torchao.float8.config import CastConfig, Float8LinearConfig, ScalingType
    from torchao.float8.float8_linear import Float8Linear

    high = {"target_dtype": None, "scaling_type": ScalingType.DISABLED}
    numbers, gradients = ({**high, "target_dtype": dtype} for dtype in (tensorwise.NUMBERS, tensorwise.GRADIENTS))
    config = Float8LinearConfig(
        emulate=True, cast_config_input_for_grad_weight=CastConfig(**numbers), cast_config_grad_output_for_grad_weight=CastConfig(**gradients)
    )
    model = hf_model(Tensorwise().config().model)
    for layer in model.model.layers[1:3] if code else ():
        for module in (layer.self_attn, layer.mlp):
            for name, linear in list(module.named_children()):
                if isinstance(linear, torch.nn.Linear):
                    coded = Float8Linear.from_float(linear, config=config)
                    # It asks CUDA's autocast for the dtype, and not that of CPUs.
                    coded.register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16(),))
                    setattr(module, name, coded)
    optimizer = adamw(model.parameters(), OPTIMIZER)

    def losses(step: int) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return [next_token_loss(model, global_samples(step))]

    return torch_twin.train(model, optimizer, losses, STEPS, 1.0)[0]


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In Triton's interpreter a training would take many minutes; kernels are held to torch's operators by tests of their own."""
    monkeypatch.setattr(devices, "runs_triton", lambda device: False)
    runs_kernels.cache_clear()
    yield
    runs_kernels.cache_clear()


@pytest.mark.usefixtures("without_kernels")
def test_losses_are_those_of_torchaos_linear_layers() -> None:
    """On average over the steps. In a single step two runs in FP8 are as far from each other as from bf16: a scale that differs by its last
    bit, as those of fp32 weights and of queries alone do, rounds all codes anew."""
    ours = train(Place(0, 1, 0), Tensorwise(steps=STEPS)).losses
    theirs, plain = losses_of_hf(code=True), losses_of_hf(code=False)
    assert abs(sum(ours) - sum(theirs)) < 1e-3 * sum(theirs)
    assert deviation(theirs, plain) > 5e-4 and deviation(ours, theirs) < 2 * deviation(theirs, plain)
