"""Every kernel against the function of torch's operators that it replaces."""

from __future__ import annotations

import pytest
import torch
from megatron_llama.model.nn import ops
from megatron_llama.model.nn.rotary import rope_frequencies, rope_table
from torch import Tensor

from tests.kernels.closeness import DTYPES, as_near_as_torch, draw, error

pytestmark = pytest.mark.kernels
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)
ROWS = pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 96), (37, 1, 130), (2, 3, 1024)], ids=str)


ONE_PLUS = pytest.mark.parametrize("one_plus", [False, True], ids=["weight", "1 + weight"])


@EACH_DTYPE
@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 2, 96), (37, 1, 130), (2, 3, 1024), (3, 1, 16384)], ids=str)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "with the residual stream"])
@ONE_PLUS
def test_norm(one_plus: bool, beside: bool, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """The sum is torch's bit for bit."""
    from megatron_llama.model.nn.kernels.norm import add_norm, norm_backward

    x, stream, grad = (draw(*shape, seed=seed, device=device, dtype=dtype) for seed in (1, 2, 3))
    other, scales = stream if beside else None, weight(shape, dtype, device, one_plus)
    assert torch.equal(add_norm(x, other, scales, 1e-5, one_plus)[0], x + stream if beside else x)
    as_near_as_torch(add_norm, ops.add_norm, (x, other, scales, 1e-5, one_plus))
    scale = ops.add_norm(x, None, scales, 1e-5, one_plus)[2]
    as_near_as_torch(norm_backward, ops.norm_backward, (grad, other, x, scales, scale, one_plus))


def weight(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, one_plus: bool) -> Tensor:
    """Of a norm."""
    return draw(shape[-1], seed=9, device=device, dtype=dtype) + float(not one_plus)


def table(length: int, batch: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin; for more than one sample, positions of each sample's own."""
    positions = torch.arange(length, device=device).unsqueeze(-1) + 3 * torch.arange(batch, device=device)
    return rope_table(positions, rope_frequencies(width, 100.0, None, device))


@EACH_DTYPE
@pytest.mark.parametrize("own", [False, True], ids=["positions shared", "positions of each sample"])
@pytest.mark.parametrize(("query", "key", "width", "turning"), [(1, 1, 2, 2), (12, 3, 6, 6), (9, 2, 96, 96), (9, 2, 10, 4)])
def test_rotation(query: int, key: int, width: int, turning: int, own: bool, dtype: torch.dtype, device: torch.device) -> None:
    """In place, in a part of the projection and of each head, of which the rest stays as it is."""
    from megatron_llama.model.nn.kernels.rotary import rotate

    projected = draw(5, 2, query + 2 * key, width, seed=1, device=device, dtype=dtype)
    cos, sin = table(5, 2 if own else 1, turning, device)

    def part(body: object) -> object:
        return lambda heads, cos, sin: body(heads[:, :, : query + key], cos, sin)  # type: ignore[operator]

    as_near_as_torch(part(rotate), part(ops.rotate), (projected, cos, sin))
    after = projected.clone()
    rotate(after[:, :, : query + key], cos, sin)
    assert torch.equal(after[:, :, query + key :], projected[:, :, query + key :])
    assert torch.equal(after[..., turning:], projected[..., turning:]) and not torch.equal(after, projected)


@EACH_DTYPE
@pytest.mark.parametrize("layout", ["sbnd", "bnsd", "bsnd"])
@pytest.mark.parametrize("turning", [6, 2])
def test_rotation_back(turning: int, layout: str, dtype: torch.dtype, device: torch.device) -> None:
    """From gradients as attention leaves them in memory."""
    from megatron_llama.model.nn.kernels.rotary import rotate_back

    sizes, order = {"s": 5, "b": 2, "d": 6}, [layout.index(axis) for axis in "sbnd"]
    grads = []
    for seed, heads in enumerate((12, 3, 3)):
        shape = [(sizes | {"n": heads})[axis] for axis in layout]
        grads.append(draw(*shape, seed=seed, device=device, dtype=dtype).permute(order))
    as_near_as_torch(rotate_back, ops.rotate_back, (*grads, *table(5, 1, turning, device)))


@EACH_DTYPE
@ONE_PLUS
@pytest.mark.parametrize(("query", "key", "width"), [(1, 1, 2), (12, 3, 6), (9, 2, 96)])
def test_norm_of_heads(query: int, key: int, width: int, one_plus: bool, dtype: torch.dtype, device: torch.device) -> None:
    """In place, in a part of the projection, of which the rest stays as it is; and backward, where that of values passes."""
    from megatron_llama.model.nn.kernels.head_norm import norm_heads, norm_heads_backward

    projected = draw(5, 2, query + 2 * key, width, seed=1, device=device, dtype=dtype)
    weights = [draw(width, seed=seed, device=device, dtype=dtype) + 1.0 for seed in (2, 3)]

    def part(body: object) -> object:
        return lambda projected, *rest: body(projected[:, :, : query + key], *rest)  # type: ignore[operator]

    as_near_as_torch(part(norm_heads), part(ops.norm_heads), (projected, *weights, 1e-5, one_plus, query))
    after = projected.clone()
    kept, scale = norm_heads(after[:, :, : query + key], *weights, 1e-5, one_plus, query)
    assert torch.equal(after[:, :, query + key :], projected[:, :, query + key :]) and torch.equal(kept, projected[:, :, : query + key])
    grad = draw(5, 2, query + 2 * key, width, seed=4, device=device, dtype=dtype)
    given = (grad, kept, *weights, scale, one_plus, query)
    as_near_as_torch(norm_heads_backward, ops.norm_heads_backward, given)


@EACH_DTYPE
@pytest.mark.parametrize("name", ["swiglu", "geglu"])
@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 2, 26), (2, 1, 2200)], ids=str)
def test_gated_activation(shape: tuple[int, ...], name: str, dtype: torch.dtype, device: torch.device) -> None:
    from megatron_llama.model.nn.kernels import gate

    gate_up = 3 * draw(*shape, seed=1, device=device, dtype=dtype)
    grad = draw(*shape[:-1], shape[-1] // 2, seed=2, device=device, dtype=dtype)
    as_near_as_torch(getattr(gate, name), getattr(ops, name), (gate_up,))
    as_near_as_torch(getattr(gate, f"{name}_backward"), getattr(ops, f"{name}_backward"), (grad, gate_up))


@EACH_DTYPE
@pytest.mark.parametrize("z_weight", [0.0, 0.3])
@pytest.mark.parametrize(("columns", "valid"), [(7, 7), (24, 17), (4500, 4111)])
def test_cross_entropy(columns: int, valid: int, z_weight: float, dtype: torch.dtype, device: torch.device) -> None:
    """Losses, and the gradient in the place of the scores; rows without weight, rows of large numbers, garbage in the padding."""
    from megatron_llama.model.nn.kernels.cross_entropy import cross_entropy

    scores = 4 * draw(6, columns, seed=1, device=device, dtype=dtype)
    scores[:, valid:] = 1e4
    scores[1] += 500.0  # overflows without the subtraction of the maximum
    labels = torch.tensor([0, valid - 1, 3, 1, 2, valid // 2], device=device)
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0, 0.1, 1e-3], device=device)
    as_near_as_torch(cross_entropy, ops.cross_entropy, (scores, labels, weights, valid, z_weight))
    cross_entropy(scores, labels, weights, valid, z_weight)
    assert not scores[:, valid:].any() and not scores[2].any()


@EACH_DTYPE
@pytest.mark.parametrize(("first", "valid"), [(0, 24), (24, 17), (48, 0)], ids=["all columns", "padding", "padding only"])
def test_cross_entropy_of_a_part(first: int, valid: int, dtype: torch.dtype, device: torch.device) -> None:
    """What a tensor-parallel rank computes of its columns, when it has met the others, here: with itself. Rows whose label it lacks get
    the softmax alone."""
    from megatron_llama.model.nn.kernels.cross_entropy import gradient, softmax_stats

    scores, labels = (4 * draw(5, 24, seed=1, device=device, dtype=dtype), torch.tensor([0, 30, 26, 50, 23], device=device) - first)
    mine = (labels >= 0) & (labels < valid)
    largest, sums, target = softmax_stats(scores, labels, valid)
    exact = scores[:, :valid].double()
    if valid:
        assert torch.equal(largest, scores[:, :valid].amax(-1).float())
        assert error(sums, (exact - largest.double().unsqueeze(-1)).exp().sum(-1)) < 3e-6
    else:
        assert not sums.any() and not target.any() and largest.isfinite().all()
    for row in range(5):
        assert float(target[row]) == (float(scores[row, labels[row]]) if mine[row] else 0.0)
    factor, weights = (draw(5, seed=2, device=device).abs(), draw(5, seed=3, device=device).masked_fill(~mine, 0.0))
    expected = torch.zeros(5, 24, dtype=torch.float64, device=device)
    expected[:, :valid] = (exact - largest.double().unsqueeze(-1)).exp() * factor.double().unsqueeze(-1)
    expected[mine, labels[mine]] -= weights.double()[mine]
    gradient(scores, labels, largest, factor, weights, valid)
    assert error(scores, expected) < 8 * torch.finfo(dtype).eps


def test_scores_that_are_odd(device: torch.device) -> None:
    """One weight for all rows as the runtime gives it: expanded, in one place of memory. No number is seen; strided ones are refused."""
    from megatron_llama.model.nn.kernels.cross_entropy import cross_entropy

    scores, labels = draw(5, 9, seed=1, device=device), torch.arange(10, device=device)[::2]
    as_near_as_torch(cross_entropy, ops.cross_entropy, (scores, labels, torch.full((), 0.2, device=device).expand(5), 9, 0.0))
    for bad in (float("nan"), float("inf")):
        scores = draw(3, 9, seed=1, device=device)
        scores[1, 4] = bad
        losses = cross_entropy(scores, torch.zeros(3, dtype=torch.int64, device=device), torch.ones(3, device=device), 9, 0.0)
        assert losses.isfinite().tolist() == [True, False, True]
    with pytest.raises(ValueError, match="contiguous"):
        cross_entropy(draw(4, 6, seed=1, device=device)[:, :5], torch.zeros(4), torch.ones(4), 5, 0.0)
