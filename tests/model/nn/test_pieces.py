"""Messages of tensor parallelism in pieces: the layers against those with whole messages and against one process; order, number and bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from unittest import mock

import pytest
import torch
from megatron_llama.engine import host_gemm as gemm
from megatron_llama.engine.comm import collectives
from megatron_llama.engine.comm.collectives import Pending
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.errors import ConfigError
from megatron_llama.launch.launcher import Place
from megatron_llama.model.nn.functional import recomputable_gated
from megatron_llama.model.nn.linear import ColumnLinear, RowLinear, stacked_outputs
from megatron_llama.model.nn.lora import ColumnAdapters, Part, RowAdapter
from megatron_llama.model.nn.ops import PLAIN
from megatron_llama.model.nn.overlap import TensorOverlap, tensor_overlap
from megatron_llama.model.nn.pieces import InPieces
from megatron_llama.model.nn.recompute import recomputed
from megatron_llama.model.nn.symmetric import Operators, SymmetricMemory
from megatron_llama.model.plan.pieces import chosen_pieces, piece_spans
from megatron_llama.model.plan.tensor_messages import block_messages
from megatron_llama.train.setup.resolve import problems
from torch import Tensor, nn
from torch.distributed._symmetric_memory import _fused_all_gather_matmul_fallback, _fused_matmul_reduce_scatter_fallback

from tests.harness import Cluster
from tests.model.nn.handle import Handle
from tests.model.nn.spmd import numbers, tensor_mesh
from tests.oracle.messages import step_messages
from tests.parallel.cases import Layout
from tests.refused import refused

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


def run(tp: Axis, case: Case, overlap: TensorOverlap | None) -> dict[str, Tensor]:
    """Output and all gradients of a column-parallel layer, a gate, and a row-parallel one, whose messages are hidden so."""
    options = {"tp": tp, "sequence_parallel": case.sequence_parallel, "bias": case.bias, "overlap": overlap}
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
    expected = run(tp, case, None)
    for cut in (2, 3, 4, 100):
        found = run(tp, case, InPieces(cut))
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
        for cut in range(1, 8):
            spans = piece_spans(rows, cut)
            assert [row for span in spans for row in range(span.start, span.stop)] == list(range(rows))
            lengths = [span.stop - span.start for span in spans]
            assert len(spans) == min(rows, cut) and max(lengths) - min(lengths) <= 1
    assert piece_spans(0, 3) == (slice(0, 0),)


def check_operators(place: Place, case: Case) -> None:
    """Torch's own plain versions of the fused operators, over gloo, in the place of those for NVLink."""
    mesh = tensor_mesh(place)
    operators = Operators(_fused_all_gather_matmul_fallback, _fused_matmul_reduce_scatter_fallback)
    expected, found = run(mesh.tp, case, None), run(mesh.tp, case, SymmetricMemory(mesh, operators))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("case", [case for case in CASES.values() if case.sequence_parallel], ids=[name for name, case in CASES.items() if case.sequence_parallel])
def test_fused_operators_give_what_whole_messages_give(cluster: Cluster, case: Case) -> None:
    cluster.run(3, check_operators, case)


def test_fused_operators_are_refused_without_gpus_that_nvlink_joins() -> None:
    config = Layout(tp=2, sp=True, tp_comm="symm_mem").sized()
    axis = Axis("tp", 0, (0, 1), None, Mesh.single().recorder)
    with pytest.raises(ConfigError) as error:
        tensor_overlap(config, replace(Mesh.single(), tp=axis))
    assert refused(error.value).where == "--tp-comm-overlap"
    [problem] = set(problems(Layout(tp=2, tp_comm="symm_mem").sized(), 2)) - set(problems(config, 2))
    assert refused(problem).do.startswith("give --sequence-parallel")


