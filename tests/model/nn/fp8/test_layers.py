"""Linear layers in FP8: what is a product of codes and what is not, which codes every rank has, and when they are made."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from megatron_llama.engine import host_gemm
from megatron_llama.engine.offload_options import OffloadConfig
from megatron_llama.engine.param_handle import param_handle_of
from megatron_llama.launch.launcher import Place
from megatron_llama.model.nn.fp8 import layers
from megatron_llama.model.nn.fp8.codes import Blocks, Tiles, blocks, both_orders, tiles
from megatron_llama.model.nn.fp8.layers import Blockwise, WeightCodes
from megatron_llama.model.nn.fp8.product import product
from megatron_llama.model.nn.linear import ColumnLinear, RowLinear, stacked_outputs
from megatron_llama.model.nn.pieces import InPieces
from megatron_llama.model.plan.fp8 import code_bytes, tile_bytes, weight_code_bytes
from megatron_llama.pipeline.plan.run_engine import rank_bucket_plan
from torch import Tensor, nn

from tests.harness import Cluster
from tests.model.nn.fp8.numbers import normal
from tests.model.nn.handle import Handle
from tests.model.nn.spmd import tensor_mesh
from tests.parallel.cases import Layout, Trainer, trainer

S, B, D, F = 8, 2, 256, 1024
"""Over four ranks every matrix has whole tiles."""


def same(found: Tiles | Blocks, expected: Tiles | Blocks) -> bool:
    return torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8)) and torch.equal(found.scales, expected.scales)


@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_gradients_of_inputs_are_in_fp8_and_those_of_weights_are_not(bias: bool) -> None:
    """The weight's gradient is that of a layer in bf16, to the bit: of the input as it was, not of its codes."""
    tp = tensor_mesh(Place(0, 1, 0)).tp
    x, grad, weight = (normal(*shape, seed=seed) for seed, shape in enumerate([(S, B, D), (S, B, F), (F, D)]))
    added = normal(1, F, seed=4)[0] if bias else None
    found = []
    for products in (Blockwise(), host_gemm):
        layer = ColumnLinear(D, F, tp=tp, sequence_parallel=False, bias=bias, products=products)
        layer.weight = nn.Parameter(weight.clone())
        if added is not None:
            layer.bias = nn.Parameter(added.clone())
        start = x.clone().requires_grad_()
        out = layer(start)
        out.backward(grad)
        found.append((out.detach(), start.grad, layer.weight.grad, None if added is None else layer.bias.grad))
    (out, x_grad, weight_grad, bias_grad), plain = found
    expected = product(tiles(x), blocks(weight))
    assert torch.equal(out, expected if added is None else expected + added)
    # Of the weight itself in the other direction, and not of its codes.
    assert torch.equal(x_grad, product(tiles(grad), blocks(weight.t())))
    assert torch.equal(weight_grad, plain[2]) and (added is None or torch.equal(bias_grad, plain[3]))
    assert not torch.equal(out, plain[0]) and not torch.equal(x_grad, plain[1])


Coded = tuple[Tensor, Tensor, Tensor]
"""Numbers, their codes as bytes, and their scales."""


