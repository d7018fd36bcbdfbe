"""Pieces of attention against the textbook in fp64, their merge against the whole, and the operators that an accelerator is sent."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from megatron_llama.model.nn import attention, documents
from megatron_llama.model.nn.attention import (
    PLAIN_SCORES,
    ScoreRule,
    _preferred_kernels,
    attend,
    attend_backward,
    attention_kernel,
    attention_order,
    attention_problem,
    attention_warnings,
    causal_attention,
    merge,
    piece_kernel,
)
from megatron_llama.model.nn.documents import Documents, attends_by_document, document_attention
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.model.nn.cudnn import on_hopper
from tests.model.nn.dispatch import Dispatched
from tests.model.nn.efficient import on_efficient
from tests.model.nn.flash import document_mask
from tests.over_cases import over_cases

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
HEADS = pytest.mark.parametrize("kv_heads", [4, 2, 1], ids=lambda heads: f"{heads} kv heads")
B, N, D = 3, 4, 8


def deviation(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    assert found.shape == expected.shape
    assert found.isfinite().all()
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


def heads(count: int, length: int, seed: int, dtype: torch.dtype, head_dim: int = D) -> Tensor:
    """[b, count, length, d] in the memory layout of the model's activations."""
    values = torch.randn(length, B, count, head_dim, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).permute(1, 2, 0, 3)


def inputs(kv_heads: int, queries: int, keys: int, dtype: torch.dtype, head_dim: int = D) -> tuple[Tensor, Tensor, Tensor]:
    sizes = ((N, queries), (kv_heads, keys), (kv_heads, keys))
    query, key, value = (heads(*size, seed, dtype, head_dim) for seed, size in enumerate(sizes, 1))
    return query, key, value


def textbook(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in fp64, score by score."""
    groups = query.shape[1] // key.shape[1]
    key, value = (part.double().repeat_interleave(groups, dim=1) for part in (key, value))
    scores = query.double() @ key.mT / query.shape[-1] ** 0.5
    scores = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def random_mask(queries: int, keys: int) -> Tensor:
    """bool [b, 1, q, k] in which a query sees at least one key, and some none of the first half."""
    generator = torch.Generator().manual_seed(4)
    mask = torch.rand(B, 1, queries, keys, generator=generator) < 0.3
    mask[..., : keys // 2] &= torch.rand(B, 1, queries, 1, generator=generator) < 0.5
    mask[..., -1] = True
    return mask


def whole(leaves: list[Tensor], mask: Tensor | None, upstream: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients of the textbook."""
    wide = [leaf.double().requires_grad_() for leaf in leaves]
    out, _ = textbook(*wide, mask)
    return (out.detach(), *torch.autograd.grad(out, wide, upstream.double()))


@over_cases
@DTYPES
@HEADS
@pytest.mark.parametrize("masked", [False, True], ids=["all keys", "mask"])
@pytest.mark.parametrize("shape", [(7, 7), (5, 11), (40, 1100)], ids=str)
def test_attend_is_the_textbook(shape: tuple[int, int], masked: bool, kv_heads: int, dtype: torch.dtype) -> None:
    leaves, mask = inputs(kv_heads, *shape, dtype), random_mask(*shape) if masked else None
    out, lse = attend(*leaves, mask=mask)
    expected, expected_lse = textbook(*leaves, mask)
    assert out.dtype is dtype and lse.dtype is torch.promote_types(dtype, torch.float32)
    assert deviation(out, expected) < TOLERANCE[dtype]
    assert deviation(lse, expected_lse) < TOLERANCE[dtype]


@over_cases
@DTYPES
@HEADS
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "causal and mask"])
def test_causal_and_mask_hold_together(masked: bool, kv_heads: int, dtype: torch.dtype) -> None:
    leaves, length = list(inputs(kv_heads, 9, 9, dtype)), 9
    past = torch.ones(length, length, dtype=torch.bool).tril()
    mask = random_mask(length, length) | torch.eye(length, dtype=torch.bool) if masked else None
    seen = past if mask is None else past & mask
    upstream = heads(N, length, 5, dtype)
    expected = whole(leaves, seen, upstream)
    out, lse = attend(*leaves, causal=True, mask=mask)
    grads = attend_backward(upstream, *leaves, out, lse, causal=True, mask=mask)
    assert [grad.dtype for grad in grads] == [dtype] * 3
    assert max(map(deviation, (out, *grads), expected)) < TOLERANCE[dtype]