def check_order(place: Place) -> None:
    """On a rank of three, with three pieces."""
    tp = tensor_mesh(place).tp
    done: list[str] = []

    def logged(name: str, issue: Callable[..., Pending]) -> Callable[..., Pending]:
        numbers = count()

        def call(*tensors: Tensor | Axis, **options: bool) -> Pending:
            pending, number = issue(*tensors, **options), next(numbers)
            done.append(f"{name} {number}")
            finish = pending.finish

            def wait() -> None:
                done.append(f"wait {name} {number}")
                if finish is not None:
                    finish()

            pending.finish = wait
            return pending

        return call

    def product(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        done.append(f"multiply {x.shape[0] * x.shape[1]}")
        linear_into(out, x, weight, bias)

    linear_into = gemm.linear_into
    options = {"tp": tp, "sequence_parallel": True, "overlap": InPieces(3)}
    column, row = ColumnLinear(D, F, **options), RowLinear(F, D, **options)
    for layer in (column, row):
        layer.weight = nn.Parameter(numbers(*layer.weight.shape, seed=1).detach())
        Handle(layer.weight, log=lambda: done.append("weight"))
    x = numbers(S, B, D, seed=30).detach().chunk(tp.size)[tp.rank].clone().requires_grad_()
    with (
        mock.patch.object(collectives, "all_gather", logged("gather", collectives.all_gather)),
        mock.patch.object(collectives, "reduce_scatter", logged("sum", collectives.reduce_scatter)),
        mock.patch.object(gemm, "linear_into", product),
    ):
        hidden = column(x)
        forward, done[:] = list(done), []
        out = row(hidden)
        summed, done[:] = list(done), []
        grad = torch.ones_like(out)
        torch.autograd.grad(out, hidden, grad, retain_graph=True)
    # Four rows of a rank in pieces of 1, 1 and 2, two tokens to a row. The middle rank has others on both sides.
    both = {1: [1, 1]}.get(tp.rank, [2])
    others = [[f"multiply {ranks * rows * B}" for ranks in both] for rows in (1, 1, 2)]
    gathered = ["multiply 8", "wait gather 0", *others[0], "gather 2", "wait gather 1", *others[1], "wait gather 2", *others[2]]
    assert forward == ["gather 0", "gather 1", "weight", *gathered]
    sums = [what for piece, rows in enumerate((1, 1, 2)) for what in (f"multiply {3 * rows * B}", f"sum {piece}")]
    assert summed == ["weight", *sums, "wait sum 0", "wait sum 1", "wait sum 2"]
    backward = [word.replace("gather 0", "gather 3").replace("gather 1", "gather 4").replace("gather 2", "gather 5") for word in gathered]
    # A gradient is gathered to its place, which no piece leaves to the next.
    backward.remove("gather 5")
    assert done == ["gather 3", "gather 4", "gather 5", "weight", *backward]


class Told(Handle):
    """Says when its gradient is written."""

    def __init__(self, layer: nn.Module, say: Callable[[], object]) -> None:
        layer.weight = nn.Parameter(numbers(*layer.weight.shape, seed=1).detach())
        super().__init__(layer.weight)
        self.say = say

    def grad_written(self) -> None:
        super().grad_written()
        self.say()


def check_kept(place: Place) -> None:
    """Of three pairs of a column- and a row-parallel layer, of which the middle one is recomputed in one of two runs."""
    tp = tensor_mesh(place).tp
    done: list[str] = []

    def issued(*tensors: Tensor | Axis, **options: bool) -> Pending:
        pending = all_gather(*tensors, **options)
        finish = pending.finish

        def wait() -> None:
            done.append("wait")
            if finish is not None:
                finish()

        pending.finish = wait
        return pending

    all_gather = collectives.all_gather
    options = {"tp": tp, "sequence_parallel": True, "overlap": InPieces(3)}
    pairs = [(ColumnLinear(D, F, **options), RowLinear(F, D, **options)) for _ in range(3)]
    told = [[Told(layer, lambda name=f"{kind} {number}": done.append(name)) for kind, layer in zip(("column", "row"), pair, strict=True)] for number, pair in enumerate(pairs)]
    start = numbers(S, B, D, seed=30).detach().chunk(tp.size)[tp.rank].clone()
    grads = []
    for recompute in (False, True):
        x = start.clone().requires_grad_()
        out = x
        for number, (column, row) in enumerate(pairs):
            pair = nn.Sequential(column, row)
            out = recomputed(pair, out) if recompute and number == 1 else pair(out)
        done.clear()
        with mock.patch.object(collectives, "all_gather", issued):
            out.square().sum().backward()
        words = [word for word in done if word != "wait"]
        grads.append([handle.grad.clone() for pair in told for handle in pair])
        assert all(handle.written == 1 for pair in told for handle in pair)
        for pair in told:
            for handle in pair:
                handle.written = 0
        if recompute:
            # A pass inside a pass ends with what it has kept, and leaves alone what is not its own.
            assert words == ["column 2", "column 1", "row 1", "row 2", "row 0", "column 0"]
        else:
            assert words == ["column 2", "row 2", "row 1", "column 1", "column 0", "row 0"]
            # The third layer's waits are for its own pieces and those of the next column; then comes the gradient, before the first wait of the next layer.
            assert done.index("row 2") == done.index("column 2") + 1
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other)


