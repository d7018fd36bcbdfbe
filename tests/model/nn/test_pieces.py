"""Messages of tensor parallelism in pieces: the layers against those with whole messages and against one process; order, number and bytes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from megatron_llama.engine.mesh import Axis
from megatron_llama.launch.launcher import Place
from megatron_llama.model.nn.functional import recomputable_gated
from megatron_llama.model.nn.linear import ColumnLinear, RowLinear, stacked_outputs
from megatron_llama.model.nn.lora import ColumnAdapters, Part, RowAdapter
from megatron_llama.model.nn.ops import PLAIN
from megatron_llama.model.plan.pieces import piece_spans
from torch import Tensor, nn

from tests.harness import Cluster
from tests.model.nn.handle import Handle
from tests.model.nn.spmd import numbers, tensor_mesh

S, B, D, F, RANK = 12, 2, 6, 24, 2
"""Rows of every part: 6 on two ranks, 4 on three: 4 pieces are of unlike sizes."""


@dataclass(frozen=True)
class Case:
    """How the layers of ``run`` are put together."""

    sequence_parallel: bool = True
    bias: bool = False
    stacked: bool = False
    recompute: bool = False
    adapted: bool = False
    put_off: bool = False
    """Weight gradients come later, as in zero-bubble schedules."""


CASES = {
    "sequence": Case(),
    "whole rows": Case(sequence_parallel=False),
    "bias": Case(bias=True),
    "stacked, bias": Case(bias=True, stacked=True),
    "recompute": Case(recompute=True),
    "adapted": Case(adapted=True),
    "adapted, whole rows, recompute": Case(sequence_parallel=False, adapted=True, recompute=True),
    "postponed": Case(put_off=True, recompute=True),
    "postponed, stacked, adapted": Case(put_off=True, stacked=True, adapted=True),
}


def weight_of(layer: nn.Module, name: str, whole: Tensor, put_off: bool) -> Handle:
    """Give a layer this value, with a handle."""
    parameter = nn.Parameter(whole.clone())
    setattr(layer, name, parameter)
    return Handle(parameter, put_off=put_off)


def adapters_of(adapters: nn.ModuleDict, name: str, rank: Axis, seed: int) -> list[nn.Parameter]:
    """Values of the halves, different on every rank where the layer splits them."""
    found = []
    for number, half in enumerate((adapters[name].lora_A, adapters[name].lora_B)):
        half.weight = nn.Parameter(numbers(*half.weight.shape, seed=seed + number + 10 * rank.rank).detach())
        found.append(half.weight)
    return found


def run(tp: Axis, case: Case, count: int) -> dict[str, Tensor]:
    """Output and all gradients of a column-parallel layer, a gate, and a row-parallel one, with messages in ``count`` pieces."""
    options = {"tp": tp, "sequence_parallel": case.sequence_parallel, "bias": case.bias, "pieces": count}
    sizes = [F, 2 * F] if case.stacked else [2 * F]
    columns = [ColumnLinear(D, size, **options) for size in sizes]
    row = RowLinear(F * len(sizes) if not case.stacked else 3 * F // 2, D, **options)
    handles = {}
    for number, layer in enumerate([*columns, row]):
        handles[f"weight {number}"] = weight_of(layer, "weight", numbers(*layer.weight.shape, seed=number + 10 * tp.rank).detach(), case.put_off)
        if case.bias:
            handles[f"bias {number}"] = weight_of(layer, "bias", numbers(*layer.bias.shape, seed=5 + number).detach(), False)
    leaves: list[nn.Parameter] = []
    if case.adapted:
        for layer, size in zip(columns, sizes, strict=True):
            layer.adapters = ColumnAdapters(D, [Part("up", size // tp.size, True)], rank=RANK, scaling=0.5, tp=tp)
            leaves += adapters_of(layer.adapters, "up", tp, 40)
        row.adapters = RowAdapter(row.weight.shape[1], [Part("down", D, True)], rank=RANK, scaling=0.5, tp=tp)
        leaves += adapters_of(row.adapters, "down", tp, 50)
    whole = numbers(S, B, D, seed=30).detach()
    x = (whole.chunk(tp.size)[tp.rank] if case.sequence_parallel else whole).clone().requires_grad_()
    inner = stacked_outputs(x, columns)
    gate = PLAIN.gate("silu")
    hidden = recomputable_gated(inner, gate) if case.recompute else recomputable_gated(inner, gate).value
    out = row(hidden)
    (out * torch.cos(torch.arange(out.numel(), dtype=out.dtype).view(out.shape))).sum().backward()
    for handle in handles.values():
        for work in handle.work:
            work()
        assert handle.written == 1
    assert x.grad is not None
    grads = {f"adapter {number}": leaf.grad for number, leaf in enumerate(leaves) if leaf.grad is not None}
    assert len(grads) == len(leaves)
    return {"out": out.detach(), "x": x.grad, **grads} | {name: handle.grad for name, handle in handles.items()}


def check_pieces(place: Place, case: Case) -> None:
    """The numbers of whole messages, in another order of sums; and these bits for one piece."""
    tp = tensor_mesh(place).tp
    expected = run(tp, case, 1)
    for count in (2, 3, 4, 100):
        found = run(tp, case, count)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.tries("tp_comm_overlap")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_pieces_give_what_whole_messages_give(cluster: Cluster, world_size: int, case: Case) -> None:
    cluster.run(world_size, check_pieces, case)


def test_pieces_cover_all_rows_once() -> None:
    for rows in range(1, 20):
        for count in range(1, 8):
            spans = piece_spans(rows, count)
            assert [row for span in spans for row in range(span.start, span.stop)] == list(range(rows))
            lengths = [span.stop - span.start for span in spans]
            assert len(spans) == min(rows, count) and max(lengths) - min(lengths) <= 1
    assert piece_spans(0, 3) == (slice(0, 0),)
