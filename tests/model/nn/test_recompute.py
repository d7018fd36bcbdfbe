"""Recomputation changes memory and time, and not one bit of the result."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
from megatron_llama.engine.comm.recorder import Traffic
from megatron_llama.launch.launcher import Place
from megatron_llama.model.nn.functional import gated, recomputable_add_norm, recomputable_gated, rms_norm
from megatron_llama.model.nn.linear import column_linear
from megatron_llama.model.nn.moe.rows import ExpertRows
from megatron_llama.model.nn.ops import PLAIN
from megatron_llama.model.nn.recompute import Recomputable, recomputed
from megatron_llama.model.plan.activation_memory import Activations
from megatron_llama.model.plan.chunks import GRANULARITIES, Granularity
from megatron_llama.model.positions import Positions
from megatron_llama.pipeline.build import compute_dtype
from torch import Tensor, nn

from tests.harness import Cluster
from tests.model.nn.dispatch import Dispatched
from tests.model.nn.handle import Handle
from tests.model.nn.spmd import numbers, tensor_mesh
from tests.model.test_activation_memory import BATCH, EXPERTS, FIELDS, Run, build, kept, several, storage
from tests.parallel.cases import MODEL, SEQ_LENGTH, Layout, train, trainer

CPU = torch.device("cpu")
LAYOUTS = [
    Layout(microbatches=2),
    Layout(microbatches=2, bf16=True),
    Layout(tp=2, sp=True),
    pytest.param(Layout(tp=2, kv_heads=1, sp=True), marks=pytest.mark.long),
    Layout(cp=2),
    Layout(dp=2, microbatches=2, strategy="optim_grads"),
    Layout(pp=2, microbatches=4),
    Layout(pp=2, microbatches=4, virtual=2, schedule="zb-v", tied=True),
    Layout(tp=2, pp=2, sp=True, microbatches=4, schedule="zb-h1"),
    Layout(documents=True, microbatches=2),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_training_is_the_same_to_the_bit(cluster: Cluster, layout: Layout) -> None:
    layout = replace(layout, steps=3)
    plain, selective, full = (cluster.run(layout.world_size, train, replace(layout, recompute=r)) for r in ("none", "selective", "full"))
    for record, *others in zip(plain, selective, full, strict=True):
        for other in others:
            assert (other.losses, other.norms, other.parameters) == (record.losses, record.norms, record.parameters)
            for piece, copy in zip(record.pieces, other.pieces, strict=True):
                assert torch.equal(piece.master, copy.master), piece.rectangle


def calls(place: Place, layout: Run) -> tuple[int, int, dict[tuple[str, str], Traffic]]:
    """Of one training step: matrix products, attention kernels, messages."""
    run = trainer(place, layout)
    run.step(0)
    batches, recorder = run.batches(1), run.mesh.recorder
    recorder.traffic.clear()
    with Dispatched() as dispatched:
        run.runtime.step(batches)
    names = [name for name, *_ in dispatched.calls]
    products = sum(name in ("mm", "addmm", "bmm", "baddbmm") for name in names)
    return products, sum("flash_attention" in name for name in names), recorder.traffic


BLOCKS, MICROBATCHES = MODEL.num_hidden_layers, 2
FORWARD = 4
"""Matrix products of a block's forward pass."""


@pytest.mark.long
@pytest.mark.parametrize("layers", ["all", "3", "0"])
@pytest.mark.parametrize(("tp", "sp"), [(1, False), (2, False), (2, True)])
def test_what_is_computed_and_sent_again(cluster: Cluster, tp: int, sp: bool, layers: str) -> None:
    layout = Run(tp=tp, sp=sp, microbatches=MICROBATCHES, recompute_layers=layers)
    again = MICROBATCHES * (BLOCKS if layers == "all" else int(layers))
    plain, selective, full = (cluster.run(tp, calls, replace(layout, recompute=r)) for r in ("none", "selective", "full"))
    assert selective == plain
    for (products, attentions, traffic), (more, attended, messages) in zip(plain, full, strict=True):
        # A head, and two products of gradients for each product forward.
        assert products == 3 * MICROBATCHES * (FORWARD * BLOCKS + 1) and attentions == 2 * MICROBATCHES * BLOCKS
        assert more - products == FORWARD * again and attended - attentions == again
        extra = {key: value.calls - traffic.get(key, Traffic()).calls for key, value in messages.items()}
        extra = {key: count for key, count in extra.items() if count}
        # With sequence parallelism two gathers and two reductions; without it two sums, and the input that was divided.
        kinds = {("tp", "all_gather"): 2 * again, ("tp", "reduce_scatter"): 2 * again} if sp else {}
        kinds |= {("tp", "all_reduce"): 2 * again, ("tp", "all_gather"): again} if tp > 1 and not sp else {}
        assert extra == {key: count for key, count in kinds.items() if count}