class Recording(Blockwise):
    """Keeps what it makes codes of, and these."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: dict[str, list[Coded]] = {"input": [], "weight": [], "gradient": [], "back": []}

    def _keep(self, kind: str, numbers: Tensor, made: Tiles | Blocks) -> None:
        self.taken[kind].append((numbers.detach().clone(), made.codes.view(torch.uint8).clone(), made.scales.clone()))

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        self._keep("input", x, tiles(x))
        self._keep("weight", weight, self.codes(weight).forward)
        return super().linear(x, weight, bias)

    def linear_backward(self, grad: Tensor, weight: Tensor) -> Tensor:
        self._keep("gradient", grad, tiles(grad))
        self._keep("back", weight.t(), self.codes(weight).backward)
        return super().linear_backward(grad, weight)


@dataclass(frozen=True)
class Spread:
    """How a column-parallel and a row-parallel layer are spread over tp."""

    sequence_parallel: bool = False
    pieces: int = 1


SPREADS = {"whole rows": Spread(), "sequence": Spread(True), "pieces": Spread(True, 3), "pieces of whole rows": Spread(False, 2)}
COLUMNS = (F, 2 * F)
"""Outputs of two layers with a common input, as queries and shared heads are."""
CUTS: dict[str, dict[str, int | None]] = {
    "column": {"input": None, "weight": 0, "gradient": -1, "back": 1},
    "row": {"input": -1, "weight": 1, "gradient": None, "back": 0},
}
"""The dims that tp cuts: outputs of the stacked layers, inputs of the other. Of the rest every rank multiplies all rows."""


def codes_of_layers(place: Place, spread: Spread) -> dict[str, dict[str, list[Coded]]]:
    """Of each layer: the same inputs, weights and gradients of outputs whatever the layout."""
    tp = tensor_mesh(place).tp
    options = {"tp": tp, "sequence_parallel": spread.sequence_parallel, "overlap": InPieces(spread.pieces) if spread.pieces > 1 else None}
    recorders = {name: Recording() for name in CUTS}
    columns = [ColumnLinear(D, size, **options, products=recorders["column"]) for size in COLUMNS]
    row = RowLinear(F, D, **options, products=recorders["row"])
    for seed, (layer, size) in enumerate(zip(columns, COLUMNS, strict=True)):
        layer.weight = nn.Parameter(normal(size, D, seed=seed).chunk(tp.size)[tp.rank].clone())
    row.weight = nn.Parameter(normal(D, F, seed=7).chunk(tp.size, dim=1)[tp.rank].clone())

    def mine(whole: Tensor) -> Tensor:
        """This rank's rows of an input, or of the gradient of a sum."""
        return (whole.chunk(tp.size)[tp.rank] if spread.sequence_parallel else whole).clone()

    outputs = stacked_outputs(mine(normal(S, B, D, seed=10)).requires_grad_(), columns)
    grads = [normal(S, B, size, seed=20 + seed).chunk(tp.size, dim=-1)[tp.rank] for seed, size in enumerate(COLUMNS)]
    outputs.backward(torch.cat(grads, dim=-1))
    hidden = normal(S, B, F, seed=30).chunk(tp.size, dim=-1)[tp.rank].clone().requires_grad_()
    row(hidden).backward(mine(normal(S, B, D, seed=40)))
    return {name: recorder.taken for name, recorder in recorders.items()}


def bits(kind: str, made: list[Coded]) -> set[tuple[bytes, ...]]:
    """Of rows, in whatever order and pieces they came, or of whole weights."""
    found = set()
    for parts in made:
        rows = [part[None] for part in parts] if kind in ("weight", "back") else [part.reshape(-1, part.shape[-1]) for part in parts]
        found |= {tuple(part.contiguous().view(torch.uint8).numpy().tobytes() for part in row) for row in zip(*rows, strict=True)}
    return found


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.few(3)
def test_every_rank_has_the_codes_of_one_process(cluster: Cluster, ranks: int, spread: str) -> None:
    """To the bit, scales too, of inputs, gradients, and weights in both directions: no tile crosses a cut."""
    [alone] = cluster.run(1, codes_of_layers, Spread())
    for rank, found in enumerate(cluster.run(ranks, codes_of_layers, SPREADS[spread])):
        for layer, kinds in CUTS.items():
            for kind, dim in kinds.items():
                whole = alone[layer][kind]
                cut = whole if dim is None else [tuple(part.chunk(ranks, dim)[rank] for part in parts) for parts in whole]
                assert bits(kind, found[layer][kind]) == bits(kind, cut), (layer, kind, rank)


class Comparing(Blockwise):
    """Compares the codes that it keeps with those of the weight as it is, whenever they are read."""

    made = 0

    def codes(self, weight: Tensor) -> WeightCodes:
        found = super().codes(weight)
        for kept, fresh in zip(found[1:], both_orders(weight), strict=True):
            assert same(kept, fresh), "codes of another weight, or of another version"
        return found


def codes_made(place: Place, layout: Layout) -> tuple[int, int, int, int]:
    """How many weights have had codes made in each of two steps, the bytes of what is kept, and the bytes by plan."""
    made = 0

    def counted(weight: Tensor) -> tuple[Blocks, Blocks]:
        nonlocal made
        made += 1
        return both_orders(weight)

    with pytest.MonkeyPatch.context() as patch:
        products = Comparing()
        patch.setattr(layers, "both_orders", counted)
        patch.setattr(layers, "Blockwise", lambda: products)
        run: Trainer = trainer(place, layout)
        counts = []
        for index in range(3):
            before = made
            run.step(index)
            counts.append(made - before)
            if index == 1:
                run.runtime.evaluate(run.batches(5))
        run.optimizer.settle()
    kept = sum(part.nbytes for codes in products._kept.values() for order in codes[1:] for part in order)
    plan = rank_bucket_plan(run.layout.config(), dp=run.mesh.dp.size, rank=run.mesh.pp.rank, tp_rank=run.mesh.tp.rank)
    return counts[0], counts[2], kept, weight_code_bytes(run.layout.config(), plan)