@over_cases
@DTYPES
@HEADS
@pytest.mark.parametrize("masked", [False, True], ids=["all keys", "mask"])
@pytest.mark.parametrize("cuts", [[24], [1, 23], [23, 1], [5, 7, 12], [1] * 24], ids=str)
def test_pieces_of_any_split_merge_to_the_whole(cuts: list[int], masked: bool, kv_heads: int, dtype: torch.dtype) -> None:
    """Output, log-sum-exp and, from those, the gradients. With a mask, many queries see nothing at all of a piece."""
    leaves = list(inputs(kv_heads, 6, sum(cuts), dtype))
    mask = random_mask(6, sum(cuts)) if masked else None
    upstream = heads(N, 6, 5, dtype)
    expected = whole(leaves, mask, upstream)
    query, wide = leaves[0], torch.promote_types(dtype, torch.float32)
    masks = mask.split(cuts, -1) if mask is not None else [None] * len(cuts)
    pieces = list(zip(leaves[1].split(cuts, 2), leaves[2].split(cuts, 2), masks, strict=True))

    out, lse = (torch.zeros_like(query, dtype=wide), torch.full(query.shape[:3], float("-inf"), dtype=wide))
    for key, value, seen in pieces:
        merge(out, lse, *attend(query, key, value, mask=seen))
    assert deviation(lse, textbook(*leaves, mask)[1]) < TOLERANCE[dtype]
    assert deviation(out, expected[0]) < TOLERANCE[dtype]

    grads = [attend_backward(upstream, query, key, value, out.to(dtype), lse, mask=seen) for key, value, seen in pieces]
    query_grad = torch.stack([grad[0].to(wide) for grad in grads]).sum(0)
    found = (query_grad, torch.cat([grad[1] for grad in grads], 2), torch.cat([grad[2] for grad in grads], 2))
    assert max(map(deviation, found, expected[1:])) < TOLERANCE[dtype]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "tokens, samples": lambda values: values.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "samples, tokens": lambda values: values.transpose(1, 2).contiguous().transpose(1, 2),
    "samples, heads": lambda values: values.contiguous(),
    "some of the heads": lambda values: torch.cat([values] * 2, 1).transpose(1, 2).contiguous().transpose(1, 2)[:, : values.shape[1]],
    "some of the tokens": lambda values: torch.cat([values] * 2, 2).permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)[:, :, : values.shape[2]],
}
"""How an output [b, n, s, d], or its gradient, may lie in memory."""


def check_layouts(leaves: list[Tensor], upstream: Tensor, *, causal: bool, mask: Tensor | None, backend: Any = "auto") -> None:
    """Gradients do not depend on them."""
    seen = torch.ones(upstream.shape[2], leaves[1].shape[2], dtype=torch.bool).tril() if causal else mask
    expected = whole([leaf.cpu() for leaf in leaves], seen if seen is None else seen.cpu(), upstream.cpu())
    out, lse = attend(*leaves, causal=causal, mask=mask, backend=backend)
    assert deviation(out.cpu(), expected[0]) < 2e-2
    for name, lay in LAYOUTS.items():
        grads = attend_backward(lay(upstream), *leaves, lay(out), lse, causal=causal, mask=mask, backend=backend)
        assert max(deviation(found.cpu(), exact) for found, exact in zip(grads, expected[1:], strict=True)) < 2e-2, name