def tensors_of(work: Any) -> Iterator[Tensor]:
    if isinstance(work, Tensor):
        yield work
    elif isinstance(work, partial):
        yield from tensors_of((*work.args, *work.keywords.values()))
    elif isinstance(work, list | tuple):
        for inner in work:
            yield from tensors_of(inner)
    elif isinstance(work, ExpertRows):
        yield from tensors_of([*vars(work).values()])
    elif isinstance(work, FunctionType):
        yield from tensors_of([cell.cell_contents for cell in work.__closure__ or ()])


def deferred(place: Place, layout: Run) -> tuple[int, int]:
    """Bytes held between the halves of a split backward pass of the blocks of a stage: found, expected."""
    config = layout.config()
    _, stage = build(place, config)
    weights = {weight: Handle(weight, put_off=True) for weight in stage.model.layers.parameters()}
    length = SEQ_LENGTH // (layout.tp if layout.sp else 1)
    x = torch.randn(length, BATCH, MODEL.hidden_size, dtype=compute_dtype(config), requires_grad=True)
    positions = stage.positions(SEQ_LENGTH, CPU)
    several(stage.model.layers, BLOCKS, x, positions).square().sum().backward()
    gone = weakref.ref(positions)
    del positions
    assert gone() is None, "what a pass has read is kept for weight gradients"
    held = {storage(t): t.untyped_storage().nbytes() for handle in weights.values() for work in handle.work for t in tensors_of(work)}
    parameters = {storage(weight) for weight in stage.parameters()}
    found = sum(size for key, size in held.items() if key not in parameters)
    for handle in weights.values():
        for work in handle.work:
            work()
        assert handle.written == 1 and bool(handle.grad.isfinite().all())
    return found, Activations.from_config(config).postponed_blocks(range(BLOCKS), layout.recompute)


SPLIT = [Run(), Run(tp=2), Run(tp=2, sp=True), Run(kv_heads=4), Run(tp=2, sp=True, kv_heads=1)]
SPLIT += [replace(run, bf16=True) for run in SPLIT]
SPLIT += [Run(tp=2, sp=True, fields=tuple(fields.items())) for fields in FIELDS.values()]
SPLIT += [Run(bf16=True, fields=tuple(fields.items())) for fields in FIELDS.values() if "num_experts" in fields]


@pytest.mark.long
@pytest.mark.few(1, all=8)
@pytest.mark.parametrize("recompute", GRANULARITIES)
@pytest.mark.parametrize("layout", SPLIT, ids=lambda layout: " ".join((layout.name, *dict(layout.fields))))
def test_a_split_pass_keeps_what_the_formula_says(cluster: Cluster, layout: Run, recompute: Granularity) -> None:
    """Biases and norms have their gradients in the first half."""
    found = cluster.run(layout.tp, deferred, replace(layout, recompute=recompute))
    assert all(held == expected for held, expected in found), found


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_split_pass_where_ranks_divide_experts(cluster: Cluster, recompute: Granularity) -> None:
    """With recomputation the tokens that were gathered once are kept for the weight gradient."""
    layout = Run(dp=2, ep=2, bf16=True, recompute=recompute, fields=tuple(EXPERTS.items()))
    found = cluster.run(2, deferred, layout)
    assert all(held == expected for held, expected in found), found


def test_a_split_pass_makes_the_input_only_with_the_weight_gradient() -> None:
    made: list[int] = []

    def make(x: Tensor) -> Tensor:
        made.append(1)
        return x * 2

    weight = torch.nn.Parameter(numbers(3, 4, seed=2).detach())
    handle, x = Handle(weight, put_off=True), numbers(5, 2, 4, seed=1)
    tp = tensor_mesh(Place(0, 1, 0)).tp
    column_linear(Recomputable(x * 2, make, (x.detach(),)), weight, tp, sequence_parallel=False).sum().backward()
    assert made == [] and torch.equal(x.grad, 2 * weight.sum(0).expand_as(x))
    handle.work[0]()
    assert made == [1] and torch.allclose(handle.grad, (2 * x).sum((0, 1)).expand_as(weight))


Blocks = tuple[nn.Module, Positions, Tensor]


def blocks_of(recompute: Granularity, place: Place, layout: Run) -> Blocks:
    """The blocks of a stage with trainable weights, and an input that does not require grad, as above a frozen embedding."""
    config = replace(layout, recompute=recompute).config()
    mesh, stage = build(place, config)
    length = SEQ_LENGTH // (layout.tp if layout.sp else 1)
    seed = torch.Generator().manual_seed(mesh.tp.rank if layout.sp else 0)
    return (stage.model.layers, stage.positions(SEQ_LENGTH, CPU), torch.randn(length, BATCH, MODEL.hidden_size, generator=seed))


def freeze(blocks: nn.Module, frozen: str) -> None:
    for name, weight in blocks.named_parameters():
        weight.requires_grad_(re.match(frozen, name) is None)


