"""Context parallelism: every rank's part of output and gradients is that of one process, in any dtype, with both algorithms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron_llama.engine.comm.p2p import exchange
from megatron_llama.engine.comm.recorder import Recorder, Traffic
from megatron_llama.engine.mesh import Axis
from megatron_llama.errors import ConfigError
from megatron_llama.launch.launcher import Place
from megatron_llama.model.nn import context
from megatron_llama.model.nn.attention import ScoreRule
from megatron_llama.model.nn.context import context_attention, local_sequence
from megatron_llama.model.nn.documents import Documents, SplitDocuments
from megatron_llama.model.plan.zigzag import Piece, chunk_owner, gathered_pieces, own_pieces, ring_pieces, zigzag_chunks
from megatron_llama.planner.context_traffic import window_messages
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.harness import Cluster
from tests.model.nn.cudnn import on_hopper
from tests.model.nn.dispatch import Dispatched, scores
from tests.model.nn.efficient import on_efficient
from tests.model.nn.flash import document_mask, on_flash
from tests.model.nn.spmd import numbers
from tests.nccl_transport import installed

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
SIZES = pytest.mark.parametrize("size", [2, 4])
COMMS = pytest.mark.parametrize("comm", ["all_gather", "ring"])
CHUNK, B, N, D = 6, 3, 4, 8


def context_axis(place: Place) -> Axis:
    """All ranks are context-parallel, with a recorder of their own."""
    group = dist.group.WORLD if place.world_size > 1 else None
    return Axis("cp", place.rank, tuple(range(place.world_size)), group, Recorder())


def inputs(length: int, kv_heads: int, dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value and the gradient of the output, of the whole sequence, the same on every rank."""
    shapes = ((N, D), (kv_heads, D), (kv_heads, D), (N * D,))
    return [numbers(length, B, *shape, seed=seed).detach().to(dtype) for seed, shape in enumerate(shapes)]


def documents(length: int) -> Tensor:
    """Ids [s, b]: one document; documents of one token, of several that end with a chunk, and a long one behind; documents of odd lengths, the
    first of which ends inside a chunk and the others go over chunks and their borders."""
    places = torch.arange(length)
    short = torch.where(places < CHUNK, places, torch.where(places < 2 * CHUNK, CHUNK, CHUNK + 1))
    return torch.stack([torch.zeros_like(places), short, (places + 5) // 11], dim=1)


def split(ids: Tensor | None, cp: Axis) -> SplitDocuments | None:
    return None if ids is None else SplitDocuments.of(Documents.of(ids), len(ids), cp)


def expected(leaves: list[Tensor], document_ids: Tensor | None) -> list[Tensor]:
    """Output and gradients of torch's unfused attention in fp64, in the whole sequence's order."""
    query, key, value = (leaf.double().requires_grad_() for leaf in leaves[:3])
    mask = None if document_ids is None else document_mask(document_ids)
    with sdpa_kernel(SDPBackend.MATH):
        heads = (leaf.permute(1, 2, 0, 3) for leaf in (query, key, value))
        out = F.scaled_dot_product_attention(*heads, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    out = out.permute(2, 0, 1, 3).flatten(2)
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), leaves[3].double())]


def check_part(cp: Axis, comm: Any, leaves: list[Tensor], ids: Tensor | None, rule: ScoreRule, whole: list[Tensor], least: float) -> None:
    """This rank's part of output and gradients is that of the whole, relative to the largest element, or to ``least``."""
    *local, upstream = (local_sequence(leaf, cp).requires_grad_() for leaf in leaves)
    out = context_attention(*local, cp=cp, comm=comm, documents=split(ids, cp), rule=rule)
    found = [out.detach(), *torch.autograd.grad(out, local, upstream)]
    for name, ours, exact in zip(("out", "query", "key", "value"), found, whole, strict=True):
        theirs = local_sequence(exact, cp)
        assert ours.shape == theirs.shape and ours.dtype is leaves[0].dtype
        error = ((ours.double() - theirs).abs().max() / exact.abs().max().clamp(min=least)).item()
        assert error < (1 + least) * TOLERANCE[ours.dtype], f"{name} with {leaves[1].shape[2]} kv heads and {rule}: {error}"  # false for NaN