@pytest.mark.parametrize(
    ("kernel", "head_dim", "dtype"),
    [
        (on_hopper, 8, torch.bfloat16),
        (on_efficient, 8, torch.bfloat16),
        (on_efficient, 10, torch.bfloat16),
        (on_efficient, 12, torch.bfloat16),
        (on_efficient, 10, torch.float32),
    ],
)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_outputs_may_lie_as_they_like(kv_heads: int, kernel: Any, head_dim: int, dtype: torch.dtype) -> None:
    """Each kernel by its contract; cuDNN's takes no mask, and only 16 bits."""
    leaves, upstream = list(inputs(kv_heads, 40, 40, dtype, head_dim)), heads(N, 40, 5, dtype, head_dim)
    with kernel():
        check_layouts(leaves, upstream, causal=True, mask=None)
        if kernel is on_efficient:
            check_layouts(leaves, upstream, causal=False, mask=random_mask(40, 40))


@DTYPES
def test_a_query_that_sees_nothing_changes_nothing(dtype: torch.dtype) -> None:
    """First or last: the other piece is the result, bit for bit, and the blind piece gets no gradient."""
    query, key, value = inputs(2, 6, 8, dtype)
    blind = torch.zeros(B, 1, 6, 8, dtype=torch.bool)
    seeing, nothing = attend(query, key, value), attend(query, value, key, mask=blind)
    assert all(part.isfinite().all() for part in nothing)
    wide = torch.promote_types(dtype, torch.float32)
    for order in ((seeing, nothing), (nothing, seeing)):
        out, lse = (torch.zeros_like(query, dtype=wide), torch.full(query.shape[:3], float("-inf"), dtype=wide))
        for piece in order:
            merge(out, lse, *piece)
        assert torch.equal(out, seeing[0].to(wide)) and torch.equal(lse, seeing[1])
    for grad in attend_backward(heads(N, 6, 5, dtype), query, value, key, *seeing, mask=blind):
        assert not grad.any()


@DTYPES
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "mask"])
def test_causal_attention_is_torchs(masked: bool, dtype: torch.dtype) -> None:
    query, key, value = inputs(2, 9, 9, dtype)
    seen = torch.ones(9, 9, dtype=torch.bool).tril()
    mask = (random_mask(9, 9) | torch.eye(9, dtype=torch.bool)) & seen if masked else None
    found = causal_attention(*(part.permute(2, 0, 1, 3) for part in (query, key, value)), mask)
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(
            query.double(), key.double(), value.double(), attn_mask=mask, is_causal=not masked, enable_gqa=True
        )
    assert deviation(found, expected.permute(2, 0, 1, 3).flatten(2)) < TOLERANCE[dtype]


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "causal and mask"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [7, 64])
def test_accelerator_operators_accept_what_they_are_given(length: int, dtype: torch.dtype, masked: bool) -> None:
    """Shapes and dtypes through torch's own shape functions of the accelerator's operators, on the device that computes nothing."""
    leaves = [torch.empty(length, B, count, D, dtype=dtype, device="meta").permute(1, 2, 0, 3) for count in (N, 2, 2)]
    mask = torch.ones(B, 1, length, length, dtype=torch.bool, device="meta") if masked else None
    check_shapes(leaves, causal=True, mask=mask)


def check_shapes(leaves: list[Tensor], **options: Any) -> None:
    """Of output, log-sum-exp and gradients, with their dtypes."""
    out, lse = attend(*leaves, **options)
    grads = attend_backward(out, *leaves, out, lse, **options)
    assert out.shape == leaves[0].shape and out.dtype is leaves[0].dtype
    assert lse.shape == leaves[0].shape[:3] and lse.dtype is torch.float32
    assert [(grad.shape, grad.dtype) for grad in grads] == [(leaf.shape, leaf.dtype) for leaf in leaves]


