"""Units that torch.compile has compiled: one graph, no hook in it, and the bits of the model that is not compiled where the backend keeps
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from megatron_llama.engine.shard.passes import COMPILE_HINT
from megatron_llama.launch.launcher import Place

from tests.engine.shard.models import Net, difference, net, part, plain, sharded, train

if TYPE_CHECKING:
    from torch._dynamo.testing import CompileCounterWithBackend

SINGLE = Place(0, 1, 0)
Compile = Callable[[Net, "CompileCounterWithBackend"], None]


def counting(backend: str) -> CompileCounterWithBackend:
    """A backend that counts graphs. Its module imports much of the compiler, for these tests alone."""
    from torch._dynamo.testing import CompileCounterWithBackend

    return CompileCounterWithBackend(backend)


def in_place(model: Net, backend: CompileCounterWithBackend) -> None:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)


def wrapped(model: Net, backend: CompileCounterWithBackend) -> None:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend=backend, fullgraph=True)


def inside(model: Net, backend: CompileCounterWithBackend) -> None:
    for block in model.blocks:
        block.feed.compile(backend=backend, fullgraph=True)


def outside(model: Net, backend: CompileCounterWithBackend) -> None:
    model.compile(backend=backend)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.few(4, all=6)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("compile_units", "after", "graphs"),
    [(in_place, False, 1), (in_place, True, 1), (wrapped, False, 1), (inside, True, 1), (outside, True, None)],
)
def test_compiled_units_are_one_graph(compile_units: Compile, after: bool, graphs: int | None, backend: str) -> None:
    counter = counting(backend)
    model = net()
    if not after:
        compile_units(model, counter)
    expected = plain(net(), world=1, microbatches=2, steps=3)
    with sharded(model, microbatches=2) as engine:
        if after:
            compile_units(model, counter)
        found = train(SINGLE, engine, microbatches=2, steps=3)
    found.parameters = {name.replace("_orig_mod.", ""): values for name, values in found.parameters.items()}
    assert difference(found, expected) < 1e-7
    # All blocks have one graph: they are of one class, and the guards hold for each.
    assert counter.frame_count == graphs if graphs else counter.frame_count > 0


@pytest.mark.parametrize("way", ["reentrant", "not reentrant"])
def test_compiled_units_under_checkpoint(way: str) -> None:
    model = net(way)
    in_place(model, counting("aot_eager"))
    with sharded(model, microbatches=2) as engine:
        found = train(SINGLE, engine, microbatches=2, steps=3)
    assert difference(found, plain(net(way), world=1, microbatches=2, steps=3)) < 1e-7


def test_a_whole_graph_around_a_unit_is_refused_with_a_remedy() -> None:
    with sharded(net()) as engine:
        wrapped(engine.model, counting("eager"))
        with pytest.raises(torch._dynamo.exc.Unsupported, match=COMPILE_HINT.partition("(")[0]):
            engine.model(part(0, 0, 0))