def check_against_one_process(place: Place, comm: Any, dtype: torch.dtype, with_documents: bool) -> None:
    cp = context_axis(place)
    length = 2 * cp.size * CHUNK
    ids = documents(length) if with_documents else None
    for kv_heads in (N, 2, 1):
        leaves = inputs(length, kv_heads, dtype)
        check_part(cp, comm, leaves, ids, ScoreRule(), expected(leaves, ids), 0.0)


def check_cut(place: Place, dtype: torch.dtype, with_documents: bool) -> None:
    """A gather in as many messages as there are key/value heads: what one process computes, in as many bytes as one message has."""
    cp = context_axis(place)
    length = 2 * cp.size * CHUNK
    ids = documents(length) if with_documents else None
    for kv_heads in (N, 2, 1):
        leaves = inputs(length, kv_heads, dtype)
        whole, sent = expected(leaves, ids), []
        for least in (1 << 30, 1):
            cp.recorder.traffic.clear()
            with mock.patch.object(context, "LEAST_MESSAGE", least):
                check_part(cp, "all_gather", leaves, ids, ScoreRule(), whole, 0.0)
            sent.append({key: (one.calls, one.bytes) for key, one in cp.recorder.traffic.items()})
        assert sent[1] == {key: (calls * kv_heads, size) for key, (calls, size) in sent[0].items()} and len(sent[0]) == 2


def in_windows(leaves: list[Tensor], rule: ScoreRule, document_ids: Tensor | None) -> list[Tensor]:
    """Output and gradients in fp64, score by score."""
    query, key, value = (leaf.double().requires_grad_() for leaf in leaves[:3])
    q, k, v = (leaf.permute(1, 2, 0, 3) for leaf in (query, key, value))
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if rule.scale is None else rule.scale)
    if rule.softcap:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    places = torch.arange(len(query))
    seen = places <= places.unsqueeze(-1)
    if rule.window:
        seen = seen & (places > places.unsqueeze(-1) - rule.window)
    if document_ids is not None:
        seen = seen & document_mask(document_ids)
    out = (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2)
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), leaves[3].double())]


def check_windows(place: Place, comm: Any, dtype: torch.dtype, with_documents: bool, *, only_windows: bool = False) -> None:
    """Windows within a chunk, to its edge, one beyond, over several chunks, and as long as the sequence; and capped scores."""
    cp = context_axis(place)
    length = 2 * cp.size * CHUNK
    ids = documents(length) if with_documents else None
    leaves = inputs(length, 2, dtype)
    rules = [ScoreRule(window=window) for window in (1, 2, CHUNK, CHUNK + 1, CHUNK + 2, 2 * CHUNK + 3, length - 1)]
    others = [ScoreRule(window=length), ScoreRule(0.7, CHUNK + 3, 1.5), ScoreRule(0.7, 0, 1.5)]
    for rule in rules if only_windows else rules + others:
        check_part(cp, comm, leaves, ids, rule, in_windows(leaves, rule, ids), 1.0)


def check_strided_gradient(place: Place, comm: Any) -> None:
    """The sum of the output has a gradient whose strides are all zero."""
    cp = context_axis(place)
    leaves = inputs(2 * cp.size * CHUNK, 2, torch.float64)
    leaves[3] = torch.ones_like(leaves[3])
    local = [local_sequence(leaf, cp).requires_grad_() for leaf in leaves[:3]]
    found = torch.autograd.grad(context_attention(*local, cp=cp, comm=comm).sum(), local)
    for ours, whole in zip(found, expected(leaves, None)[1:], strict=True):
        torch.testing.assert_close(ours, local_sequence(whole, cp), rtol=1e-12, atol=1e-12)


def traffic(place: Place, comm: Any, dtype: torch.dtype, window: int = 0) -> list[dict[tuple[str, str], Traffic]]:
    """What forward sent, and what forward and backward sent together."""
    cp = context_axis(place)
    *local, upstream = (local_sequence(leaf, cp).requires_grad_() for leaf in inputs(2 * cp.size * CHUNK, 2, dtype))
    out = context_attention(*local, cp=cp, comm=comm, rule=ScoreRule(window=window))
    forward = {key: Traffic(one.calls, one.bytes) for key, one in cp.recorder.traffic.items()}
    out.backward(upstream)
    return [forward, cp.recorder.traffic]