def pieces_on(device: str, kv_heads: int = 2, head_dim: int = 16, dtype: torch.dtype = torch.bfloat16, length: int = 128) -> list[Tensor]:
    return [torch.empty(length, B, count, head_dim, dtype=dtype, device=device).permute(1, 2, 0, 3) for count in (N, kv_heads, kv_heads)]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_pieces_go_to_cudnn_where_torch_lets_them(kv_heads: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through torch's own shape functions of the operators, on the device that computes nothing. Only torch knows what a device can do, so it
    is asked, for the shapes of this piece."""
    asked = list[Any]()

    def lets(params: Any) -> bool:
        asked.append(params)
        return True

    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(attention, "can_use_cudnn_attention", lets)
    leaves = pieces_on("meta", kv_heads)
    with Dispatched() as seen:
        check_shapes(leaves, causal=causal)
    kernels = [name for name, *_ in seen.named("attention")]
    assert kernels == [f"_scaled_dot_product_cudnn_attention{kind}" for kind in ("", "_backward")]
    assert [(one.is_causal, one.enable_gqa, one.dropout, one.attn_mask) for one in asked] == [(causal, kv_heads != N, 0.0, None)] * 2


def test_pieces_that_cudnn_cannot_take_go_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn, flash, efficient = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(attention, "can_use_cudnn_attention", lambda params: True)

    def kernel(leaves: list[Tensor], bias: Tensor | None = None, backend: Any = "auto", causal: bool = False) -> SDPBackend:
        return piece_kernel(*leaves, bias, causal=causal, backend=backend)

    plain = pieces_on("meta")
    assert kernel(plain) is kernel(plain, backend="fused") is cudnn
    assert kernel(plain, backend="flash") is flash
    assert kernel(pieces_on("meta", head_dim=192)) is flash
    for length in (64, 192, 1000):
        odd = pieces_on("meta", length=length)
        assert kernel(odd) is flash and kernel(odd, causal=True) is cudnn, "the rest of a tile has a mask where causality has one"
    assert kernel(pieces_on("meta", head_dim=12)) is kernel(pieces_on("meta", head_dim=264)) is efficient
    assert kernel(pieces_on("meta", dtype=torch.float32)) is kernel(plain, bias=plain[0]) is efficient
    torch.use_deterministic_algorithms(True)
    try:
        assert kernel(plain) is kernel(plain, backend="fused") is flash
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91500)
    assert kernel(plain) is flash
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(attention, "can_use_cudnn_attention", lambda params: False)
    assert kernel(plain) is flash


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_scores_of_grouped_heads_where_a_kernel_takes_none(dtype: torch.dtype, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an accelerator flash attention and cuDNN take 16 bits and grouped heads. The memory-efficient kernel takes the rest, but no groups,
    and what no kernel takes torch computes with all scores of all heads."""
    called = list[tuple[int, bool]]()
    original = F.scaled_dot_product_attention

    def note(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        assert key.shape == value.shape
        called.append((key.shape[1], options["enable_gqa"]))
        return original(query, key, value, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", note)
    leaves, ids = packed(dtype)
    mask = document_mask(ids) if masked else None
    expected = causal_attention(*leaves, mask)
    monkeypatch.setattr(attention, "is_host", lambda device: False)
    found = causal_attention(*leaves, mask)
    assert called == [(2, True), (N, False) if dtype is torch.float32 else (2, True)]
    assert deviation(found, expected.double()) < TOLERANCE[dtype]


def test_cudnn_never_computes_packed_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward in torch 2.11 writes beyond its memory where a document is longer than head_dim."""
    called = list[tuple[Any, ...]]()

    def operator(name: str) -> Any:
        def run(*args: Any, scale: float | None) -> tuple[Tensor, None]:
            called.append((name, *args[3:], scale))
            return torch.empty_like(args[0]), None

        return run

    names = ("_cudnn_attention_forward", "_flash_attention_forward")
    monkeypatch.setattr(documents, "_aten", SimpleNamespace(**{name: operator(name) for name in names}))
    starts = torch.tensor([0, 40, 128, 256, 128 * B], dtype=torch.int32, device="meta")
    packed = Documents(starts, np.array([0, 40, 128, 256, 128 * B]))
    query, key, value = (leaf.permute(2, 0, 1, 3) for leaf in pieces_on("meta"))
    flash = ("_flash_attention_forward", starts, starts, 128, 128, 0.0, True, False, None)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    for backend in ("auto", "flash", "fused"):
        assert document_attention(query, key, value, packed, PLAIN_SCORES, backend).shape == (128, B, N * 16)  # type: ignore[arg-type]
        [call] = called
        called.clear()
        assert all(one is other or one == other for one, other in zip(call, flash, strict=True))


def packed(dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values [s, b, n, d] of packed documents, and ids [s, b]; documents of one token, and one over a whole sequence."""
    ids = torch.tensor([[0] * 11, [0] + [1] * 4 + [2] + [3] * 5, [7, 7, 5, 5, 5, 5, 5, 5, 9, 9, 9]], dtype=torch.int32).t()
    leaves = [part.permute(2, 0, 1, 3).contiguous().requires_grad_() for part in inputs(2, 11, 11, dtype)]
    return leaves, ids


@DTYPES
def test_documents_are_the_mask(dtype: torch.dtype) -> None:
    """Output and gradients."""
    leaves, ids = packed(dtype)
    counted = Documents.of(ids)
    assert counted.starts.dtype is torch.int32 and counted.longest == 11
    assert counted.starts.tolist() == list(counted.bounds) == [0, 11, 12, 16, 17, 22, 24, 30, 33]
    upstream = torch.randn(11, B, N * D, generator=torch.Generator().manual_seed(5)).to(dtype)
    results = []
    for out in (document_attention(*leaves, counted, PLAIN_SCORES), causal_attention(*leaves, document_mask(ids))):
        results.append((out, *torch.autograd.grad(out, leaves, upstream)))
    for found, expected in zip(*results, strict=True):
        assert deviation(found, expected.double()) < TOLERANCE[dtype]


@pytest.mark.parametrize("batch", [1, 3])
def test_the_accelerator_is_sent_documents_as_they_lie(batch: int) -> None:
    """Shapes, dtypes and strides through torch's own functions of the operator, forward and backward, on the device that computes
    nothing. Parts of one projection of one sequence are not copied."""
    projected = torch.empty(64, batch, 8, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    counted = Documents(torch.empty(5, dtype=torch.int32, device="meta"), np.array([0, 20, 40, 60, 64 * batch]))
    with Dispatched() as seen:
        out = document_attention(*projected.split([4, 2, 2], dim=2), counted, PLAIN_SCORES)
    assert out.shape == (64, batch, 64) and out.dtype is torch.bfloat16
    [(_, (query, key, value, *_), _)] = seen.named("_flash_attention_forward")
    assert query.shape == (64 * batch, 4, 16) and key.shape == value.shape == (64 * batch, 2, 16)
    if batch == 1:
        assert [part.stride() for part in (query, key, value)] == [(128, 16, 1)] * 3
    out.backward(torch.empty_like(out))
    assert projected.grad is not None and projected.grad.shape == projected.shape


def test_documents_need_a_kernel_that_takes_them() -> None:
    there, narrow = torch.device("meta"), torch.bfloat16
    taken = [(there, narrow, 128), (there, torch.float16, 256)]
    refused = [(torch.device("cpu"), narrow, 128), (there, torch.float32, 128), (there, narrow, 12), (there, narrow, 512)]
    queries = [torch.empty(0, head_dim, dtype=dtype, device=device) for device, dtype, head_dim in taken + refused]
    assert [attends_by_document(query, PLAIN_SCORES) for query in queries] == [True] * len(taken) + [False] * len(refused)
    assert not attends_by_document(queries[0], ScoreRule(softcap=1.0))


def test_cudnn_comes_first_where_it_is_sound() -> None:
    cudnn, flash, others = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH))
    assert attention_order(91900) == attention_order(91900, "fused") == (cudnn, flash, *others)
    for version in (91500, 90100, None):  # wrong results in silence: not even where no other kernel takes the shapes
        assert attention_order(version) == attention_order(version, "fused") == (flash, *others)
    assert attention_order(91900, "flash") == (flash, *others)
    for backend in ("auto", "flash"):
        assert attention_order(91900, backend, deterministic=True) == (flash, *others)  # type: ignore[arg-type]


def test_who_has_not_the_fastest_kernel_is_told() -> None:
    cudnn, flash, hopper = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, (9, 0)
    assert attention_problem(cudnn, hopper, 91900) is None and attention_problem(flash, (8, 0), 90100) is None
    old, other = (attention_problem(flash, hopper, 90100), attention_problem(SDPBackend.EFFICIENT_ATTENTION, (10, 0), 91900))
    assert old is not None and "runs FLASH_ATTENTION, not cuDNN's" in old and "cuDNN is 90100, and not later than 91500" in old
    assert other is not None and "EFFICIENT_ATTENTION" in other and "cannot take this model's heads" in other
    asked = attention_problem(flash, (8, 0), 90100, "fused")
    assert asked is not None and "not later than 91500" in asked
    assert attention_warnings(torch.device("cpu"), torch.bfloat16, 4, 2, 64) == []


@pytest.mark.parametrize("version", [91900, None])
def test_the_order_holds_inside_and_ends_with_it(version: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch takes a list of kernels for a set, unless it is told that it is an order."""
    before = torch._C._get_sdp_priority_order()
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    with _preferred_kernels(torch.device("meta"), "auto"):
        order = [int(kernel) for kernel in attention_order(version)]
        assert torch._C._get_sdp_priority_order()[: len(order)] == order
        assert torch.backends.cuda.cudnn_sdp_enabled() is (version is not None) and torch.backends.cuda.math_sdp_enabled()
    assert torch._C._get_sdp_priority_order() == before
    with _preferred_kernels(torch.device("cpu"), "auto"):
        assert torch._C._get_sdp_priority_order() == before


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2)])
@pytest.mark.parametrize("length", [384, 4096])
def test_cudnn_computes_on_hopper(length: int, heads: int, kv_heads: int) -> None:
    """From views of one projection, as layers give them; on other devices and with older versions another kernel does."""
    projected = torch.randn(length, 1, heads + 2 * kv_heads, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    parts = projected.split([heads, kv_heads, kv_heads], dim=2)
    preferred = attention_order(torch.backends.cudnn.version())[0] if torch.cuda.get_device_capability() >= (9, 0) else None
    assert preferred in (None, attention_kernel(*parts))
    out = causal_attention(*parts, None)
    out.backward(torch.ones_like(out))
    wide = projected.detach().double().requires_grad_()
    groups = heads // kv_heads
    q, k, v = wide.split([heads, kv_heads, kv_heads], dim=2)
    exact = causal_attention(q, k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2), None)
    exact.backward(torch.ones_like(exact))
    assert deviation(out, exact.detach()) < 1e-2 and deviation(projected.grad, wide.grad) < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "flash", "fused"])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(("shape", "causal"), [((384, 384), True), ((384, 768), False), ((256, 128), False)], ids=str)
def test_pieces_on_a_device(shape: tuple[int, int], causal: bool, kv_heads: int, backend: Any) -> None:
    """Output, log-sum-exp and gradients against the textbook: what the log-sum-exp of each kernel means, only a GPU shows. The gradients come
    from the statistics of a whole of which this is a piece."""
    queries, keys = shape
    device = torch.device("cuda", 0)
    sizes = ((queries, N), (keys, kv_heads), (keys, kv_heads))
    # Rows of a longer sequence, as context parallelism gives them.
    longer = [torch.randn(2 * length, B, count, 128, device=device, dtype=torch.bfloat16) for length, count in sizes]
    leaves = [part.permute(1, 2, 0, 3)[:, :, -length:] for part, (length, _) in zip(longer, sizes, strict=True)]
    wanted = piece_kernel(*leaves, None, causal=causal, backend=backend)
    first = attention_order(torch.backends.cudnn.version())[0]
    sound = first is SDPBackend.CUDNN_ATTENTION and torch.cuda.get_device_capability() >= (8, 0)
    assert wanted is (SDPBackend.CUDNN_ATTENTION if sound and backend != "flash" else SDPBackend.FLASH_ATTENTION)
    seen = torch.ones(shape, dtype=torch.bool, device=device).tril() if causal else None
    out, lse = attend(*leaves, causal=causal, backend=backend)
    expected, expected_lse = textbook(*leaves, seen)
    assert deviation(out, expected) < 1e-2 and deviation(lse, expected_lse) < 1e-4
    wide = [leaf.double().requires_grad_() for leaf in leaves]
    other = [torch.randn(B, kv_heads, 64, 128, device=device, dtype=torch.bfloat16) for _ in range(2)]
    whole_out, whole_lse = (torch.zeros_like(out, dtype=torch.float32), torch.full_like(lse, float("-inf")))
    for piece in ((out, lse), attend(leaves[0], *other, backend=backend)):
        merge(whole_out, whole_lse, *piece)
    upstream = torch.randn_like(out)
    mask = None if seen is None else torch.cat([seen, seen.new_ones(queries, 64)], 1)
    exact, _ = textbook(wide[0], *(torch.cat([part, more.double()], 2) for part, more in zip(wide[1:], other, strict=True)), mask)
    exact_grads = torch.autograd.grad(exact, wide, upstream.double())
    grads = attend_backward(upstream, *leaves, whole_out.to(out.dtype), whole_lse, causal=causal, backend=backend)
    rest, *_ = attend_backward(upstream, leaves[0], *other, whole_out.to(out.dtype), whole_lse, backend=backend)
    assert max(map(deviation, (grads[0].float() + rest.float(), *grads[1:]), exact_grads)) < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flash", "fused"])
@pytest.mark.parametrize("case", ["causal", "mask", "12 elements"])
def test_outputs_may_lie_as_they_like_on_a_device(case: str, backend: Any) -> None:
    """A mask and heads of 12 elements are the memory-efficient kernel's, whatever is asked for."""
    head_dim, length = 12 if case == "12 elements" else 128, 256
    q, k, v, upstream = (
        torch.randn(length, B, count, head_dim, device="cuda", dtype=torch.bfloat16).permute(1, 2, 0, 3) for count in (N, 2, 2, N)
    )
    mask = random_mask(length, length).cuda() if case == "mask" else None
    check_layouts([q, k, v], upstream, causal=mask is None, mask=mask, backend=backend)


@pytest.mark.gpu
def test_documents_on_a_device() -> None:
    """Output and gradients of packed documents, against the mask on the host."""
    leaves, ids = packed(torch.bfloat16)
    there = [leaf.detach().cuda().requires_grad_() for leaf in leaves]
    counted = Documents.of(ids)
    found = document_attention(*there, Documents(counted.starts.cuda(), counted.bounds), PLAIN_SCORES)
    expected = causal_attention(*leaves, document_mask(ids))
    grads = torch.autograd.grad(found, there, torch.ones_like(found))
    exact = torch.autograd.grad(expected, leaves, torch.ones_like(expected))
    for one, other in zip((found, *grads), (expected, *exact), strict=True):
        assert deviation(one.cpu(), other.double()) < 2e-2
