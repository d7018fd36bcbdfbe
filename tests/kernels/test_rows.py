"""Rows brought to their experts and back by Triton's kernels, against torch's operators, bit for bit where these have one order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from megatron_llama.config.schema import ModelConfig
from megatron_llama.model.nn.fp8.experts import BlockwiseExperts
from megatron_llama.model.nn.fp8.layers import Blockwise
from megatron_llama.model.nn.moe import rows
from megatron_llama.model.nn.moe.experts import expert_mlp
from megatron_llama.model.nn.moe.routing import Router, route
from megatron_llama.model.nn.moe.rows import TokenRows
from megatron_llama.model.nn.ops import PLAIN, Gate
from megatron_llama.model.plan.dispatch import largest_load
from megatron_llama.model.plan.expert_memory import ExpertActivations
from megatron_llama.planner.expert_work import _bytes_of_codes, _MovedByKernels
from torch import Tensor

from tests.kernels.closeness import DTYPES, draw, error
from tests.kernels.test_experts import NothingAsked
from tests.model.nn.handle import Handle
from tests.model.nn.moe.reference import Sizes

pytestmark = pytest.mark.kernels
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
KINDS = ("experts here", "some elsewhere", "none here", "sent to ranks")
EACH_KIND = pytest.mark.parametrize("kind", KINDS)
EACH_SIZE = pytest.mark.parametrize(("tokens", "chosen", "width"), [(19, 3, 300), (9, 1, 7), (1, 8, 256)], ids=str)


def token_rows(kind: str, tokens: int, chosen: int, device: torch.device) -> TokenRows:
    """Of a table whose places have a row each; or half of them; or none, with room for all; or of the places that have one, and no more."""
    generator = torch.Generator().manual_seed(3)
    experts = torch.rand(tokens, 12, generator=generator).argsort(1)[:, :chosen].to(device)
    if kind == "sent to ranks":
        ranks = torch.where(experts < 6, experts // 3, 2)
        order = torch.sort(ranks.flatten(), stable=True).indices[: int((ranks < 2).sum())]
        # A rank has always something to send.
        return TokenRows(chosen, order, ranks == 2) if len(order) else token_rows("experts here", tokens, chosen, device)
    count = {"experts here": 12, "some elsewhere": 6, "none here": 1}[kind]
    most = None if kind == "experts here" else tokens * min(chosen, count)
    here = torch.ones_like(experts) if kind == "none here" else experts.clamp(max=count)
    found = rows.sorted_rows(here, count, torch.float32, most=most)
    assert found.sizes is None
    return found


def used(groups: TokenRows) -> int:
    """Rows that hold something."""
    return len(groups.order) if groups.end is None else int(groups.end)


@contextmanager
def by_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(rows, "waits_for_nothing", lambda tensor, dtype: False)
        yield


class BeginsAsNaN(NothingAsked):
    """Of memory that nothing was written to."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(function, types, args, kwargs)
        is_empty = function.overloadpacket.__name__ in {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
        return made.fill_(torch.nan) if is_empty and made.is_floating_point() else made


def both_ways(body: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """What kernels and torch's operators make of it."""
    with BeginsAsNaN():
        found = body()
    with by_torch(monkeypatch):
        return found, body()


def same_bits(one: Tensor, other: Tensor) -> bool:
    whole = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return one.dtype is other.dtype and torch.equal(one.view(whole), other.view(whole))


@EACH_KIND
@EACH_SIZE
@EACH_DTYPE
def test_rows_are_moved_and_weighted(
    dtype: torch.dtype, tokens: int, chosen: int, width: int, kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit; what is behind the last row of an expert stays as it is."""
    groups = token_rows(kind, tokens, chosen, device)
    end = used(groups)
    x = draw(tokens, 2 * width, seed=1, device=device, dtype=dtype)[:, :width]
    weights = draw(chosen, tokens, seed=2, device=device).t()
    values = draw(len(groups.order), width, seed=3, device=device, dtype=dtype)

    def in_place() -> Tensor:
        changed = values.clone()
        groups.weigh(changed, weights)
        return changed

    for number, body in enumerate((lambda: groups.gather(x), lambda: groups.gather(x, weights), lambda: groups.weighted(values, weights), in_place)):
        found, expected = both_ways(body, monkeypatch)
        assert same_bits(found[:end], expected[:end]), number
        assert same_bits(found[end:], values[end:]) if number == 3 else found[end:].isnan().all(), number


@pytest.mark.parametrize("weighted", [False, True], ids=["sums", "weighted sums"])
@EACH_KIND
@EACH_SIZE
@EACH_DTYPE
def test_rows_are_summed(
    dtype: torch.dtype, tokens: int, chosen: int, width: int, kind: str, weighted: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, the signs of zeros too: in fp32, in the order of the table. What is behind the last row of an expert, and the weights of
    experts elsewhere, may be anything."""
    groups = token_rows(kind, tokens, chosen, device)
    values = draw(len(groups.order), width, seed=1, device=device, dtype=dtype)
    values[:, ::3] = -0.0
    values[used(groups) :] = torch.nan
    weights = draw(tokens, chosen, seed=2, device=device).abs() if weighted else None
    if weights is not None and groups.elsewhere is not None:
        weights[groups.elsewhere] = torch.inf
    found, expected = both_ways(lambda: groups.sum(values, weights), monkeypatch)
    assert found.shape == (tokens, width) and found.isfinite().all() and same_bits(found, expected)


@pytest.mark.parametrize("kind", KINDS[:3])
@EACH_SIZE
@EACH_DTYPE
def test_gradients_of_weights(
    dtype: torch.dtype, tokens: int, chosen: int, width: int, kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of products in fp32, within a rounding for each doubling of the row; zeros for experts elsewhere."""
    groups = token_rows(kind, tokens, chosen, device)
    end = used(groups)
    left, right = (draw(len(groups.order), width, seed=seed, device=device, dtype=dtype) for seed in (1, 2))
    left[end:] = torch.nan
    weights = torch.empty(tokens, chosen, device=device)
    found, expected = both_ways(lambda: groups.dots(left, right, weights), monkeypatch)
    assert found.dtype is torch.float32 and found.shape == expected.shape == weights.shape
    places = groups.order[:end]
    exact, size = ((left[:end].double() * right[:end].double()).sum(1), (left[:end].double() * right[:end].double()).abs().sum(1))
    for sums in (found, expected):
        assert ((sums.flatten()[places].double() - exact).abs() <= 10 * torch.finfo(torch.float32).eps * size).all()
    if groups.elsewhere is not None:
        assert not found[groups.elsewhere].any()


@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
def test_activations_of_used_rows(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of others are neither read nor written, and any other gate stays as it is."""
    from megatron_llama.model.nn.kernels.ops import KERNELS

    groups = token_rows("some elsewhere", 37, 3, device)
    assert isinstance(groups, rows.ExpertRows)
    end, whole = used(groups), KERNELS.gate(name)
    gate_up, grad = draw(len(groups.order), 2 * 130, seed=1, device=device), draw(len(groups.order), 130, seed=2, device=device)
    part = groups.gate(whole)
    assert part is not whole and groups.gate(PLAIN.gate(name)) == PLAIN.gate(name) and 0 < end < len(gate_up)

    def check(found: Tensor, expected: Tensor) -> None:
        assert same_bits(found[:end], expected[:end]) and found[end:].isnan().all()

    with BeginsAsNaN():
        made = part.forward(gate_up), part.backward(grad, gate_up)
    check(made[0], whole.forward(gate_up))
    check(made[1], whole.backward(grad, gate_up))


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("on_input", [False, True], ids=["outputs weighted", "inputs weighted"])
@EACH_DTYPE
def test_a_block_with_experts_elsewhere(
    dtype: torch.dtype, on_input: bool, recompute: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output and gradients as near as those of torch's operators to fp64, with nothing asked of the device, though memory begins as NaN."""
    from megatron_llama.model.nn.kernels.ops import KERNELS

    sizes = Sizes(tokens=50, experts=9, top_k=4, hidden=32, inner=24)
    drawn = [tensor.to(device) for tensor in sizes.draw(2, dtype)]
    here = 5  # of 9 experts, for all places of whose table there is room

    def results(dtype: torch.dtype, gate: Gate) -> list[Tensor]:
        x, router, gate_up, down = (tensor.detach().to(dtype).requires_grad_() for tensor in drawn[:-1])
        handles = [Handle(weight) for weight in (router, gate_up, down)]
        routing = route(x, router, Router(4, normalize=True))
        own = routing._replace(experts=routing.experts.clamp(max=here))
        first, second = gate_up[: here * 48], down[: here * 32]
        out = expert_mlp(x, own, first, second, gate, recompute=recompute, most=200, on_input=on_input)
        out.backward(drawn[-1].to(dtype))
        assert x.grad is not None and gate_up.grad is not None and down.grad is not None
        return [out.detach(), x.grad, handles[0].grad, gate_up.grad, down.grad]

    exact = results(torch.float64, PLAIN.gate("silu"))
    with by_torch(monkeypatch):
        plain = results(dtype, PLAIN.gate("silu"))
    with BeginsAsNaN():
        found = results(dtype, KERNELS.gate("silu"))
    for number, (one, other, reference) in enumerate(zip(found, plain, exact, strict=True)):
        assert one.dtype is other.dtype
        assert error(one, reference) <= 1.5 * error(other, reference) + 4e-7, number


@contextmanager
def counted_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Bytes of rows that kernels read and write, and (codes) those of making codes, by what these kernels get and return."""
    from megatron_llama.model.nn.fp8 import kernels as fp8
    from megatron_llama.model.nn.kernels import gate
    from megatron_llama.model.nn.kernels import rows as kernels

    found = {"rows": 0, "codes": 0}
    # Each row that is gathered is read once.
    reads: dict[Any, Callable[..., list[Tensor]]] = {
        (kernels, "gather"): lambda result, x, *others: [result, result],
        (kernels, "weigh"): lambda result, values, weights, order, end, out: [values, out],
        (kernels, "sum_rows"): lambda result, values, *others: [values, result],
        (kernels, "dots"): lambda result, left, right, *others: [left, right],
        (gate, "_gated"): lambda result, gate_up, *others: [gate_up, result],
        (gate, "_gradient"): lambda result, grad, gate_up, *others: [grad, gate_up, result],
        (fp8, "tiles"): lambda result, x: [x, *result],
    }

    def noted(work: Callable[..., Any], touched: Callable[..., list[Tensor]], kind: str) -> Callable[..., Any]:
        def note(*args: Any, **named: Any) -> Any:
            result = work(*args, **named)
            found[kind] += sum(tensor.nbytes for tensor in touched(result, *args))
            return result

        return note

    with monkeypatch.context() as patch:
        for (module, name), touched in reads.items():
            patch.setattr(module, name, noted(getattr(module, name), touched, "codes" if module is fp8 else "rows"))
        yield found


@pytest.mark.parametrize("in_fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("on_input", [False, True], ids=["outputs weighted", "inputs weighted"])
def test_the_planner_counts_what_they_move(
    on_input: bool, recompute: bool, in_fp8: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte, but for numbers of rows and places, and what the router does."""
    from megatron_llama.model.nn.kernels.ops import KERNELS

    sizes = Sizes(tokens=20, experts=3, top_k=2, hidden=256, inner=128)
    of_experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_apply_probs_on_input": on_input, "moe_shared_expert_intermediate_size": 0}
    model = ModelConfig(hidden_size=256, moe_intermediate_size=128, **of_experts)
    shape = ExpertActivations(model, 1, 20, 2, load=largest_load(20, 2, experts=3, ep=1))
    planned = _MovedByKernels(shape, 20, shape.load)
    x, router, gate_up, down, grad = (tensor.to(device) for tensor in sizes.draw(2, torch.bfloat16))
    handles = [Handle(weight) for weight in (router, gate_up, down)]
    routing = route(x, router, Router(2, normalize=True))
    products = BlockwiseExperts(Blockwise()) if in_fp8 else None
    codes = _bytes_of_codes("blockwise") * 40 * in_fp8
    with counted_bytes(monkeypatch) as found:
        out = expert_mlp(x, routing, gate_up, down, KERNELS.gate("silu"), recompute=recompute, on_input=on_input, products=products)
        assert found == {"rows": planned.forward - 20 * (256 * 6 + 3 * 3 * 4), "codes": codes * (256 + 128)}
    with counted_bytes(monkeypatch) as found:
        out.backward(grad)
        assert found == {"rows": planned.backward - 20 * 256 * 12 + recompute * planned.again, "codes": codes * (256 + 256 + recompute * 256)}
    assert all(handle.written for handle in handles)
