"""What experts compute and deliver: against a loop over tokens in fp64, transformers, and finite differences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import torch
from megatron_llama.engine.comm import device as devices
from megatron_llama.model.nn.moe import rows
from megatron_llama.model.nn.moe.experts import expert_mlp
from megatron_llama.model.nn.moe.routing import Router, Routing, route
from megatron_llama.model.nn.moe.rows import ExpertRows, sorted_rows
from megatron_llama.model.nn.ops import PLAIN
from megatron_llama.model.nn.recompute import Recomputable
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck
from transformers import Llama4TextConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from tests.model.nn.handle import Handle
from tests.model.nn.moe.reference import Sizes, block, chosen

SILU = PLAIN.gate("silu")
USUAL = Sizes(tokens=23, experts=6, top_k=2, hidden=16, inner=12)
SIZES = {
    "usual": USUAL,
    "one expert of each token": Sizes(31, 5, 1, 8, 6),
    "all experts": Sizes(7, 4, 4, 8, 10),
    "one token": Sizes(1, 8, 3, 16, 4),
    "no token": Sizes(0, 4, 2, 8, 4),
    "one expert": Sizes(5, 1, 1, 4, 4),
}
EXACT = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""By the largest value."""


def near(found: Tensor, expected: Tensor, bound: float) -> bool:
    """Whether no element differs by more than this part of the largest one."""
    assert found.shape == expected.shape
    found, expected = found.detach().double(), expected.detach().double()
    return not found.numel() or bool((found - expected).abs().max() <= bound * expected.abs().max())


