"""Context parallelism that exchanges the sequence for heads: every rank's part of output and gradients is that of one process, whatever the
heads, windows, documents and groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_llama.config.schema import ModelConfig
from megatron_llama.engine.comm import collectives
from megatron_llama.engine.comm.recorder import Recorder, Traffic
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.engine.plan.head_exchange import exchanged_heads, sent_key_heads
from megatron_llama.launch.launcher import Place
from megatron_llama.model.llama import Attention, StageOptions
from megatron_llama.model.nn.attention import ScoreRule
from megatron_llama.model.nn.context import local_sequence
from megatron_llama.model.nn.documents import Documents, SplitDocuments
from megatron_llama.model.positions import Positions
from torch import Tensor

from tests.harness import Cluster
from tests.model.nn.flash import document_mask, on_flash
from tests.model.nn.spmd import numbers
from tests.model.nn.test_context import TOLERANCE, documents, in_windows
from tests.nccl_transport import installed

CHUNK, B, D = 6, 3, 8
WINDOW = CHUNK + 1
LAYOUTS = pytest.mark.parametrize(("heads", "keys"), [(2, 1), (4, 1), (2, 2)], ids=["a2a 2", "a2a 4", "a2a 2 p2p 2"])
"""Ranks that exchange heads, and groups of them in the ring."""
GROUPED = [(4, 4), (4, 2), (4, 1), (12, 3)]
"""Query heads, and key/value heads: one for each, enough for each rank, fewer than ranks, and groups that end inside a rank's queries."""


def mesh_of(place: Place, heads: int, keys: int) -> Mesh:
    """All ranks are context-parallel. Collective."""
    recorder = Recorder()

    def axis(name: str, lines: list[tuple[int, ...]]) -> Axis:
        groups = [dist.new_group(list(line)) for line in lines]
        index = next(index for index, line in enumerate(lines) if place.rank in line)
        return Axis(name, lines[index].index(place.rank), lines[index], groups[index], recorder)

    world = range(place.world_size)
    assert len(world) == heads * keys
    return replace(
        Mesh.single(),
        cp=axis("cp", [tuple(world)]),
        cp_heads=axis("cp_heads", [tuple(world[i : i + heads]) for i in world[::heads]]),
        cp_keys=axis("cp_keys", [tuple(world[i::heads]) for i in range(heads)]),
    )


def attention(mesh: Mesh, queries: int, keys: int, rule: ScoreRule) -> Attention:
    """The layer of the model. Its weights are not there: only what is between its products is computed."""
    model = ModelConfig(hidden_size=queries * D, num_attention_heads=queries, num_key_value_heads=keys, head_dim=D)
    with torch.device("meta"):
        return Attention(model, mesh, StageOptions(cp_comm_type="ring", scores=rule))


