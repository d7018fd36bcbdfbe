"""Proofs of configurations in FP8: small models of whole tiles, which equal one process in FP8 and go on with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from megatron_llama.config.schema import ModelConfig
from megatron_llama.engine.mesh import Axis
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.launch.launcher import Place
from megatron_llama.model.nn.fp8 import tensorwise
from megatron_llama.prove.case import Case
from megatron_llama.prove.given import SECTIONS
from megatron_llama.prove.materials import DrawnWeights
from megatron_llama.prove.pool import WorkerPool
from megatron_llama.prove.proof import CheckResult, prove_case
from megatron_llama.prove.shrink import shrink
from megatron_llama.train.api.common.options import read_options
from megatron_llama.train.setup.resolve import assemble, problems
from torch import Tensor

from tests.harness import Cluster

WIDE: dict[str, object] = {
    "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2,
    "vocab_size": 300, "seq_length": 16, "tensor_model_parallel_size": 2, "sequence_parallel": True, "bf16": True, "fp8": "blockwise",
}  # fmt: skip


@pytest.mark.parametrize("ends", [0, 1, 3])
@pytest.mark.parametrize("layout", [{}, {"pipeline_model_parallel_size": 8}, {"num_key_value_heads": 1}, {"num_key_value_heads": 8}])
def test_small_models_have_whole_tiles_and_a_block_in_fp8(ends: int, layout: dict[str, object]) -> None:
    options = {**WIDE, **layout, "fp8_bf16_layers": ends}
    for case in shrink(read_options(None, options, SECTIONS), 16, 4):
        config = assemble(read_options(None, {**case.options, "train_iters": 1}, SECTIONS))
        assert config.training.fp8 == "blockwise" and config.model.hidden_size < 1024
        assert problems(config, case.world_size) == []


@pytest.mark.long
def test_a_layout_in_fp8_equals_one_process_and_resumes_with_the_same_bits(cluster: Cluster, tmp_path: Path) -> None:
    (case,) = shrink(read_options(None, WIDE, SECTIONS), 4, 8)
    proof = prove_case(cluster, case, tmp_path, 300.0, checks=("one process", "precision", "resume", "reshard"), steps=3, axes=False)
    assert proof.holds, [row for row in proof.rows if not row.holds]
    [precision] = [check for check in proof.checks if check.name == "precision"]
    assert "FP8 against fp32" in precision.partly
    print([(row.what, row.step, row.got, row.bound) for row in precision.rows if row.what in ("loss", "gradient norm", "whole gradient")])
    print(precision.partly)


@pytest.mark.parametrize(("width", "size"), [(32, 0.57), (64, 0.8), (512, 0.8), (1024, 0.8)])
def test_products_with_initial_weights_are_no_larger_in_wide_models(width: int, size: float) -> None:
    """Or attention would choose single keys, and choose others after the rounding of codes."""
    weight = torch.empty(256, width)
    DrawnWeights(ModelConfig(hidden_size=width))(Rectangle("model.layers.0.self_attn.q_proj.weight", (256, width), (0, 0), (256, width), 0), weight)
    outputs = torch.randn(64, width, generator=torch.Generator().manual_seed(1)) @ weight.t()
    assert outputs.std().item() == pytest.approx(size, rel=0.05)


TENSORWISE: dict[str, object] = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 300, "seq_length": 32, "micro_batch_size": 2, "global_batch_size": 4, "lr": 1e-3, "bf16": True, "fp8": "tensorwise",
}  # fmt: skip
GATHERED: dict[str, object] = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "fp8_gather": True}


def precision_of(pool: WorkerPool, options: dict[str, object], ranks: int, folder: Path) -> CheckResult:
    proof = prove_case(pool, Case("as given", options, ranks), folder, 300.0, checks=("precision",), steps=2, axes=False)
    [check] = [check for check in proof.checks if check.name == "precision"]
    return check


SPREADS: dict[str, dict[str, object]] = {
    "codes gathered": GATHERED,
    "context": {"context_parallel_size": 2},
    "microbatches": {"micro_batch_size": 1, "pipeline_model_parallel_size": 2},
}


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.few(1)
def test_a_layout_with_one_scale_a_tensor_equals_one_process(cluster: Cluster, tmp_path: Path, spread: str) -> None:
    """In the same microbatches, whose tensors have scales of their own. Where no axis cuts a tensor, codes are the same, and nearly all bits."""
    check = precision_of(cluster, TENSORWISE | SPREADS[spread], 2, tmp_path)
    assert check.holds, [row for row in check.rows if not row.holds]
    assert {"gradient", "gradient's size", "whole gradient"} <= check.worst.keys()
    if spread == "microbatches":
        assert check.worst["gradient"].got < 1e-5, check.worst


def own_codes(self: tensorwise.Measured, dtype: torch.dtype) -> tensorwise.Codes:
    whole = CODES(self, dtype)
    return tensorwise.Codes(CODES(MEASURED(self.numbers, (), waits=True), dtype).codes, whole.scale)


def scale_of_one_rank() -> AbstractContextManager[object]:
    """Codes by the largest magnitude of this rank's part, with the scale of the whole."""
    return patch.object(tensorwise.Measured, "codes", own_codes)


def scale_of_another_tensor() -> AbstractContextManager[object]:
    """An input has the scale of the input before."""
    scales: list[Tensor] = []

    def linear(self: tensorwise.Tensorwise, x: tensorwise.Codes, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        scales.append(x.scale)
        return LINEAR(self, x._replace(scale=scales[max(0, len(scales) - 2)]), weight, bias)

    return patch.object(tensorwise.Tensorwise, "linear_of_codes", linear)


def no_agreement() -> AbstractContextManager[object]:
    """The message that ranks agree by is left out: what they gather are codes of different scales."""

    def measured(x: Tensor, axes: tuple[Axis, ...], *, waits: bool) -> tensorwise.Measured:
        return MEASURED(x, (), waits=waits)

    return patch.object(tensorwise, "measured", measured)


CODES, MEASURED, LINEAR = tensorwise.Measured.codes, tensorwise.measured, tensorwise.Tensorwise.linear_of_codes
FAULTS: dict[str, tuple[Callable[[], AbstractContextManager[object]], float]] = {
    "scale of one rank": (scale_of_one_rank, 2.5),
    "scale of another tensor": (scale_of_another_tensor, 4.0),
    "no agreement": (no_agreement, 1.5),
}
"""With how many times its bound the worst gradient deviates at least. Ranks' largest magnitudes are less than a third apart here."""


def with_fault(place: Place, name: str, function: Callable[..., Any], *args: Any) -> Any:
    with FAULTS[name][0]():
        return function(place, *args)


class Faulty:
    """A pool whose runs of several ranks have a fault."""

    def __init__(self, pool: WorkerPool, fault: str) -> None:
        self._pool = pool
        self._fault = fault

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """See WorkerPool."""
        if world_size == 1:
            return self._pool.run(world_size, function, *args, **options)
        return self._pool.run(world_size, with_fault, self._fault, function, *args, **options)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.few(1)
def test_a_wrong_scale_exceeds_the_bounds_of_gradients(cluster: Cluster, tmp_path: Path, fault: str) -> None:
    check = precision_of(cast(WorkerPool, Faulty(cluster, fault)), TENSORWISE | GATHERED, 2, tmp_path)
    beyond = max(row.got / row.bound for row in check.rows if row.what in ("gradient", "gradient's size", "whole gradient"))
    assert not check.holds and beyond > FAULTS[fault][1], beyond
    assert check.worst["skipped steps"].holds, "it would be found by anybody"
