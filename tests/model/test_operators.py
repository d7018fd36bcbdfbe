"""What a block asks of the host: each operator takes it about ten microseconds, and a device that computes faster waits for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron_llama.engine.comm import collectives
from megatron_llama.engine.parameters import ParameterBuckets
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.model import llama
from megatron_llama.model.llama import build_stages
from megatron_llama.model.nn import attention
from megatron_llama.model.nn.functional import Residual
from megatron_llama.model.nn.ops import PLAIN, Ops
from megatron_llama.pipeline.build import build_optimizer
from torch import Tensor

from tests.engine.test_allocations import META, NoWorker, without_devices
from tests.model.nn.dispatch import Dispatched
from tests.parallel.cases import Layout

MOST = 116
"""Operators of a block, forward and backward, views included."""


def kernels(called: Callable[[], None]) -> Ops:
    """One call for each function, as with Triton."""

    def kernel(make: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            called()
            with torch.utils._python_dispatch._disable_current_modes():  # its outputs are no operators
                return make(*given)

        return call

    def scale(x: Tensor) -> Tensor:
        return x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)

    def norm_grads(grad: Tensor, stream: Tensor, x: Tensor, weight: Tensor, scale: Tensor, one_plus: bool) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x), weight.new_empty(weight.shape, dtype=torch.float32)

    def rotated(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.cat((query, key, value), dim=2)

    return replace(
        PLAIN,
        add_norm=kernel(lambda x, delta, weight, eps, one_plus: (x if delta is None else x.clone(), x.clone(), scale(x))),
        norm_backward=kernel(norm_grads),
        rotate=kernel(lambda heads, cos, sin: None),
        rotate_back=kernel(rotated),
        swiglu=kernel(lambda x: x.chunk(2, dim=-1)[0].clone()),
        swiglu_backward=kernel(lambda grad, x: torch.empty_like(x)),
    )


@pytest.mark.parametrize("layout", [Layout(bf16=True), Layout(tp=2, sp=True, bf16=True), Layout(tp=2, bf16=True)], ids=lambda layout: layout.name)
def test_operators_of_a_block(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    config, calls = layout.sized(), list[str]()

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            ctx.save_for_backward(query, key, value)
            calls.append("attention")
            return query.new_empty(query.shape)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
            calls.append("attention")
            return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors)

    class Input(torch.autograd.Function):
        """Tensors that something has made: their gradients arrive, and no leaf adds them up."""

        @staticmethod
        def forward(ctx: Any, made: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
            return like.clone(), like.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
            assert len(grads) == 2 and grads[0] is grads[1]
            return None, None

    def message(*given: Any, **names: Any) -> None:
        calls.append("message")

    with without_devices(monkeypatch):
        mesh = replace(build_mesh(config, rank=0, world_size=layout.world_size, device=torch.device("cpu")), device=META)
        monkeypatch.setattr(llama, "kernels_for", lambda *given: kernels(lambda: calls.append("kernel")))
        stages = build_stages(config, replace(mesh, device=torch.device("cpu")))
        engine = build_optimizer(config, stages.values(), mesh, worker_factory=NoWorker)  # type: ignore[arg-type]
    monkeypatch.setattr(ParameterBuckets, "wait_unsharded", lambda *given: 0)
    monkeypatch.setattr(ParameterBuckets, "check_version", lambda *given: None)
    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", lambda query, key, value, **names: Attention.apply(query, key, value))
    monkeypatch.setattr(collectives, "carried_by_gloo", lambda axis, device: False)
    monkeypatch.setattr(collectives, "all_gather_single", message)
    monkeypatch.setattr(collectives, "reduce_scatter_single", message)
    monkeypatch.setattr(collectives.dist, "all_reduce", message)
    engine.gradients.begin_step(2)  # a second microbatch would complete the buckets
    (stage,) = stages.values()
    positions = stage.positions(config.training.seq_length, META)
    rows = config.training.seq_length // (layout.tp if layout.sp else 1)
    x = torch.empty(rows, 1, config.model.hidden_size, dtype=torch.bfloat16, device=META)
    residual = Residual(*Input.apply(torch.empty(0, requires_grad=True), x))
    block = stage.model.layers["1"]
    with Dispatched() as dispatched:
        out = block(residual, positions)
        torch.autograd.backward(out, [x, x])
    names = [name for name, *_ in dispatched.calls]
    found = [*calls, *names]
    # Both residual additions are in the kernels of the norms, and so are the sums of both gradients of the stream.
    assert not {"add", "add_"} & {*names}
    assert calls.count("kernel") == 8 and calls.count("attention") == 2
    assert len(found) <= MOST, found