def check_cudnn(place: Place, comm: Any) -> None:
    """Every piece, forward and backward, is computed by cuDNN, and their merge is what one process computes in fp64."""
    with on_hopper() as cudnn:
        check_against_one_process(place, comm, torch.bfloat16, False)
    assert cudnn.forward == cudnn.backward > 0


def scores_of(place: Place, comm: Any, with_documents: bool, window: int = 0) -> tuple[int, int]:
    """Forward and backward."""
    cp = context_axis(place)
    length = 2 * cp.size * CHUNK
    ids = documents(length) if with_documents else None
    *local, upstream = (local_sequence(leaf, cp).requires_grad_() for leaf in inputs(length, 2, torch.float32))
    with Dispatched() as dispatched:
        context_attention(*local, cp=cp, comm=comm, documents=split(ids, cp), rule=ScoreRule(window=window)).backward(upstream)
    return scores(dispatched)


def check_exchange(place: Place) -> None:
    """Around the ring until every rank has seen every number, more steps than the ring has ranks."""
    cp = context_axis(place)
    current = torch.full((3,), float(cp.rank))
    for step in range(1, 2 * cp.size + 1):
        following = torch.empty(3)
        exchange(current, following, cp, to=(cp.rank + 1) % cp.size, source=(cp.rank - 1) % cp.size).wait()
        current = following
        assert torch.equal(current, torch.full((3,), float((cp.rank - step) % cp.size)))
    steps = 2 * cp.size
    assert cp.recorder.traffic == {("cp", "send"): Traffic(steps, 12 * steps), ("cp", "receive"): Traffic(steps, 12 * steps)}


@pytest.mark.few(3, all=12)
@SIZES
@COMMS
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("with_documents", [False, True], ids=["causal", "documents"])
def test_ranks_compute_what_one_process_computes(cluster: Cluster, size: int, comm: str, dtype: torch.dtype, with_documents: bool) -> None:
    cluster.run(size, check_against_one_process, comm, dtype, with_documents)


@SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("with_documents", [False, True], ids=["causal", "documents"])
def test_a_gather_in_several_messages(cluster: Cluster, size: int, dtype: torch.dtype, with_documents: bool) -> None:
    cluster.run(size, check_cut, dtype, with_documents)


