"""A tape differentiates as autograd does, bit for bit, keeps as much and no longer, and says what it cannot follow."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from functools import partial

import pytest
import torch
from megatron_llama.distributed.mesh import Place
from megatron_llama.model import llama
from megatron_llama.nn.functional import added, joined, swiglu
from megatron_llama.nn.linear import plain_linear
from megatron_llama.nn.tape import backward, differentiated, taped
from torch import Tensor, nn

from tests.harness import Cluster
from tests.nn.spmd import numbers, tensor_mesh
from tests.parallel.cases import Layout, trainer, whole_parameters
from tests.plans.test_activation_memory import kept

TP = tensor_mesh(Place(0, 1, 0)).tp
LAYOUTS = [
    Layout(microbatches=2),
    Layout(bf16=True, documents=True),
    Layout(recompute="full", freeze=("model.embed_tokens.*", "model.layers.0.*")),
    Layout(recompute="selective", lora=4),
    Layout(tp=2, sp=True, lora=4),
    Layout(tp=2, kv_heads=1, cp=2),
    Layout(pp=2, microbatches=2, schedule="zb-h1"),
]


def trained(place: Place, layout: Layout, by_tape: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and norms, and the weights, after two steps."""
    run = trainer(place, layout)
    with pytest.MonkeyPatch.context() as patch:
        if not by_tape:
            patch.setattr(llama, "taped", lambda function, x, weights: function(x))
        found = [number for step in range(2) for number in run.step(step)]
    return found, [parameter.clone() for _, parameter in whole_parameters(run)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_training_is_that_of_autograd_to_the_bit(cluster: Cluster, layout: Layout) -> None:
    pairs = zip(*(cluster.run(layout.world_size, trained, layout, by_tape) for by_tape in (True, False)), strict=True)
    for ours, plain in pairs:
        for one, other in zip(ours, plain, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def network(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Two ways that meet, and operators of torch's on one of them."""
    wide = plain_linear(x, first, TP)
    inner = swiglu(joined(wide, differentiated(lambda value: value.sin() * second.sum(), wide, weights=[second])))
    return added(plain_linear(inner, first.detach(), TP), x)


@pytest.mark.parametrize("wanted", [True, False])
def test_gradients_of_input_and_weights(wanted: bool) -> None:
    """Of weights without a home they are added to what is there."""
    found = []
    for run in (network, lambda x, *weights: taped(lambda y: network(y, *weights), x, weights=weights)):
        first, second = (nn.Parameter(numbers(4, 4, seed=seed).detach()) for seed in (2, 3))
        x = numbers(3, 4, seed=1).detach().requires_grad_(wanted)
        for _ in range(2):
            output = run(x, first, second)
            output.backward(torch.cos(output.detach()))
        found.append([output.detach(), first.grad, second.grad] + [x.grad] * wanted)
        assert (x.grad is None) is not wanted
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_without_backward_nothing_is_kept() -> None:
    first, second = numbers(4, 4, seed=2).detach(), numbers(4, 4, seed=3).detach()
    x = numbers(3, 4, seed=1)
    with torch.no_grad():
        assert taped(lambda y: network(y, first, second), x).grad_fn is None
    assert not taped(lambda y: network(y, first, second), x.detach(), weights=[first]).requires_grad


def test_what_is_kept_is_what_autograd_keeps_and_goes_with_the_graph() -> None:
    """Without the collector: nothing that holds a tensor is in a circle."""
    x, first, second = numbers(3, 4, seed=1), numbers(4, 4, seed=2), numbers(4, 4, seed=3)
    sizes = [
        kept(lambda run=run: run(x), set())
        for run in (lambda y: network(y, first, second), partial(taped, lambda y: network(y, first, second)))
    ]
    assert sizes[0] == sizes[1] > 0
    seen: list[weakref.ref[Tensor]] = []

    def watched(y: Tensor) -> Tensor:
        inner = plain_linear(y, first, TP)
        seen.extend((weakref.ref(y), weakref.ref(inner)))
        return plain_linear(inner, second, TP)

    gc.disable()
    try:
        for again in (False, True):
            output = taped(watched, x)
            assert all(reference() is not None for reference in seen)
            if again:
                output.sum().backward()
            del output
            assert all(reference() is None for reference in seen)
            seen.clear()
    finally:
        gc.enable()


def test_an_operator_that_no_tape_follows_is_noticed() -> None:
    """Its gradient would be missing without a word."""
    x, weight = numbers(3, 4, seed=1), numbers(4, 4, seed=2)
    with pytest.raises(RuntimeError, match="the result comes from an operator that is on no tape"):
        taped(lambda y: plain_linear(y, weight, TP).sin(), x)
    output = taped(lambda y: added(plain_linear(y, weight, TP), plain_linear(y, weight, TP).sin()), x)
    with pytest.raises(RuntimeError, match="_Linear: no gradient came back to an output: what has read it is on no tape"):
        output.sum().backward()


def test_backward_from_a_gradient() -> None:
    """As torch has it, but without loading what takes half a second."""
    x, grad = numbers(3, 4, seed=1), numbers(3, 4, seed=2).detach()
    backward(x.sin(), grad)
    assert torch.equal(x.grad, grad * x.detach().cos())
    program = (
        "import sys, torch\nfrom megatron_llama.distributed.mesh import Place\nfrom tests.parallel.cases import Layout, trainer\n"
        "trainer(Place(0, 1, 0), Layout(recompute='full', documents=True)).step(0)\nassert 'sympy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
