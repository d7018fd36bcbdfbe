"""The norms of queries and keys against the textbook, on one rank and on several, also where neighbours share a key head."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from megatron_llama.launch.launcher import Place
from megatron_llama.model.nn.ops import PLAIN
from megatron_llama.model.nn.qk_norm import norm_of_heads, norm_of_projections
from torch import Tensor
from torch.autograd import gradcheck

from tests.harness import Cluster
from tests.model.nn.spmd import numbers, part, replicated, tensor_mesh, weighted_total

S, B, D, QUERIES, EPS = 3, 2, 4, 4, 1e-5
BOTH = pytest.mark.parametrize("one_plus", [False, True], ids=["weight", "1 + weight"])


def textbook(qkv: Tensor, weights: tuple[Tensor, Tensor], keys: int, one_plus: bool, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [s, b, n * d], normalized over ``width`` numbers each: a head, or all of them."""
    query, key, value = qkv.split((QUERIES * D, keys * D, keys * D), dim=-1)
    normed = []
    for whole, weight in zip((query, key), weights, strict=True):
        size = width or whole.shape[-1]
        normed.append(F.rms_norm(whole.unflatten(-1, (-1, size)), (size,), weight + float(one_plus), EPS).flatten(2))
    return normed[0], normed[1], value


@BOTH
def test_each_head_is_normalized_in_place(one_plus: bool) -> None:
    qkv, weights = numbers(S, B, (QUERIES + 4) * D, seed=1), (numbers(D, seed=2), numbers(D, seed=3))

    def normed(qkv: Tensor, *weights: Tensor) -> Tensor:
        return norm_of_heads(qkv.clone(), *weights, query=QUERIES, key=2, eps=EPS, one_plus=one_plus, ops=PLAIN)

    expected = torch.cat(textbook(qkv, weights, 2, one_plus, D), -1)
    torch.testing.assert_close(normed(qkv, *weights), expected, rtol=1e-12, atol=1e-12)
    assert gradcheck(normed, (qkv, *weights))
    given = qkv.detach().clone()
    assert norm_of_heads(given, *weights, query=QUERIES, key=2, eps=EPS, one_plus=one_plus, ops=PLAIN).data_ptr() == given.data_ptr()


def check_projections(place: Place, keys: int, one_plus: bool) -> None:
    """The output of all ranks, of which some may hold the same keys."""
    tp = tensor_mesh(place).tp
    copies = max(1, tp.size // keys)

    def own(keys_or_values: Tensor, dim: int) -> Tensor:
        return replicated(keys_or_values).chunk(tp.size // copies, dim)[tp.rank // copies]

    def output(query: Tensor, key: Tensor, value: Tensor, query_weight: Tensor, key_weight: Tensor) -> Tensor:
        qkv = torch.cat((part(query, tp, 2), own(key, 2), own(value, 2)), -1)
        return norm_of_projections(qkv, part(query_weight, tp), own(key_weight, 0), eps=EPS, one_plus=one_plus, tp=tp)

    sizes = (QUERIES * D, keys * D, keys * D)
    inputs = [numbers(S, B, size, seed=seed) for seed, size in enumerate(sizes)] + [numbers(size, seed=7) for size in sizes[:2]]
    assert gradcheck(lambda *given: weighted_total(output(*given), tp, split=True), inputs)
    query, key, value = textbook(torch.cat(inputs[:3], -1), (inputs[3], inputs[4]), keys, one_plus, 0)
    expected = torch.cat((query.chunk(tp.size, 2)[tp.rank], own(key, 2), own(value, 2)), -1)
    torch.testing.assert_close(output(*inputs), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.long
@BOTH
@pytest.mark.parametrize(("ranks", "keys"), [(1, 2), (2, 2), (2, 1), (4, 2)])
def test_projections_are_normalized_over_all_ranks(cluster: Cluster, ranks: int, keys: int, one_plus: bool) -> None:
    cluster.run(ranks, check_projections, keys, one_plus)


@pytest.mark.parametrize("width", [D, 0], ids=["heads", "projections"])
@BOTH
def test_bf16_is_rounded_where_transformers_rounds(one_plus: bool, width: int) -> None:
    """Before a weight is applied as in LLaMA and Qwen 3, behind 1 + w alone as in Gemma."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    heads = 64
    qkv = numbers(S, B, (QUERIES + 4) * heads, seed=1).detach().bfloat16()
    sizes = [heads, heads] if width else [QUERIES * heads, 2 * heads]
    norms = [(Gemma3RMSNorm if one_plus else Qwen3RMSNorm)(size, eps=EPS).bfloat16() for size in sizes]
    with torch.no_grad():
        for seed, norm in enumerate(norms):
            norm.weight.copy_(numbers(len(norm.weight), seed=seed))
        parts = qkv.split((QUERIES * heads, 2 * heads, 2 * heads), -1)
        expected = [norm(one.unflatten(-1, (-1, len(norm.weight)))).flatten(2) for norm, one in zip(norms, parts[:2], strict=True)]
        weights = [norm.weight for norm in norms]
        if width:
            found = norm_of_heads(qkv.clone(), *weights, query=QUERIES, key=2, eps=EPS, one_plus=one_plus, ops=PLAIN)
        else:
            found = norm_of_projections(qkv.clone(), *weights, eps=EPS, one_plus=one_plus, tp=tensor_mesh(Place(0, 1, 0)).tp)
    assert torch.equal(found, torch.cat((*expected, parts[2]), -1))