@pytest.mark.parametrize(("kv_heads", "size", "messages"), [(8, 4 << 20, 4), (8, (4 << 20) - 32, 1), (6, 3 << 20, 2), (3, 64 << 20, 1)])
def test_small_gathers_are_one_message(kv_heads: int, size: int, messages: int) -> None:
    """``size``: bytes that all ranks have together."""
    axis = Axis("cp", 0, (0, 1), None, Recorder())
    assert context._messages(torch.empty(1, 1, 1, kv_heads, size // 2 // kv_heads, dtype=torch.int8), axis) == messages


@SIZES
@COMMS
def test_pieces_of_cudnn_merge_to_the_whole(cluster: Cluster, size: int, comm: str) -> None:
    cluster.run(size, check_cudnn, comm)


@pytest.mark.long
@SIZES
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("with_documents", [False, True], ids=["causal", "documents"])
def test_windows_over_ranks(cluster: Cluster, size: int, dtype: torch.dtype, with_documents: bool) -> None:
    cluster.run(size, check_windows, "ring" if size == 2 else "all_gather", dtype, with_documents)


def check_by_flash(place: Place, comm: Any, with_documents: bool) -> int:
    """The CPU is taken for a GPU, and its flash attention computed by its contract. Return the scores that forward computes without a window."""
    # The rectangles of documents have new sizes in every step, for each of which cuDNN would make a plan.
    with on_flash(cudnn=with_documents) as flash:
        check_against_one_process(place, comm, torch.bfloat16, with_documents)
        computed = flash.scores
        check_windows(place, comm, torch.bfloat16, with_documents, only_windows=True)
    assert set(flash.calls) == {"forward", "backward"}
    return computed


@pytest.mark.few(2)
@COMMS
@pytest.mark.parametrize("with_documents", [False, True], ids=["causal", "documents"])
def test_flash_attention_over_ranks(cluster: Cluster, comm: str, with_documents: bool) -> None:
    """Documents in windows included; no more scores than are seen."""
    length = 8 * CHUNK
    ids = documents(length) if with_documents else torch.zeros(length, B)
    assert sum(cluster.run(4, check_by_flash, comm, with_documents)) == 3 * N * int(document_mask(ids).sum())


def check_by_efficient(place: Place, comm: Any, with_documents: bool) -> None:
    """The CPU is taken for a GPU with heads that its flash attention does not take."""
    with on_efficient() as efficient:
        check_against_one_process(place, comm, torch.bfloat16, with_documents)
        check_windows(place, comm, torch.bfloat16, with_documents, only_windows=True)
    assert set(efficient.calls) == {"forward", "backward"}


@pytest.mark.few(2)
@COMMS
@pytest.mark.parametrize("with_documents", [False, True], ids=["causal", "documents"])
def test_memory_efficient_attention_over_ranks(cluster: Cluster, comm: str, with_documents: bool) -> None:
    """Of several samples, whose tokens lie side by side: every piece is a part of longer tensors."""
    cluster.run(2, check_by_efficient, comm, with_documents)


def check_windows_by_nccl(place: Place) -> None:
    with installed():
        check_windows(place, "ring", torch.float32, False)


def test_windows_by_the_rules_of_nccl(cluster: Cluster) -> None:
    """Messages to several ranks at once, each rank with its own."""
    cluster.run(4, check_windows_by_nccl)


def seen_of_others(rank: int, size: int, window: int) -> dict[int, set[int]]:
    """The positions of each other rank that this rank's queries see, one by one."""
    holder = {place: chunk_owner(place // CHUNK, size)[0] for place in range(2 * size * CHUNK)}
    seen: dict[int, set[int]] = {}
    for query in (place for place in holder if holder[place] == rank):
        for key in range(max(0, query - window + 1), query):
            if holder[key] != rank:
                seen.setdefault(holder[key], set()).add(key)
    return seen


@pytest.mark.few(3)
@pytest.mark.parametrize(("size", "window"), [(2, 4), (4, 1), (4, 4), (4, CHUNK + 4), (4, 3 * CHUNK)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_only_what_windows_reach_is_sent(cluster: Cluster, size: int, window: int, dtype: torch.dtype) -> None:
    """To the byte: keys with values once in each direction, and their gradients once, in at least fp32; nothing that no query sees."""
    token = 2 * B * 2 * D
    for rank, (forward, both) in enumerate(cluster.run(size, traffic, "ring", dtype, window)):
        others = [seen_of_others(other, size, window).get(rank, set()) for other in range(size) if other != rank]
        sent, messages = sum(map(len, others)), sum(map(bool, others))
        own = seen_of_others(rank, size, window).values()
        received, sources = sum(map(len, own)), len(own)
        assert window_messages(rank, size, CHUNK, window) == (messages, sent)
        wide = torch.promote_types(dtype, torch.float32).itemsize
        narrow = dtype.itemsize
        forwards = {"send": (messages, sent * token * narrow), "receive": (sources, received * token * narrow)}
        backwards = {"send": (2 * messages + sources, token * (2 * sent * narrow + received * wide))}
        backwards["receive"] = (2 * sources + messages, token * (2 * received * narrow + sent * wide))
        assert forward == {("cp", way): Traffic(*counts) for way, counts in forwards.items() if counts[0]}
        assert both == {("cp", way): Traffic(*counts) for way, counts in backwards.items() if counts[0]}


@pytest.mark.long
def test_chunks_beyond_the_window_are_not_computed(cluster: Cluster) -> None:
    """A rank's chunks with themselves, and at most as much again as the window reaches."""
    for found, _ in cluster.run(4, scores_of, "ring", False, 3):
        own = 2 * CHUNK * CHUNK
        assert own <= found // (B * N) <= own + 2 * 2 * 2


@COMMS
def test_gradient_of_a_sum(cluster: Cluster, comm: str) -> None:
    cluster.run(2, check_strided_gradient, comm)


@pytest.mark.few(6)
@SIZES
@COMMS
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_messages_without_windows(cluster: Cluster, size: int, comm: str, dtype: torch.dtype) -> None:
    """Forward: keys with values once in each direction. Backward: those again, and their gradients once, in at least fp32."""
    elements, steps = 2 * (2 * CHUNK) * B * 2 * D, size - 1
    narrow, wide = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
    for forward, both in cluster.run(size, traffic, comm, dtype):
        if comm == "ring":
            assert forward == {("cp", way): Traffic(steps, steps * elements * narrow) for way in ("send", "receive")}
            assert both == {("cp", way): Traffic(3 * steps, steps * elements * (2 * narrow + wide)) for way in ("send", "receive")}
        else:
            assert forward == {("cp", "all_gather"): Traffic(1, size * elements * narrow)}
            gradients = Traffic(1, size * elements * wide)
            assert both == {("cp", "all_gather"): Traffic(2, 2 * size * elements * narrow), ("cp", "reduce_scatter"): gradients}


@pytest.mark.few(4)
@SIZES
@COMMS
@pytest.mark.parametrize("with_documents", [False, True], ids=["causal", "documents"])
def test_every_rank_computes_its_share_of_the_scores(cluster: Cluster, size: int, comm: str, with_documents: bool) -> None:
    """No score more than causality and documents leave; without documents the same number on all ranks."""
    length = 2 * size * CHUNK
    ids = documents(length) if with_documents else torch.zeros(length, B)
    total = N * int(document_mask(ids).sum())
    forward, backward = zip(*cluster.run(size, scores_of, comm, with_documents), strict=True)
    assert sum(forward) == sum(backward) == total
    assert with_documents or set(forward) == set(backward) == {total // size}


@pytest.mark.parametrize("size", [2, 3])
def test_exchange_turns_the_ring(cluster: Cluster, size: int) -> None:
    cluster.run(size, check_exchange)


def pairs(pieces: tuple[Piece, ...], own: tuple[int, int], keys: range | tuple[int, int]) -> list[tuple[int, int, bool]]:
    """(query chunk, key chunk, causal) of all pieces."""
    return [(q, k, piece.causal) for piece in pieces for q in own[slice(*piece.queries)] for k in keys[slice(*piece.keys)]]


def gather_pairs(rank: int, size: int) -> list[tuple[int, int, bool]]:
    own = zigzag_chunks(rank, size)
    return pairs(own_pieces(), own, own) + pairs(gathered_pieces(rank, size), own, range(2 * size))


def ring_pairs(rank: int, size: int) -> list[tuple[int, int, bool]]:
    own = zigzag_chunks(rank, size)
    return [pair for source in range(size) for pair in pairs(ring_pieces(rank, source), own, zigzag_chunks(source, size))]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("plan", [gather_pairs, ring_pairs])
def test_plans_cover_every_causal_pair_of_chunks_once(plan: Callable[[int, int], list[tuple[int, int, bool]]], size: int) -> None:
    found = [pair for rank in range(size) for pair in plan(rank, size)]
    assert sorted(found) == [(q, k, q == k) for q in range(2 * size) for k in range(q + 1)]
    assert {len(plan(rank, size)) for rank in range(size)} == {2 * size + 1}


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_chunks_and_positions(size: int) -> None:
    length = 10 * size
    positions = [[place for chunk in zigzag_chunks(rank, size) for place in range(5 * chunk, 5 * (chunk + 1))] for rank in range(size)]
    assert sorted(place for one in positions for place in one) == list(range(length))
    assert all(one == sorted(one) for one in positions)
    for rank in range(size):
        assert [chunk_owner(chunk, size) for chunk in zigzag_chunks(rank, size)] == [(rank, 0), (rank, 1)]
        axis = Axis("cp", rank, tuple(range(size)), None, Recorder())
        assert local_sequence(torch.arange(length), axis).tolist() == positions[rank]


def test_unequal_chunks_are_refused() -> None:
    axis = Axis("cp", 1, (0, 1), None, Recorder())
    with pytest.raises(ConfigError, match="sequence length: got 10, expected a multiple of 4"):
        local_sequence(torch.arange(10), axis)
    with pytest.raises(ConfigError, match="got 6"):
        context_attention(*(torch.zeros(3, 1, 2, 8) for _ in range(3)), cp=axis)
