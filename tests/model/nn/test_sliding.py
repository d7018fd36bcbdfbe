"""Windows and capped scores against the textbook in fp64, what they cost, and the operators that an accelerator is sent."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from megatron_llama.engine.comm import device as devices
from megatron_llama.model.nn import attention, products, sliding
from megatron_llama.model.nn.attention import ScoreRule
from megatron_llama.model.nn.documents import Documents, document_attention
from megatron_llama.model.nn.host.attention import rotated_attention
from megatron_llama.model.nn.ops import PLAIN
from megatron_llama.model.nn.sliding import sliding_attention
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.model.nn.dispatch import Dispatched, scores
from tests.model.nn.efficient import on_efficient
from tests.model.nn.flash import Flash

TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
RULES = {
    "plain": ScoreRule(),
    "window": ScoreRule(window=5),
    "window and scale": ScoreRule(scale=0.9, window=40),
    "capped": ScoreRule(softcap=2.0),
    "all three": ScoreRule(scale=0.7, window=17, softcap=1.5),
    "one position": ScoreRule(window=1),
}
RULE = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
B, N, KV, D = 2, 4, 2, 8


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(length: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values [s, b, n, d]."""
    return [draw(length, B, heads, D, seed=seed).to(dtype).requires_grad_() for seed, heads in enumerate((N, KV, KV))]