def test_a_weight_gradient_waits_for_the_message_of_the_next_row_parallel_layer(cluster: Cluster) -> None:
    cluster.run(2, check_kept)


def check_failed(place: Place) -> None:
    """A pass that fails between two row-parallel layers, and one behind it."""
    tp = tensor_mesh(place).tp
    options = {"tp": tp, "sequence_parallel": True, "overlap": InPieces(2)}
    first, second = RowLinear(F, D, **options), RowLinear(D * tp.size, D, **options)
    handles = [Told(layer, lambda: None) for layer in (first, second)]

    class Broken(Exception):
        pass

    def fail(grad: Tensor) -> None:
        raise Broken

    x = numbers(S, B, F // tp.size, seed=3).detach().requires_grad_()
    between = torch.cat([first(x)] * tp.size)
    hook = between.register_hook(fail)
    with pytest.raises(Broken):
        second(between).sum().backward()
    hook.remove()
    assert [handle.written for handle in handles] == [0, 0]
    first(x).sum().backward()
    assert [handle.written for handle in handles] == [1, 0]


def test_what_a_failed_pass_has_kept_counts_in_no_other(cluster: Cluster) -> None:
    cluster.run(2, check_failed)


def test_a_piece_travels_while_another_is_multiplied(cluster: Cluster) -> None:
    """Of both layers forward, and of the row-parallel one backward: no product waits for a message but the next piece's."""
    cluster.run(3, check_order)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, sp=True),
        Layout(tp=2, sp=True, tp_comm="3", microbatches=2),
        Layout(tp=4, sp=True, kv_heads=1, tp_comm="2", bf16=True),
        Layout(tp=2, cp=2, sp=True, tp_comm="100"),
        Layout(tp=2, tp_comm="2"),
        Layout(tp=2, cp=2),
    ],
    ids=lambda layout: layout.name,
)
def test_messages_of_a_block_are_planned(layout: Layout) -> None:
    """Against the count of a whole step, less that of a model with a block less. The norms' gradients, once a step, are no messages of a block."""
    whole, less = (step_messages(replace(layout, layers=layers).sized(), layout.world_size, 0) for layers in (4, 3))
    both = [(whole["tp", kind], less["tp", kind]) for kind in (("all_gather", "reduce_scatter") if layout.sp else ("all_reduce",))]
    planned = block_messages(layout.sized())
    assert planned.forward + planned.backward == sum(more[0] - fewer[0] for more, fewer in both) / layout.microbatches > 0
    assert planned.forward_bytes + planned.backward_bytes == sum(more[1] - fewer[1] for more, fewer in both) / layout.microbatches


def test_auto_leaves_pieces_that_are_worth_a_message() -> None:
    sizes = {(1, 512): 1, (2, 256): 1, (2, 1024): 2, (2, 8192): 4, (8, 8192): 4, (8, 4096): 2}
    for (tp, length), expected in sizes.items():
        config = Layout(tp=tp, sp=True, tp_comm="auto").config()
        training = replace(config.training, seq_length=length, micro_batch_size=1)
        assert chosen_pieces(replace(config, training=training)) == expected, (tp, length)
    assert chosen_pieces(Layout(tp=2).sized()) == chosen_pieces(Layout(tp_comm="4").sized()) == 1