def above_frozen(place: Place, layout: Run, frozen: str) -> tuple[list[int], list[bool]]:
    """Bytes that blocks keep with each granularity; whether output and gradients are those without recomputation."""
    sizes, outputs, gradients = [], [], []
    for recompute in GRANULARITIES:
        blocks, positions, x = blocks_of(recompute, place, layout)
        freeze(blocks, frozen)
        uncounted = {storage(tensor) for tensor in (*blocks.parameters(), positions.cos, positions.sin)}
        sizes.append(kept(lambda blocks=blocks, x=x, p=positions: several(blocks, BLOCKS, x, p), uncounted))
        output = several(blocks, BLOCKS, x, positions)
        output.backward(torch.cos(torch.arange(output.numel(), dtype=output.dtype)).view(output.shape))
        outputs.append(output.detach())
        gradients.append({name: weight.grad for name, weight in blocks.named_parameters() if weight.grad is not None})
        assert x.grad is None and gradients[-1].keys() == {n for n, w in blocks.named_parameters() if w.requires_grad}
    pairs = zip(outputs[1:], gradients[1:], strict=True)
    return sizes, [torch.equal(o, outputs[0]) and all(torch.equal(g[n], v) for n, v in gradients[0].items()) for o, g in pairs]


@pytest.mark.long
@pytest.mark.parametrize("frozen", ["nothing", r"0\.", r"[01]\.", r"(0\.|1\.self_attn|1\.input)", r"\d\.mlp"])
@pytest.mark.parametrize("layout", [Run(), Run(tp=2), Run(tp=2, sp=True)], ids=lambda layout: layout.name)
def test_above_frozen_layers_recomputing_saves_memory_and_changes_nothing(cluster: Cluster, layout: Run, frozen: str) -> None:
    full = Activations.from_config(layout.config()).block("full")
    untouched = sum(re.match(frozen, f"{block}.") is not None for block in range(BLOCKS))
    for sizes, same in cluster.run(layout.tp, above_frozen, layout, frozen):
        assert same == [True, True]
        assert sizes[0] > sizes[1] > sizes[2] == (BLOCKS - untouched) * full


@pytest.mark.parametrize("wanted", [False, True])
def test_an_input_that_wants_no_gradient_gets_none(wanted: bool) -> None:
    """Nor is one computed inside."""
    seen, weight = list[bool](), numbers(4, seed=3)

    def function(x: Tensor) -> Tensor:
        seen.append(x.requires_grad)
        return x * weight

    x = numbers(3, 4, seed=1).detach().requires_grad_(wanted)
    recomputed(function, x, weights=[weight]).sum().backward()
    assert seen == [False, wanted] and torch.equal(weight.grad, x.detach().sum(0))
    assert torch.equal(x.grad, weight.expand_as(x)) if wanted else x.grad is None


def test_frozen_blocks_without_gradient_of_their_input_have_no_backward() -> None:
    for recompute in GRANULARITIES:
        blocks, positions, x = blocks_of(recompute, Place(0, 1, 0), Run())
        freeze(blocks, r"\d\.")
        assert kept(lambda blocks=blocks, x=x, p=positions: several(blocks, BLOCKS, x, p), set()) == 0
        assert not several(blocks, BLOCKS, x, positions).requires_grad
        several(blocks, BLOCKS, x.requires_grad_(), positions).sum().backward()
        assert x.grad is not None and all(weight.grad is None for weight in blocks.parameters())


def test_recipes_make_the_same_tensor_without_the_graph() -> None:
    x, scale = (numbers(3, 2, 8, seed=3).detach().bfloat16().requires_grad_(), torch.linspace(0.5, 2, 8).bfloat16())
    pairs = [(recomputable_gated(x, gate), gated(x, gate)) for gate in (PLAIN.gate("silu"), PLAIN.gate("gelu_pytorch_tanh"))]
    for one_plus in (False, True):
        norm = rms_norm(x, scale, 1e-5, one_plus=one_plus)
        pairs.append((recomputable_add_norm(x, None, scale, 1e-5, one_plus=one_plus)[1], norm))
    for recipe, plain in pairs:
        again = recipe.function(*recipe.sources)
        assert torch.equal(recipe.value, plain) and torch.equal(again, plain) and not again.requires_grad
        assert recipe.value.grad_fn is not None


def test_no_graph_no_recomputation() -> None:
    """Evaluation, and an input that needs no gradient while the weights inside do."""
    weight, runs = numbers(4, 4, seed=6), list[bool]()

    def function(x: Tensor) -> Tensor:
        runs.append(torch.is_grad_enabled())
        return x @ weight

    x = numbers(2, 4, seed=7)
    with torch.no_grad():
        assert recomputed(function, x).grad_fn is None
    recomputed(function, x.detach()).sum().backward()
    assert runs == [False, True] and weight.grad is not None
    expected = weight.grad
    weight.grad = None
    recomputed(function, x).sum().backward()
    assert runs == [False, True, False, True] and torch.equal(weight.grad, expected)


def uneven(place: Place) -> Tensor:
    """An input of an odd number of elements cannot be divided: it is kept whole, and no rank waits for another."""
    x = numbers(3, 3, seed=8)
    recomputed(torch.sin, x, shared=tensor_mesh(place).tp).sum().backward()
    return x.grad


@pytest.mark.long
def test_an_input_that_does_not_divide(cluster: Cluster) -> None:
    for grad in cluster.run(2, uneven):
        assert torch.equal(grad, numbers(3, 3, seed=8).cos())