def leaves(tensors: tuple[Tensor, ...], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Copies of all but the last tensor, that of the gradient of the output."""
    return [tensor.detach().clone().to(dtype or tensor.dtype).requires_grad_() for tensor in tensors[:-1]]


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_as_a_loop_over_tokens(sizes: Sizes, dtype: torch.dtype) -> None:
    """Output and all gradients, of experts without tokens too. A single weight is not divided by itself: its gradient would be 0."""
    normalize = sizes.top_k > 1
    drawn = sizes.draw(1, dtype)
    upstream = drawn[-1]
    x, router, gate_up, down = leaves(drawn)
    routing = route(x, router, Router(sizes.top_k, normalize=normalize))
    found = expert_mlp(x, routing, gate_up, down, SILU)
    found.backward(upstream)
    assert found.dtype is dtype

    wide = leaves(drawn, torch.float64)
    experts = chosen(wide[0].flatten(0, -2) @ wide[1].t(), sizes.top_k)
    assert torch.equal(routing.experts, experts)
    expected = block(*wide, experts, normalize=normalize)
    expected.backward(upstream.double())
    assert near(found, expected, EXACT[dtype])
    for leaf, reference in zip((x, router, gate_up, down), wide, strict=True):
        assert leaf.grad is not None and leaf.grad.dtype is dtype
        assert near(leaf.grad, torch.zeros_like(reference) if reference.grad is None else reference.grad, EXACT[dtype])


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3-MoE"])
def test_as_transformers(kind: str, seed: int) -> None:
    """In fp32, with experts that no token is sent to."""
    sizes = Sizes(tokens=24, experts=16, top_k=2, hidden=32, inner=24)
    drawn = sizes.draw(seed, torch.float32)
    with torch.no_grad():
        drawn[0].abs_()
        drawn[1][3] = -drawn[1][3].abs()  # no token's first, nor its second
    fields: dict[str, Any] = {"hidden_size": 32, "num_experts_per_tok": 2}
    if kind == "Mixtral":
        theirs: Any = MixtralSparseMoeBlock(MixtralConfig(intermediate_size=24, num_local_experts=16, **fields))
    else:
        theirs = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(moe_intermediate_size=24, num_experts=16, norm_topk_prob=False, **fields))
    x, router, gate_up, down = leaves(drawn)
    theirs.gate.weight.data = router.detach().clone()
    theirs.experts.gate_up_proj.data = gate_up.detach().clone().view(16, 48, 32)
    theirs.experts.down_proj.data = down.detach().clone().view(16, 32, 24)
    their_x = drawn[0].detach().clone().requires_grad_()
    expected = theirs(their_x.transpose(0, 1)).transpose(0, 1)
    expected.backward(drawn[-1])

    routing = route(x, router, Router(2, normalize=kind == "Mixtral"))
    assert 3 not in routing.experts
    found = expert_mlp(x, routing, gate_up, down, SILU)
    found.backward(drawn[-1])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    pairs = ((x, their_x), (router, theirs.gate.weight), (gate_up, theirs.experts.gate_up_proj), (down, theirs.experts.down_proj))
    for leaf, reference in pairs:
        assert leaf.grad is not None
        assert near(leaf.grad, reference.grad.view_as(leaf), 2e-6)
    assert gate_up.grad is not None and not gate_up.grad.view(16, 48, 32)[3].any()


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_weights_on_inputs_are_those_of_llama_4(dtype: torch.dtype, top_k: int) -> None:
    """The sigmoid of the chosen logits multiplies inputs; of equal logits torch.topk chooses, and one expert has no token."""
    sizes = Sizes(tokens=24, experts=8, top_k=top_k, hidden=32, inner=24)
    drawn = sizes.draw(1, torch.float32)
    with torch.no_grad():
        drawn[0].abs_()
        drawn[1][3] = -drawn[1][3].abs()
        drawn[1][5] = drawn[1][4]
    config = Llama4TextConfig(hidden_size=32, intermediate_size=24, num_local_experts=8, num_experts_per_tok=top_k)
    theirs = Llama4TextMoe(config).to(dtype)
    x, router, gate_up, down = leaves(drawn, dtype)
    for weight in theirs.shared_expert.parameters():
        torch.nn.init.zeros_(weight)
    theirs.router.weight.data = router.detach().clone()
    theirs.experts.gate_up_proj.data = gate_up.detach().view(8, 48, 32).mT.contiguous()
    theirs.experts.down_proj.data = down.detach().view(8, 32, 24).mT.contiguous()
    their_x = x.detach().clone().requires_grad_()
    expected = theirs(their_x)[0].view_as(x)
    expected.backward(drawn[-1].to(dtype))

    routing = route(x, router, Router(top_k, normalize=False, score="sigmoid"))
    assert 3 not in routing.experts
    found = expert_mlp(x, routing, gate_up, down, SILU, on_input=True)
    found.backward(drawn[-1].to(dtype))
    # transformers computes the sigmoid in fp32 whatever the dtype is.
    bound = 2e-6
    assert near(found, expected, bound)
    stacked = (theirs.experts.gate_up_proj.grad.mT.reshape(-1, 32), theirs.experts.down_proj.grad.mT.reshape(-1, 24))
    for leaf, reference in zip((x, router, gate_up, down), (their_x.grad, theirs.router.weight.grad, *stacked), strict=True):
        assert leaf.grad is not None and near(leaf.grad, reference, bound)
    assert gate_up.grad is not None and not gate_up.grad.view(8, 48, 32)[3].any()


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
@pytest.mark.parametrize("recompute", [False, True])
def test_weights_on_inputs_have_all_gradients(recompute: bool, score: Literal["sigmoid", "softmax"]) -> None:
    """Against finite differences, and through a softmax too."""
    sizes = Sizes(tokens=5, experts=4, top_k=2, hidden=3, inner=2)
    x, router, gate_up, down, _ = sizes.draw(5)
    rule = Router(2, normalize=score == "softmax", score=score)

    def outputs(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return expert_mlp(x, route(x, router, rule), gate_up, down, SILU, recompute=recompute, on_input=True)

    assert gradcheck(outputs, (x, router, gate_up, down))


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_of_everything(recompute: bool) -> None:
    """Against finite differences; the table stays."""
    sizes = Sizes(tokens=5, experts=4, top_k=2, hidden=3, inner=2)
    x, router, gate_up, down, _ = sizes.draw(5)
    table = route(x, router, Router(2, normalize=True))
    weights = table.weights.detach().requires_grad_()

    def outputs(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return expert_mlp(x, table._replace(weights=weights), gate_up, down, PLAIN.gate("gelu_pytorch_tanh"), recompute=recompute)

    assert gradcheck(outputs, (x, weights, gate_up, down))


def test_a_sum_over_experts_has_one_order_and_one_rounding() -> None:
    """In bf16 it is taken in fp32, in the order of the table, whatever the order of the rows."""
    sizes = Sizes(tokens=40, experts=7, top_k=4, hidden=5, inner=2)
    generator = torch.Generator().manual_seed(2)
    experts = torch.stack([torch.randperm(7, generator=generator)[:4] for _ in range(40)])
    groups = sorted_rows(experts, 7, torch.bfloat16)
    values = torch.randn(160, 5, generator=generator).bfloat16()
    weights = torch.rand(40, 4, generator=generator)
    assert torch.equal(experts.flatten()[groups.order], experts.flatten().sort().values)
    of_token = torch.empty(160, 5)
    of_token[groups.order] = values.float()
    expected = torch.zeros(40, 5)
    for column in range(sizes.top_k):
        expected = expected + of_token.view(40, 4, 5)[:, column] * weights[:, column, None]
    assert torch.equal(groups.sum(values, weights), expected.bfloat16())
    assert torch.equal(groups.gather(torch.arange(40.0)[:, None])[:, 0], groups.order.float().div(4).floor())


def delivered(
    sizes: Sizes, passes: int, *, put_off: bool = False, frozen: tuple[str, ...] = (), dtype: torch.dtype = torch.float32, **how: Any
) -> tuple[Tensor | None, dict[str, Handle]]:
    """The gradient of the input, and the handles of the three weights after backward passes."""
    drawn = sizes.draw(11, dtype)
    x, *weights = leaves(drawn)
    handles = {}
    for name, weight in zip(("router", "gate_up", "down"), weights, strict=True):
        weight.requires_grad_(name not in frozen)
        handles[name] = Handle(weight, put_off=put_off)
        handles[name].grad = torch.full(weight.shape, torch.nan, dtype=torch.promote_types(dtype, torch.float32))
    for _ in range(passes):
        x.grad = None
        routing = route(x, weights[0], Router(sizes.top_k, normalize=True))
        expert_mlp(x, routing, weights[1], weights[2], SILU, **how).backward(drawn[-1])
    return x.grad, handles


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_weight_gradients_go_to_handles(sizes: Sizes, recompute: bool) -> None:
    """The first contribution overwrites the buffer, of experts without tokens as well, and the next one is added. Postponed, and with all
    computed again, the bits are the same."""
    x, router, gate_up, down = leaves(drawn := sizes.draw(11, torch.float32))
    routing = route(x, router, Router(sizes.top_k, normalize=True))
    expert_mlp(x, routing, gate_up, down, SILU).backward(drawn[-1])
    expected = {"router": router.grad, "gate_up": gate_up.grad, "down": down.grad}

    for count in (1, 2):
        input_grad, handles = delivered(sizes, count, recompute=recompute)
        assert torch.equal(input_grad, x.grad)
        for name, grad in expected.items():
            # A product that is added to a buffer may sum in another order than one that overwrites it.
            assert torch.equal(handles[name].grad, grad) if count == 1 else near(handles[name].grad, grad * count, 1e-6)
            assert handles[name].written == count

    input_grad, handles = delivered(sizes, 1, put_off=True, recompute=recompute)
    assert torch.equal(input_grad, x.grad)
    for name, grad in expected.items():
        assert handles[name].written == 0 and len(handles[name].work) == 1
        handles[name].work[0]()
        assert torch.equal(handles[name].grad, grad) and handles[name].written == 1


class Sharded(Handle):
    """Of a weight whose values come when they are waited for, and that another weight takes the place of."""

    def __init__(self, weight: Tensor, *, put_off: bool) -> None:
        super().__init__(weight, put_off=put_off)
        self.weight, self.values = weight.data, weight.detach().clone()
        self.evict()

    def evict(self) -> None:
        self.weight.fill_(torch.nan)

    def wait_unsharded(self) -> int:
        self.weight.copy_(self.values)
        return super().wait_unsharded()

    def check_version(self, version: int) -> None:
        super().check_version(version)
        self.weight.copy_(self.values)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("put_off", [False, True])
def test_weights_are_waited_for(recompute: bool, put_off: bool) -> None:
    """In forward and again in backward, each by its own handle; a postponed gradient reads none."""
    x, router, gate_up, down = leaves(drawn := USUAL.draw(11, torch.float32))
    expected_x, expected = delivered(USUAL, 1)
    handles = {"router": Sharded(router, put_off=put_off), "gate_up": Sharded(gate_up, put_off=put_off), "down": Sharded(down, put_off=put_off)}
    out = expert_mlp(x, route(x, router, Router(2, normalize=True)), gate_up, down, SILU, recompute=recompute)
    for handle in handles.values():
        handle.evict()
    out.backward(drawn[-1])
    for handle in handles.values():
        handle.evict()
        for work in handle.work:
            work()
    assert torch.equal(x.grad, expected_x)
    for name, handle in handles.items():
        assert torch.equal(handle.grad, expected[name].grad)


@pytest.mark.parametrize("frozen", [("router",), ("gate_up",), ("down",), ("gate_up", "down"), ("router", "gate_up", "down")], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_frozen_weights_are_asked_for_nothing(frozen: tuple[str, ...], recompute: bool) -> None:
    """The others and the input get the bits that they get beside trained ones."""
    expected_x, expected = delivered(USUAL, 1)
    x_grad, handles = delivered(USUAL, 1, frozen=frozen, recompute=recompute)
    assert torch.equal(x_grad, expected_x)
    for name, handle in handles.items():
        assert handle.written == (name not in frozen)
        assert handle.grad.isnan().all() if name in frozen else torch.equal(handle.grad, expected[name].grad)


def test_only_weights_are_trained() -> None:
    """An input without gradient, as of a stage whose first layers are frozen."""
    _, expected = delivered(USUAL, 1)
    x, router, gate_up, down = leaves(drawn := USUAL.draw(11, torch.float32))
    for trained in ({"router"}, {"gate_up"}, {"down"}, {"gate_up", "router"}):
        weights = {"router": router, "gate_up": gate_up, "down": down}
        for name, weight in weights.items():
            weight.grad = None
            weight.requires_grad_(name in trained)
        routing = route(x.detach(), router, Router(2, normalize=True))
        expert_mlp(x.detach(), routing, gate_up, down, SILU).backward(drawn[-1])
        for name, weight in weights.items():
            assert (weight.grad is None) if name not in trained else torch.equal(weight.grad, expected[name].grad)


def test_an_input_that_is_made_again() -> None:
    """To the bit what an input that is kept gives, with the first product kept or made again."""
    drawn = USUAL.draw(12, torch.float32)
    results = []
    for recompute in (False, True):
        for again in (False, True):
            x, router, gate_up, down = leaves(drawn)
            given = Recomputable(x, lambda half: half * 2, (x.detach() / 2,)) if again else x
            out = expert_mlp(given, route(given, router, Router(2, normalize=True)), gate_up, down, SILU, recompute=recompute)
            out.backward(drawn[-1])
            results.append([out, x.grad, router.grad, gate_up.grad, down.grad])
    for others in results[1:]:
        assert all(torch.equal(left, right) for left, right in zip(results[0], others, strict=True))


@contextmanager
def kept() -> Iterator[dict[int, int]]:
    """Bytes that autograd keeps, by the memory that they are in."""
    storages = dict[int, int]()
    alive = list[Tensor]()

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield storages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", ["plain", "recompute", "made again", "both", "frozen"])
def test_bytes_kept_for_backward(how: str, dtype: torch.dtype) -> None:
    """To the byte: input, table, probabilities, and the output of the first product."""
    x, router, gate_up, down = leaves(USUAL.draw(13, dtype))
    recompute, again = how in ("recompute", "both"), how in ("made again", "both")
    half = x.detach()[..., ::2].clone()
    given = Recomputable(x, lambda half: half.repeat_interleave(2, -1), (half,)) if again else x
    if how == "frozen":
        for weight in (router, gate_up, down):
            weight.requires_grad_(False)
    with kept() as storages:
        routing = route(given, router, Router(USUAL.top_k, normalize=True))
        out = expert_mlp(given, routing, gate_up, down, SILU, recompute=recompute)
    assert out.requires_grad
    for weight in (router, gate_up, down):
        storages.pop(weight.untyped_storage().data_ptr())
    t, k, size = USUAL.tokens, USUAL.top_k, dtype.itemsize
    table = t * k * (8 + 4) + t * USUAL.experts * 4
    input_bytes = {"made again": half.numel(), "both": half.numel(), "frozen": 0}.get(how, x.numel()) * size
    assert sum(storages.values()) == table + input_bytes + (0 if recompute else t * k * 2 * USUAL.inner * size)


def reached(value: Any) -> Iterator[Tensor]:
    """The tensors that a function, or what it holds, keeps alive."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, ExpertRows):
        yield from (value.order, value.ends)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from reached(part)
    elif isinstance(value, Callable) and getattr(value, "__closure__", None):  # type: ignore[arg-type]
        for cell in value.__closure__:
            yield from reached(cell.cell_contents)


@pytest.mark.parametrize("recompute", [False, True])
def test_bytes_kept_for_a_weight_pass(recompute: bool) -> None:
    """To the byte, of both weights of the experts together."""
    _, handles = delivered(USUAL, 1, put_off=True, recompute=recompute, dtype=torch.bfloat16)
    tensors = [tensor for name in ("down", "gate_up") for tensor in reached(handles[name].work[0]) if tensor is not handles[name].grad]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    t, k, h, inner = USUAL.tokens, USUAL.top_k, USUAL.hidden, USUAL.inner
    assert sum(storages.values()) == 2 * (t * h + t * k * inner + t * k * 2 * inner + t * h) + 8 * t * k + 4 * USUAL.experts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_traced_without_memory(dtype: torch.dtype) -> None:
    """Nothing asks such tensors for their values."""
    shapes = ((24, 1, 16), (6, 16), (144, 16), (96, 12))
    with FakeTensorMode():
        x, router, gate_up, down = (torch.empty(*shape, dtype=dtype, requires_grad=True) for shape in shapes)
        routing = route(x, router, Router(2, normalize=True))
        out = expert_mlp(x, routing, gate_up, down, SILU)
        out.backward(torch.empty_like(out))
        assert out.shape == x.shape and out.dtype is dtype
        assert all(leaf.grad.shape == leaf.shape and leaf.grad.dtype is dtype for leaf in (x, router, gate_up, down))


def test_layouts_that_torchs_grouped_product_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper, of whose kernel only the checks of its arguments run here: forward, by the weights, and backward, by their transposes."""
    monkeypatch.setattr(devices, "capability", lambda device: (9, 0))
    with FakeTensorMode(), torch.no_grad():

        def empty(*shape: int) -> Tensor:
            return torch.empty(*shape, dtype=torch.bfloat16, device="cuda")

        groups = ExpertRows(2, empty(40).long(), None, empty(6).int(), None)
        weights = rows.by_expert(empty(6 * 24, 16), 6)
        assert rows.linear(empty(40, 16), weights, groups).shape == (40, 24)
        assert rows.linear_backward(empty(40, 24), weights, groups).shape == (40, 16)


def test_fixed_order_is_never_refused() -> None:
    """Every operator has a deterministic form."""
    drawn = USUAL.draw(14, torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        x, router, gate_up, down = leaves(drawn)
        expert_mlp(x, route(x, router, Router(2, normalize=True)), gate_up, down, SILU).backward(drawn[-1])
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_given_table() -> None:
    """Weights that are no parameters of a router, of a table in which an expert stands alone."""
    x, _, gate_up, down, _ = Sizes(3, 4, 1, 8, 4).draw(15)
    table = Routing(torch.tensor([[2], [0], [2]]), torch.tensor([[1.0], [0.0], [2.0]], dtype=torch.float64), torch.empty(0), torch.empty(0))
    found = expert_mlp(x, table, gate_up, down, SILU)
    first = gate_up.view(4, 8, 8)[2]
    expected = SILU.forward(x[:, 0] @ first.t()) @ down.view(4, 8, 4)[2].t() * torch.tensor([[1.0], [0.0], [2.0]])
    torch.testing.assert_close(found[:, 0], expected)


def test_experts_that_the_host_has_to_wait_for_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(rows, "runs_kernels", lambda device, dtype: dtype is not torch.float64)
    assert [len(list(rows.expert_warnings(cuda, dtype))) for dtype in (torch.bfloat16, torch.float32, torch.float64)] == [0, 0, 1]
    assert not list(rows.expert_warnings(torch.device("cpu"), torch.float64))