def inputs(length: int, queries: int, keys: int, dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value and the gradient of the output, of the whole sequence, the same on every rank."""
    shapes = ((queries, D), (keys, D), (keys, D), (queries * D,))
    return [numbers(length, B, *shape, seed=seed).detach().to(dtype) for seed, shape in enumerate(shapes)]


def results(mesh: Mesh, leaves: list[Tensor], ids: Tensor | None, rule: ScoreRule) -> list[Tensor]:
    """This rank's part of output and gradients. Heads are not rotated."""
    *local, upstream = (local_sequence(leaf, mesh.cp).requires_grad_() for leaf in leaves)
    tokens, length = len(local[0]), len(leaves[0])
    split = None
    if ids is not None:
        whole = Documents.of(ids)
        split = whole if mesh.cp_keys is not None and mesh.cp_keys.size == 1 else SplitDocuments.of(whole, length, mesh.cp_keys or mesh.cp)
    turns = torch.ones(tokens, 1, 1, D // 2), torch.zeros(tokens, 1, 1, D // 2)
    layer = attention(mesh, leaves[0].shape[2], leaves[1].shape[2], rule)
    out = layer.attend(torch.cat(local, dim=2).flatten(2), Positions(*turns, documents=split))
    return [out.detach(), *torch.autograd.grad(out, local, upstream)]


def check_part(mesh: Mesh, leaves: list[Tensor], ids: Tensor | None, rule: ScoreRule) -> None:
    """This rank's part of output and gradients is that of the whole, relative to the largest element."""
    whole = in_windows(leaves, rule, ids)
    for name, ours, exact in zip(("out", "query", "key", "value"), results(mesh, leaves, ids, rule), whole, strict=True):
        theirs = local_sequence(exact, mesh.cp)
        assert ours.shape == theirs.shape and ours.dtype is leaves[0].dtype
        error = ((ours.double() - theirs).abs().max() / exact.abs().max().clamp(min=1.0)).item()
        assert error < 2 * TOLERANCE[ours.dtype], f"{name} with {leaves[1].shape[2]} kv heads and {rule}: {error}"  # false for NaN


def check_heads(place: Place, heads: int, keys: int, dtype: torch.dtype, with_documents: bool) -> None:
    mesh = mesh_of(place, heads, keys)
    length = 2 * place.world_size * CHUNK
    ids = documents(length) if with_documents else None
    for grouped in GROUPED:
        check_part(mesh, inputs(length, *grouped, dtype), ids, ScoreRule())


RULES = [ScoreRule(window=1), ScoreRule(window=WINDOW), ScoreRule(window=3 * CHUNK), ScoreRule(0.7, CHUNK + 3, 1.5), ScoreRule(0.7, 0, 1.5)]


def check_rules(place: Place, heads: int, keys: int, dtype: torch.dtype, with_documents: bool) -> None:
    """Windows within a chunk, beyond it and over several, and capped scores."""
    mesh = mesh_of(place, heads, keys)
    length = 2 * place.world_size * CHUNK
    ids = documents(length) if with_documents else None
    for rule in RULES:
        check_part(mesh, inputs(length, 4, 2, dtype), ids, rule)


def check_flash(place: Place, heads: int, keys: int, with_documents: bool) -> int:
    """The CPU is taken for a GPU, and its flash attention computed by its contract, in a window. Return the scores of forward passes."""
    mesh = mesh_of(place, heads, keys)
    length = 2 * place.world_size * CHUNK
    ids = documents(length) if with_documents else None
    with on_flash(cudnn=False) as flash:
        check_part(mesh, inputs(length, 4, 2, torch.bfloat16), ids, ScoreRule(window=WINDOW))
    return flash.scores


def traffic(place: Place, heads: int, keys: int, dtype: torch.dtype, grouped: tuple[int, int]) -> dict[tuple[str, str], Traffic]:
    """What forward and backward sent."""
    mesh = mesh_of(place, heads, keys)
    results(mesh, inputs(2 * place.world_size * CHUNK, *grouped, dtype), None, ScoreRule())
    return mesh.recorder.traffic | dict(mesh.cp.recorder.traffic)


@pytest.mark.few(4)
@LAYOUTS
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("with_documents", [False, True], ids=["causal", "documents"])
def test_ranks_compute_what_one_process_computes(cluster: Cluster, heads: int, keys: int, dtype: torch.dtype, with_documents: bool) -> None:
    cluster.run(heads * keys, check_heads, heads, keys, dtype, with_documents)


@pytest.mark.few(3)
@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("with_documents", [False, True], ids=["causal", "documents"])
def test_windows_and_caps(cluster: Cluster, heads: int, keys: int, dtype: torch.dtype, with_documents: bool) -> None:
    cluster.run(heads * keys, check_rules, heads, keys, dtype, with_documents)


@pytest.mark.few(2)
@LAYOUTS
@pytest.mark.parametrize("with_documents", [False, True], ids=["causal", "documents"])
def test_flash_attention_computes_whole_sequences(cluster: Cluster, heads: int, keys: int, with_documents: bool) -> None:
    """No more scores than are seen, on every rank of an exchange its share of the heads."""
    size = heads * keys
    length = 2 * size * CHUNK
    ids = documents(length) if with_documents else torch.zeros(length, B)
    computed = cluster.run(size, check_flash, heads, keys, with_documents)
    assert sum(computed) == 4 * int(document_mask(ids).triu_(1 - WINDOW).sum())
    assert all(len(set(computed[i : i + heads])) == 1 for i in range(0, size, heads))


@pytest.mark.few(4)
@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grouped", GROUPED[:3], ids=str)
def test_messages(cluster: Cluster, heads: int, keys: int, dtype: torch.dtype, grouped: tuple[int, int]) -> None:
    """Queries, keys and values in one message and outputs in another, the gradients of both in as many; each rank gets no head that its
    queries do not need, and none twice. Around the ring keys and values of these heads, forward and again in backward with gradients."""
    queries, kv = grouped
    needed = [{query * kv // queries for query in range(rank * queries // heads, (rank + 1) * queries // heads)} for rank in range(heads)]
    token = B * D * dtype.itemsize
    tokens = 2 * CHUNK
    exchanged = tokens * token * (2 * queries + 2 * sum(map(len, needed)))
    ring = 2 * len(needed[0]) * heads * tokens * B * D * (2 * dtype.itemsize + 4)
    for sent in cluster.run(heads * keys, traffic, heads, keys, dtype, grouped):
        assert sent[("cp_heads", "all_to_all")] == Traffic(4, 2 * exchanged)
        ways = {("cp_keys", way): Traffic(3 * (keys - 1), (keys - 1) * ring) for way in ("send", "receive") if keys > 1}
        assert sent == {("cp_heads", "all_to_all"): Traffic(4, 2 * exchanged), **ways}


def check_by_nccl(place: Place, heads: int, keys: int) -> None:
    with installed():
        check_heads(place, heads, keys, torch.float32, True)


@LAYOUTS
def test_exchanges_by_the_rules_of_nccl(cluster: Cluster, heads: int, keys: int) -> None:
    cluster.run(heads * keys, check_by_nccl, heads, keys)


def check_all_to_all(place: Place, is_async: bool) -> None:
    axis = Axis("cp", place.rank, tuple(range(place.world_size)), dist.group.WORLD, Recorder())
    sent = torch.tensor([[10.0 * place.rank + rank] * 2 for rank in range(place.world_size)])
    received = torch.empty_like(sent)
    collectives.all_to_all(received, sent, axis, async_op=is_async).wait()
    assert received.tolist() == [[10.0 * rank + place.rank] * 2 for rank in range(place.world_size)]
    assert axis.recorder.traffic == {("cp", "all_to_all"): Traffic(1, sent.nbytes)}


@pytest.mark.parametrize("is_async", [False, True])
def test_all_to_all_sends_each_rank_its_part(cluster: Cluster, is_async: bool) -> None:
    cluster.run(3, check_all_to_all, is_async)


@pytest.mark.parametrize(
    ("queries", "keys", "size", "sent"),
    [
        (8, 8, 4, (0, 1, 2, 3, 4, 5, 6, 7)),
        (8, 4, 4, (0, 1, 2, 3)),
        (8, 2, 4, (0, 0, 1, 1)),
        (8, 1, 2, (0, 0)),
        (12, 3, 2, (0, 0, 1, 1, 2, 2)),
        (28, 4, 7, tuple(query // 7 for query in range(28))),
    ],
)
def test_key_heads_of_ranks(queries: int, keys: int, size: int, sent: tuple[int, ...]) -> None:
    """A rank's query heads, divided equally among the heads that it gets, each have their own head of the model."""
    assert sent_key_heads(queries, keys, size) == sent
    assert exchanged_heads(queries, keys, size) == queries + 2 * len(sent)
    shared = queries // len(sent)
    assert all(sent[query // shared] == query // (queries // keys) for query in range(queries))


def test_ranks_that_do_not_exchange_have_none(cluster: Cluster) -> None:
    """The layer of a mesh without groups sends keys and values around the ring, and no heads."""
    sent: Any = cluster.run(2, sent_without_groups)
    assert all(set(kinds) == {("cp", "send"), ("cp", "receive")} for kinds in sent)


def sent_without_groups(place: Place) -> list[tuple[str, str]]:
    mesh = replace(mesh_of(place, 2, 1), cp_heads=None, cp_keys=None)
    check_part(mesh, inputs(2 * 2 * CHUNK, 4, 2, torch.float64), None, ScoreRule())
    return list(mesh.cp.recorder.traffic)
