"""Pieces of attention against the textbook in fp64, their merge against the whole, and the operators that an accelerator is sent."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_llama.nn.attention import attend, attend_backward, causal_attention, merge

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
HEADS = pytest.mark.parametrize("kv_heads", [4, 2, 1], ids=lambda heads: f"{heads} kv heads")
B, N, D = 3, 4, 8


def deviation(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    assert found.shape == expected.shape
    assert found.isfinite().all()
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


def heads(count: int, length: int, seed: int, dtype: torch.dtype) -> Tensor:
    """[b, count, length, d] in the memory layout of the model's activations."""
    values = torch.randn(length, B, count, D, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).permute(1, 2, 0, 3)


def inputs(kv_heads: int, queries: int, keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return heads(N, queries, 1, dtype), heads(kv_heads, keys, 2, dtype), heads(kv_heads, keys, 3, dtype)


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

    out, lse = torch.zeros_like(query, dtype=wide), torch.full(query.shape[:3], float("-inf"), dtype=wide)
    for key, value, seen in pieces:
        merge(out, lse, *attend(query, key, value, mask=seen))
    assert deviation(lse, textbook(*leaves, mask)[1]) < TOLERANCE[dtype]
    assert deviation(out, expected[0]) < TOLERANCE[dtype]

    grads = [attend_backward(upstream, query, key, value, out.to(dtype), lse, mask=seen) for key, value, seen in pieces]
    query_grad = torch.stack([grad[0].to(wide) for grad in grads]).sum(0)
    found = query_grad, torch.cat([grad[1] for grad in grads], 2), torch.cat([grad[2] for grad in grads], 2)
    assert max(map(deviation, found, expected[1:])) < TOLERANCE[dtype]


@DTYPES
def test_a_query_that_sees_nothing_changes_nothing(dtype: torch.dtype) -> None:
    """First or last: the other piece is the result, bit for bit, and the blind piece gets no gradient."""
    query, key, value = inputs(2, 6, 8, dtype)
    blind = torch.zeros(B, 1, 6, 8, dtype=torch.bool)
    seeing, nothing = attend(query, key, value), attend(query, value, key, mask=blind)
    assert all(part.isfinite().all() for part in nothing)
    wide = torch.promote_types(dtype, torch.float32)
    for order in ((seeing, nothing), (nothing, seeing)):
        out, lse = torch.zeros_like(query, dtype=wide), torch.full(query.shape[:3], float("-inf"), dtype=wide)
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
    out, lse = attend(*leaves, causal=True, mask=mask)
    grads = attend_backward(out, *leaves, out, lse, causal=True, mask=mask)
    assert out.shape == leaves[0].shape and out.dtype is dtype
    assert lse.shape == (B, N, length) and lse.dtype is torch.float32
    assert [(grad.shape, grad.dtype) for grad in grads] == [(leaf.shape, dtype) for leaf in leaves]