def packed_ids(length: int) -> Tensor:
    """[s, b]: documents shorter and longer than windows; one over a whole sequence."""
    places = torch.arange(length)
    return torch.stack(((places > 6).int() + (places > length // 2).int(), torch.zeros_like(places).int()), 1)


def textbook(query: Tensor, key: Tensor, value: Tensor, rule: ScoreRule, ids: Tensor | None = None, offset: int = 0) -> Tensor:
    """[s, b, n * d] in fp64, score by score, as transformers' eager attention of Gemma 2."""
    q, k, v = (part.double().permute(1, 2, 0, 3) for part in (query, key, value))
    k, v = (part.repeat_interleave(N // KV, 1) for part in (k, v))
    scores = q @ k.mT * (D**-0.5 if rule.scale is None else rule.scale)
    if rule.softcap:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    i, j = torch.arange(q.shape[2]).unsqueeze(-1) + offset, torch.arange(k.shape[2])
    seen = (j <= i) & (j > i - rule.window) if rule.window else j <= i
    if ids is not None:
        seen = seen & (ids.t()[:, None, :, None] == ids.t()[:, None, None, :])
    return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2)


def check(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is dtype and one.shape == other.shape
        assert (one.double() - other).abs().max() < TOLERANCE[dtype] * max(1.0, other.abs().max().item())


@DTYPES
@RULE
@pytest.mark.parametrize("with_documents", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("block", [256, 16])
def test_attention_by_rule(block: int, with_documents: bool, rule: ScoreRule, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and gradients, in one block and in several."""
    monkeypatch.setattr(sliding, "BLOCK", block)
    monkeypatch.setattr(products, "SCORES", 1000)
    leaves, ids = inputs(75, dtype), packed_ids(75) if with_documents else None
    upstream = draw(75, B, N * D, seed=7).to(dtype)
    out = sliding_attention(*leaves, rule=rule) if ids is None else document_attention(*leaves, Documents.of(ids), rule)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = textbook(*wide, rule, ids)
    check((out, *torch.autograd.grad(out, leaves, upstream)), (exact, *torch.autograd.grad(exact, wide, upstream.double())), dtype)


def pieces(q: Tensor, k: Tensor, v: Tensor, upstream: Tensor, rule: ScoreRule, offset: int) -> tuple[Tensor, ...]:
    """Output and gradients of a piece, [s, b, ...]."""
    heads = [part.detach().permute(1, 2, 0, 3) for part in (q, k, v)]
    out, lse = sliding.attend(*heads, rule=rule, offset=offset)
    grad = upstream.unflatten(-1, (N, D)).permute(1, 2, 0, 3)
    grads = sliding.attend_backward(grad, *heads, out, lse, rule=rule, offset=offset)
    return out.permute(2, 0, 1, 3).flatten(2), *(part.permute(2, 0, 1, 3) for part in grads)


def exact_pieces(q: Tensor, k: Tensor, v: Tensor, upstream: Tensor, rule: ScoreRule, offset: int) -> tuple[Tensor, ...]:
    """The same in fp64, score by score."""
    wide = [part.detach().double().requires_grad_() for part in (q, k, v)]
    exact = textbook(*wide, rule, offset=offset)
    return exact, *torch.autograd.grad(exact, wide, upstream.double())


@pytest.mark.parametrize(("queries", "keys", "offset", "window"), [(20, 9, 9, 22), (7, 30, 30, 36), (12, 12, 20, 21), (5, 3, 40, 45)])
def test_keys_of_earlier_chunks(queries: int, keys: int, offset: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them before the first query; every query sees some, as the caller has seen to."""
    monkeypatch.setattr(sliding, "BLOCK", 4)
    q, k, v = (draw(length, B, n, D, seed=n) for length, n in ((queries, N), (keys, KV), (keys, KV)))
    assert offset + queries - window < keys, "the case is no case"
    given = (q, k, v, draw(queries, B, N * D, seed=7), ScoreRule(window=window), offset)
    check(pieces(*given), exact_pieces(*given), torch.float64)


@pytest.mark.parametrize("rule", [RULES["window"], ScoreRule(window=100), RULES["all three"], ScoreRule(scale=0.5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_rotated_attention_of_hosts(rule: ScoreRule, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 by products, in pieces of 64 queries; with nothing to rotate, so that the textbook serves."""
    monkeypatch.setattr("megatron_llama.model.nn.host.attention.QUERIES", 64)
    monkeypatch.setattr("megatron_llama.model.nn.host.attention.SCORES", 2**14)
    monkeypatch.setattr(devices, "multiplies_bf16", lambda: True)
    length = 150
    leaves = inputs(length, dtype)
    qkv = torch.cat([leaf.detach() for leaf in leaves], 2).flatten(2).requires_grad_()
    cos, sin = torch.ones(length, 1, 1, D // 2), torch.zeros(length, 1, 1, D // 2)
    upstream = draw(length, B, N * D, seed=7).to(dtype)
    out = rotated_attention(qkv.clone(), cos, sin, query=N, key=KV, ops=PLAIN, rule=rule)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = textbook(*wide, rule)
    [grad] = torch.autograd.grad(out, qkv, upstream)
    grads = torch.autograd.grad(exact, wide, upstream.double())
    check((out, grad), (exact, torch.cat(grads, 2).flatten(2)), dtype)


def computed(length: int, window: int) -> int:
    """Scores of a head."""
    leaves = [draw(length, 1, heads, 16, seed=heads).float().requires_grad_() for heads in (2, 1, 1)]
    with Dispatched() as dispatched:
        sliding_attention(*leaves, rule=ScoreRule(window=window)).sum().backward()
    forward, backward = scores(dispatched)
    assert forward == backward > 0
    return forward // 2


class LargestMask(TorchDispatchMode):
    """The most elements of a tensor of truth values."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype is torch.bool:
            self.elements = max(self.elements, result.untyped_storage().nbytes())
        return result


def test_the_cost_follows_the_window() -> None:
    """A query computes its window and at most a block more, in a sequence of any length; a mask has the size of a block."""
    for length in (4096, 8192):
        assert length * 512 < computed(length, 512) < length * (512 + 256)
    assert computed(4096, 4096) > 2 * computed(4096, 512)
    leaves = [draw(8192, 1, heads, 8, seed=heads).float().requires_grad_() for heads in (2, 1, 1)]
    with LargestMask() as largest:
        sliding_attention(*leaves, rule=ScoreRule(window=512)).sum().backward()
    assert 0 < largest.elements <= 256 * (512 + 256)


def test_products_of_hosts_follow_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16: two products forward and five backward of the two that forward has, each of a block's queries and what they see."""
    monkeypatch.setattr(devices, "multiplies_bf16", lambda: True)
    length, window = 2048, 256
    qkv = draw(length, 1, 4 * 16, seed=1).bfloat16().requires_grad_()
    cos, sin = torch.ones(length, 1, 1, 8), torch.zeros(length, 1, 1, 8)
    counted = []
    for rule in (ScoreRule(window=window), ScoreRule()):
        with FlopCounterMode(display=False) as counter:
            rotated_attention(qkv.clone(), cos, sin, query=2, key=1, ops=PLAIN, rule=rule).sum().backward()
        counted.append(counter.get_total_flops())
    assert counted[0] <= 7 * 2 * 16 * 2 * length * (window + 255) < 0.6 * counted[1]


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is taken for a GPU."""
    for module in (attention, sliding):
        monkeypatch.setattr(module, "is_host", lambda device: False)


@pytest.mark.parametrize(("queries", "keys", "offset"), [(60, 60, 0), (10, 9, 9), (12, 12, 20), (5, 30, 30), (7, 40, 33)])
@pytest.mark.parametrize("window", [18, 25, 31, 36, 200])
def test_flash_attention_is_told_the_window(queries: int, keys: int, offset: int, window: int, accelerator: None) -> None:
    """Pieces whose last query stands behind the last key by more or less than the window, forward and backward."""
    if offset + queries - window >= keys:
        queries = keys - offset + window - 1
    q, k, v = (draw(length, B, n, D, seed=n).bfloat16() for length, n in ((queries, N), (keys, KV), (keys, KV)))
    given = (q, k, v, draw(queries, B, N * D, seed=7).bfloat16(), ScoreRule(scale=0.4, window=window), offset)
    with Flash() as flash:
        found = pieces(*given)
    assert flash.calls == ["forward", "backward"]
    check(found, exact_pieces(*given), torch.bfloat16)


def grid() -> Iterator[tuple[int, int, int, int]]:
    """Queries, keys, offset and window of pieces of all kinds: more queries than keys and fewer, parts of a kernel's tiles and several; with the
    last query at the last key, right behind it or later; with the last query seeing one key, some more or all."""
    for queries, keys in product((1, 8, 20, 33), (1, 9, 16, 40)):
        for offset in (keys - queries, keys, keys + 3):
            later = offset + queries - keys
            yield from ((queries, keys, offset, window) for window in (later + 1, later + 5, 200) if offset >= 0)


def check_grid(device: str, dtype: torch.dtype) -> None:
    for queries, keys, offset, window in grid():
        q, k, v = (draw(length, B, n, D, seed=n).to(dtype) for length, n in ((queries, N), (keys, KV), (keys, KV)))
        given, rule = (q, k, v, draw(queries, B, N * D, seed=7).to(dtype)), ScoreRule(window=window)
        found = pieces(*(part.to(device) for part in given), rule, offset)
        check(tuple(part.cpu() for part in found), exact_pieces(*given, rule, offset), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_pieces_of_all_kinds(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits by both kernels, each by its contract, in several blocks where a mask is needed."""
    monkeypatch.setattr(sliding, "BLOCK", 16)
    with Flash() as flash, on_efficient(flash=True) as efficient:
        check_grid("cpu", dtype)
    assert set(efficient.calls) == {"forward", "backward"}
    assert set(flash.calls) == (set() if dtype is torch.float32 else {"forward", "backward"})


def test_whole_sequences_go_to_flash_attention(accelerator: None) -> None:
    """Also packed documents, as they lie; what it cannot take goes block by block."""
    leaves = [part.detach() for part in inputs(40, torch.bfloat16)]
    with Flash() as flash:
        out = sliding_attention(*leaves, rule=ScoreRule(window=9))
    assert flash.calls == ["forward"]
    check((out,), (textbook(*leaves, ScoreRule(window=9)),), torch.bfloat16)
    meta = [leaf.to("meta") for leaf in leaves]
    starts = torch.tensor([0, 12, 40, 80], dtype=torch.int32, device="meta")
    with Dispatched() as dispatched:
        assert document_attention(*meta, Documents(starts, np.array([0, 12, 40, 80])), ScoreRule(0.5, 9)).shape == (40, B, N * D)
    [(name, _, keywords)] = dispatched.named("attention")
    assert name == "_flash_attention_forward"
    assert keywords == {"scale": 0.5, "window_size_left": 8, "window_size_right": 0}


@pytest.mark.parametrize("case", ["fp32", "empty slots", "fp64", "capped", "more queries than keys"])
def test_what_flash_attention_cannot_take_goes_block_by_block(case: str, accelerator: None) -> None:
    """To the memory-efficient kernel with a mask of a block, or to products."""
    dtype = {"fp32": torch.float32, "fp64": torch.float64}.get(case, torch.bfloat16)
    rule = ScoreRule(window=300, softcap=3.0 if case == "capped" else 0.0)
    meta = [torch.empty(1000, B, n, D, dtype=dtype, device="meta").permute(1, 2, 0, 3) for n in (N, KV, KV)]
    is_token = torch.ones(B, 1000, dtype=torch.bool, device="meta")
    if case == "more queries than keys":
        meta[1:] = (part[:, :, :900] for part in meta[1:])
    offset = 900 if case == "more queries than keys" else 0
    rule = ScoreRule(window=1200, softcap=rule.softcap) if offset else rule
    with Dispatched() as dispatched:
        out, lse = sliding.attend(*meta, rule=rule, offset=offset, is_token=is_token if case == "empty slots" else None)
        sliding.attend_backward(out, *meta, out, lse, rule=rule, offset=offset)
    assert out.shape == meta[0].shape and lse.shape == (B, N, 1000)
    calls = dispatched.named("_scaled_dot_product_efficient_attention")
    forward = [args[3].shape if len(args) > 3 and args[3] is not None else () for name, args, _ in calls if not name.endswith("backward")]
    # The block whose windows hide nothing needs no mask, and goes to flash attention without one.
    blocks = {"fp64": 0, "capped": 0, "more queries than keys": 3}
    assert len(forward) == blocks.get(case, 4)
    assert offset or all(shape[-2] * shape[-1] <= 256 * 576 for shape in forward)


def test_a_slow_path_has_a_name() -> None:
    cuda, windows, capped = torch.device("cuda"), [ScoreRule(window=8), ScoreRule()], [ScoreRule(softcap=3.0)]
    fast = [(torch.device("cpu"), torch.float32, 64, [*windows, *capped]), (cuda, torch.bfloat16, 128, windows)]
    assert [sliding.sliding_warnings(*given) for given in (*fast, (cuda, torch.float32, 128, [ScoreRule()]))] == [[]] * 3
    [line] = sliding.sliding_warnings(cuda, torch.bfloat16, 128, capped)
    assert line.startswith("attention with --attn-logit-softcapping has no kernel")
    for dtype, head_dim in ((torch.float32, 128), (torch.bfloat16, 12), (torch.bfloat16, 264)):
        [line] = sliding.sliding_warnings(cuda, dtype, head_dim, windows)
        assert line.startswith(f"flash attention takes no window with {dtype} and --head-dim {head_dim}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("with_documents", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("rule", [RULES["window and scale"], RULES["all three"]], ids=["window", "capped"])
def test_attention_by_rule_on_a_device(rule: ScoreRule, with_documents: bool, dtype: torch.dtype) -> None:
    """Output and gradients, against the textbook."""
    length, ids = 300, packed_ids(300) if with_documents else None
    leaves = [leaf.detach().cuda().requires_grad_() for leaf in inputs(length, dtype)]
    upstream = draw(length, B, N * D, seed=7).to(dtype)
    documents = None
    if ids is not None:
        packed = Documents.of(ids)
        documents = Documents(packed.starts.cuda(), packed.bounds)
    out = sliding_attention(*leaves, rule=rule) if documents is None else document_attention(*leaves, documents, rule)
    grads = torch.autograd.grad(out, leaves, upstream.cuda())
    wide = [leaf.detach().cpu().double().requires_grad_() for leaf in leaves]
    exact = textbook(*wide, rule, ids)
    check(tuple(part.cpu() for part in (out, *grads)), (exact, *torch.autograd.grad(exact, wide, upstream.double())), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("queries", "keys", "offset", "window"), [(60, 60, 0, 25), (20, 9, 9, 22), (12, 12, 20, 21), (5, 30, 30, 200)])
def test_pieces_with_windows_on_a_device(queries: int, keys: int, offset: int, window: int, dtype: torch.dtype) -> None:
    q, k, v = (draw(length, B, n, D, seed=n).to(dtype) for length, n in ((queries, N), (keys, KV), (keys, KV)))
    given, rule = (q, k, v, draw(queries, B, N * D, seed=7).to(dtype)), ScoreRule(window=window)
    found = pieces(*(part.cuda() for part in given), rule, offset)
    check(tuple(part.cpu() for part in found), exact_pieces(*given, rule, offset), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [256, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_pieces_of_all_kinds_on_a_device(dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliding, "BLOCK", block)
    check_grid("cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rule", [ScoreRule(), RULES["window"]], ids=["plain", "window"])
def test_heads_that_flash_attention_cannot_take_on_a_device(rule: ScoreRule, dtype: torch.dtype) -> None:
    """12 elements: a sequence, and packed documents."""
    length, ids = 70, packed_ids(70)
    for documents in (None, Documents.of(ids)):
        leaves = [draw(length, B, n, 12, seed=n).to(dtype).cuda().requires_grad_() for n in (N, KV, KV)]
        upstream = draw(length, B, N * 12, seed=7).to(dtype)
        out = sliding_attention(*leaves, rule=rule) if documents is None else document_attention(*leaves, documents, rule)
        grads = torch.autograd.grad(out, leaves, upstream.cuda())
        wide = [leaf.detach().cpu().double().requires_grad_() for leaf in leaves]
        exact = textbook(*wide, ScoreRule(12**-0.5, rule.window), None if documents is None else ids)
        check(tuple(part.cpu() for part in (out, *grads)), (exact, *torch.autograd.grad(exact, wide, upstream.double())), dtype)