FP8 = Layout(fp8=True, steps=3)
KEPT = {
    "one process": replace(FP8, microbatches=4),
    "recomputed": replace(FP8, recompute="full", microbatches=2),
    "shared heads": replace(FP8, tp=2, kv_heads=1, sp=True, recompute="selective"),
    "updates under backward": replace(FP8, dp=2, early=True, clip=0.0, strategy="optim_grads", bucket=100_000),
    "zero bubble": replace(FP8, pp=2, schedule="zb-v", microbatches=4),
    "virtual": replace(FP8, pp=2, virtual=2, schedule="interleaved", microbatches=2, layers=8),
    "offload": replace(FP8, dp=2, offload=OffloadConfig(optimizer_offload="exact")),
    "low rank": replace(FP8, tp=2, lora=2, microbatches=2),
}
"""Layouts in which every weight has a slot to itself."""


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.few(2)
def test_codes_are_made_once_for_each_update(cluster: Cluster, name: str) -> None:
    """However many microbatches, recomputations and evaluations read them. Those of frozen weights are never made again."""
    layout = KEPT[name]
    inner = layout.layers - 2
    weights = inner * (5 if layout.tp > layout.kv_heads else 4) // layout.pp
    for first, third, kept, planned in cluster.run(layout.world_size, codes_made, layout):
        # A stage may have no block of those in FP8.
        assert first in {weights, inner * 4, 0} if layout.pp > 1 else first == weights
        # The evaluation before the third step has made those of that version already.
        assert third == 0
        assert kept == planned


@pytest.mark.few(1)
@pytest.mark.parametrize("slots", ["2", "3"])
def test_weights_that_take_turns_in_slots_take_turns_in_codes(cluster: Cluster, slots: str) -> None:
    layout = replace(FP8, dp=2, strategy="optim_grads_params", slots=slots, microbatches=2, recompute="full", layers=6, bucket=10_000_000)
    for first, _, kept, planned in cluster.run(layout.world_size, codes_made, layout):
        assert first > 4 * 4, "made again whenever another weight was there"
        assert kept == planned < 4 * sum(code_bytes(*shape) for shape in ((1024, 128), (128, 512), (1024, 128), (128, 512)))


def test_without_an_engine_codes_are_those_of_the_weight_as_it_is() -> None:
    products, x = Blockwise(), normal(S, B, D, seed=1)
    weight = nn.Parameter(normal(F, D, seed=2))
    assert param_handle_of(weight) is None
    before = products.linear(x, weight)
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(products.linear(x, weight), 2 * before) and not products._kept


def test_codes_of_another_weight_at_the_same_place_are_not_read() -> None:
    """Two weights of equal versions that take turns in a slot."""
    products, slot, x = Blockwise(), torch.empty(F * D, dtype=torch.bfloat16), normal(S, B, D, seed=1)
    for seed in (2, 3, 2):
        weight = nn.Parameter(slot.view(F, D))
        Handle(weight)
        with torch.no_grad():
            weight.copy_(normal(F, D, seed=seed))
        assert torch.equal(products.linear(x, weight), product(tiles(x), blocks(weight)))
    assert len(products._kept) == 1


def test_bytes_of_tiles() -> None:
    made = tiles(normal(S, B, F, seed=1))
    assert tile_bytes(S * B, F) == sum(part.nbytes for part in made)


def test_numbers_that_are_not_finite_reach_the_output() -> None:
    """Which then is no number, and the step is skipped: nothing is clamped in silence."""
    for odd in (torch.inf, torch.nan):
        x, weight = normal(S, B, D, seed=1), normal(F, D, seed=2)
        x[3, 1, 200] = odd
        out = Blockwise().linear(x, weight)
        assert out[3, 1].isnan().all() and out[:3].isfinite().all()
