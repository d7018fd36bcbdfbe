"""Functions of the layers against finite differences in fp64 and against plain torch. What ranks make of layers: test_types.py."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from megatron_llama.engine.mesh import Mesh
from megatron_llama.launch.launcher import Place
from megatron_llama.model.nn.functional import gated, rms_norm, split_heads
from megatron_llama.model.nn.linear import RowLinear
from megatron_llama.model.nn.loss import argmax, cross_entropy
from megatron_llama.model.nn.ops import PLAIN
from megatron_llama.model.nn.rotary import rope_frequencies, rope_table
from tools.overlap.loss import token_losses
from torch.autograd import gradcheck

from tests.harness import Cluster
from tests.model.nn.spmd import numbers, tensor_mesh

S, B, D = 4, 2, 6


def check_cross_entropy(place: Place, dtype: torch.dtype, vocab: int, z_weight: float = 0.0) -> None:
    """Against F.cross_entropy over the true vocabulary, with garbage in the padded columns."""
    tp, padded = tensor_mesh(place).tp, 24
    generator = torch.Generator().manual_seed(7)
    logits = (torch.randn(S, B, padded, generator=generator) * 5).to(dtype)
    logits[..., vocab:] = 1e4
    logits[0, 0] += 500.0  # overflows without the subtraction of the maximum
    labels = torch.randint(0, vocab, (S, B), generator=generator)
    labels[1, 0], labels[1, 1] = 0, vocab - 1
    upstream = torch.rand(S, B, generator=generator)

    wide = logits[..., :vocab].double().requires_grad_()
    expected = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="none").view(S, B)
    ((expected + z_weight * wide.logsumexp(-1).square()) * upstream).sum().backward()

    scores = logits.chunk(tp.size, -1)[tp.rank].clone()
    exact, at_once = (1e-12 if dtype is torch.float64 else 3e-6, replace(PLAIN, host_chunk=3 * padded))
    weights = upstream.to(torch.promote_types(dtype, torch.float32))
    found = cross_entropy(scores, labels, tp, vocab, weights=weights, z_weight=z_weight, ops=at_once)
    assert found.dtype is torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(found.double(), expected.detach(), rtol=exact, atol=exact)
    full = F.pad(wide.grad, (0, padded - vocab)).chunk(tp.size, -1)[tp.rank]
    rounding = 2**-8 if dtype is torch.bfloat16 else exact
    torch.testing.assert_close(scores.double(), full, rtol=rounding, atol=exact)

    value = cross_entropy(logits.chunk(tp.size, -1)[tp.rank].clone(), labels, tp, vocab, ops=at_once)
    torch.testing.assert_close(value, found, rtol=exact, atol=exact)
    if dtype is torch.float64:
        leaf = logits.chunk(tp.size, -1)[tp.rank].clone().requires_grad_()
        (token_losses(leaf.clone(), labels, tp, vocab, z_weight=z_weight) * upstream).sum().backward()
        torch.testing.assert_close(leaf.grad, full, rtol=exact, atol=exact)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("world_size", "dtype", "vocab", "z_weight"),
    [
        (1, torch.float64, 24, 0.0),
        (2, torch.bfloat16, 21, 0.3),
        (2, torch.float64, 7, 0.0),
        (2, torch.float32, 24, 0.0),
        (3, torch.float32, 21, 0.3),
        (3, torch.bfloat16, 7, 0.0),
        (1, torch.bfloat16, 7, 0.0),
        (1, torch.float64, 21, 0.3),
        (3, torch.float64, 7, 0.3),
    ],
    ids=str,
)
def test_cross_entropy(cluster: Cluster, world_size: int, dtype: torch.dtype, vocab: int, z_weight: float) -> None:
    """With 24 columns; of 7 some ranks have padding only. With z-loss the value stays, and the gradient is that of both."""
    cluster.run(world_size, check_cross_entropy, dtype, vocab, z_weight)


def check_argmax(place: Place, dtype: torch.dtype, vocab: int) -> None:
    """The token of torch.argmax over the true vocabulary, the first of equal ones, with garbage in the padded columns."""
    tp = tensor_mesh(place).tp
    logits = torch.randint(-3, 3, (64, B, 24), generator=torch.Generator().manual_seed(7)).to(dtype)
    logits[..., vocab:] = 1e4
    kept = logits.clone()
    assert torch.equal(argmax(logits.chunk(tp.size, -1)[tp.rank], tp, vocab), logits[..., :vocab].argmax(-1))
    assert torch.equal(logits, kept)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("vocab", [24, 21, 7], ids=["no padding", "padding", "ranks of padding only"])
def test_argmax_is_the_first_of_equal_tokens(cluster: Cluster, world_size: int, vocab: int) -> None:
    cluster.run(world_size, check_argmax, torch.bfloat16, vocab)


@pytest.mark.parametrize("one_plus", [False, True], ids=["weight", "1 + weight"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_rms_norm(dtype: torch.dtype, one_plus: bool) -> None:
    x, weight = numbers(S, B, D, seed=8).detach().to(dtype), numbers(D, seed=9).detach().to(dtype)
    ours, torchs = ([t.clone().requires_grad_() for t in (x, weight)] for _ in range(2))
    found = rms_norm(*ours, 1e-5, one_plus=one_plus)
    expected = F.rms_norm(torchs[0], (D,), torchs[1] + float(one_plus), 1e-5)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-6}[dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    for leaves, output in ((ours, found), (torchs, expected)):
        (output * torch.cos(torch.arange(output.numel()).to(dtype).view(output.shape))).sum().backward()
        assert all(leaf.grad is not None and leaf.grad.dtype is dtype for leaf in leaves)
    for one, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=tolerance, atol=4 * tolerance)


def test_an_axis_of_one_rank_records_no_traffic() -> None:
    mesh = Mesh.single()
    layer = RowLinear(D, D, tp=mesh.tp, sequence_parallel=True)
    layer.weight = torch.nn.Parameter(numbers(D, D, seed=19).detach())
    layer(numbers(S, B, D, seed=20)).sum().backward()
    assert mesh.recorder.traffic == {}


ACTIVATIONS = {"silu": F.silu, "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh")}


def test_functional_gradients() -> None:
    x, weight = numbers(S, B, D, seed=8), numbers(D, seed=9)
    for one_plus in (False, True):
        assert gradcheck(lambda *inputs, one_plus=one_plus: rms_norm(*inputs, 1e-5, one_plus=one_plus), (x, weight))
    for name, function in ACTIVATIONS.items():
        assert gradcheck(partial(gated, gate=PLAIN.gate(name)), (x,))
        gate, up = x.chunk(2, -1)
        torch.testing.assert_close(gated(x, PLAIN.gate(name)), function(gate) * up)


def test_rope_angles_stay_fp32() -> None:
    """bf16 has 256 values between powers of two: the table must still tell 4096 positions apart."""
    frequencies = rope_frequencies(128, 500000.0, None, torch.device("cpu"))
    cos, sin = rope_table(torch.arange(4096), frequencies)
    assert cos.dtype is sin.dtype is torch.float32
    assert len({*zip(cos[:, 0, 0].tolist(), sin[:, 0, 0].tolist(), strict=True)}) == 4096
    x = torch.randn(4096, 1, 1, 128, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    rotated = split_heads(x.repeat(1, 1, 1, 3).flatten(2), cos.unsqueeze(1), sin.unsqueeze(1), query=1, key=1)
    for turned in rotated[:2]:
        assert turned.dtype is torch.bfloat16
        torch.testing.assert_close(turned.float().norm(dim=-1), x.float().norm(dim=-1), rtol=2e-3, atol=0.0)
    assert torch.equal(rotated[2], x)
