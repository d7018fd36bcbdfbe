"""A weight is read only after its handle was asked for it; its gradients go there, or to autograd without a handle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, cast

import pytest
import torch
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.param_handle import accumulate_product, addmm_fp32, attach_param_handle, param_handle_of, use_param_handles
from megatron_llama.model.nn.embedding import VocabParallelEmbedding
from megatron_llama.model.nn.functional import recomputable_add_norm, rms_norm
from megatron_llama.model.nn.linear import ColumnLinear, RowLinear, column_linear
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.model.test_activation_memory import kept, storage


@dataclass
class Accumulator:
    """A handle whose weight is always there. Writes at the first contribution, adds after."""

    view: Tensor
    calls: list[str] = field(default_factory=list)

    def wait_unsharded(self) -> int:
        return 0

    def check_version(self, version: int) -> None:
        assert version == 0

    def grad_view(self) -> tuple[Tensor, float]:
        beta = 1.0 if self.calls else 0.0
        self.calls.append("buffer")
        return self.view, beta

    def grad_written(self) -> None:
        self.calls.append("done")

    def keep_wgrad(self, work: Callable[[], object]) -> bool:
        return False


@dataclass
class Later(Accumulator):
    """Keeps what it is given, until asked."""

    kept: list[Callable[[], None]] = field(default_factory=list)

    def keep_wgrad(self, work: Callable[[], object]) -> bool:
        self.kept.append(work)
        return True


class Lender:
    """A handle whose weight is elsewhere: it is NaN, except from a wait until it is taken away."""

    def __init__(self, parameter: nn.Parameter, *, postpones: bool = False) -> None:
        self.parameter, self.values, self.postpones = parameter, parameter.detach().clone(), postpones
        self.grad = torch.full_like(self.values, torch.nan)
        self.calls, self.kept = list[str](), list[Callable[[], None]]()
        attach_param_handle(parameter, self)
        self.take_away()

    def take_away(self) -> None:
        self.parameter.data.fill_(torch.nan)

    def seen(self) -> list[str]:
        """The calls since the last time, after which the weight is away again."""
        calls, self.calls = self.calls, []
        self.take_away()
        return calls

    def wait_unsharded(self) -> int:
        self.calls.append("wait")
        self.parameter.data.copy_(self.values)
        return 3

    def check_version(self, version: int) -> None:
        assert version == 3
        self.calls.append("check")
        self.parameter.data.copy_(self.values)

    def grad_view(self) -> tuple[Tensor, float]:
        self.calls.append("buffer")
        return self.grad, 0.0

    def grad_written(self) -> None:
        self.calls.append("done")

    def keep_wgrad(self, work: Callable[[], object]) -> bool:
        self.calls.append("postpone")
        if self.postpones:
            self.kept.append(work)
        return self.postpones


class Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, 1e-5)


def layers() -> dict[str, tuple[nn.Module, tuple[int, ...], list[Tensor]]]:
    """Layer, shape of its weight, two inputs."""
    tp = Mesh.single().tp
    generator = torch.Generator().manual_seed(3)
    real = [torch.randn(5, 2, 8, generator=generator) for _ in range(2)]
    ids = [torch.randint(0, 12, (5, 2), generator=generator) for _ in range(2)]
    return {
        "column": (ColumnLinear(8, 6, tp=tp, sequence_parallel=False), (6, 8), real),
        "row": (RowLinear(8, 6, tp=tp, sequence_parallel=False), (6, 8), real),
        "embedding": (VocabParallelEmbedding(12, 8, tp=tp, sequence_parallel=False), (12, 8), ids),
        "norm": (Norm(), (8,), real),
    }


def backward(layer: nn.Module, inputs: list[Tensor]) -> None:
    for x in inputs:
        output = layer(x)
        output.backward(torch.cos(torch.arange(output.numel(), dtype=torch.float32)).view(output.shape).to(output.dtype))


@pytest.mark.parametrize("name", ["column", "row", "embedding", "norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_handle_receives_what_autograd_would_have(name: str, dtype: torch.dtype) -> None:
    layer, shape, inputs = layers()[name]
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    layer.weight = nn.Parameter(weight.clone())
    assert param_handle_of(layer.weight) is None
    backward(layer, inputs)
    expected = layer.weight.grad
    assert expected is not None

    layer.weight = nn.Parameter(weight.clone())
    handle = Accumulator(torch.full(shape, float("nan")))  # beta 0 must overwrite, not multiply
    attach_param_handle(layer.weight, handle)
    backward(layer, inputs)
    assert layer.weight.grad is None
    assert handle.calls == ["buffer", "done"] * 2
    tolerance = 1e-6 if dtype is torch.float32 else 2**-5
    torch.testing.assert_close(handle.view, expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["column", "row", "embedding"])
def test_a_postponed_contribution_is_the_same_one_later(name: str) -> None:
    """Nothing is written in the pass itself, and its other gradients do not change."""
    layer, shape, inputs = layers()[name]
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    views, input_grads = [], []
    for kind in (Accumulator, Later):
        layer.weight = nn.Parameter(weight.clone())
        handle = kind(torch.full(shape, float("nan")))
        attach_param_handle(layer.weight, handle)
        leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
        backward(layer, leaves)
        if isinstance(handle, Later):
            assert handle.calls == [] and len(handle.kept) == 2
            with torch.no_grad():
                for work in handle.kept:
                    work()
        assert handle.calls == ["buffer", "done"] * 2
        views.append(handle.view)
        input_grads.append([leaf.grad for leaf in leaves])
    assert torch.equal(*views)
    assert all(one is other or torch.equal(one, other) for one, other in zip(*input_grads, strict=True))


class Scaled(nn.Module):
    """A module as anybody writes it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.t()).sin() * self.weight.sum()


class Pair(Scaled):
    """A module that returns a tuple, as a block does."""

    def forward(self, x: Tensor) -> Any:
        """See Scaled."""
        return x * self.weight.sum(), None, super().forward(x)


def total(parts: tuple[Tensor | None, ...]) -> Tensor:
    return torch.stack([part.square().sum() for part in parts if part is not None]).sum()


@pytest.mark.parametrize("read", ["all", "first", "last"])
def test_a_module_that_returns_a_tuple_waits_in_backward_whichever_part_is_read(read: str) -> None:
    weight, inputs = torch.linspace(-1, 1, 12).view(3, 4), torch.linspace(0, 1, 8).view(2, 4)
    parts = {"all": slice(None), "first": slice(0, 1), "last": slice(2, 3)}[read]
    plain, lent = Pair(weight.clone()), Pair(torch.empty(3, 4, device="meta"))
    use_param_handles(lent)
    lent.weight = nn.Parameter(weight.clone())
    handle = Lender(lent.weight)
    x, expected = (inputs.clone().requires_grad_() for _ in range(2))
    output = lent(x)[parts]
    assert set(handle.seen()) == {"wait"}
    total(output).backward()
    assert handle.seen() == ["check"] * (2 if read == "all" else 1) + ["buffer", "done"]
    total(plain(expected)[parts]).backward()
    assert torch.equal(x.grad, expected.grad) and torch.equal(handle.grad, plain.weight.grad)


@pytest.mark.parametrize("trained", [True, False])
def test_a_module_of_plain_torch_waits_in_both_passes_and_delivers_once(trained: bool) -> None:
    """Also with two microbatches in flight. The module holds NaN where nobody has waited."""
    weight, inputs = torch.linspace(-1, 1, 12).view(3, 4), [torch.linspace(0, i, 8).view(2, 4) for i in (1, 2)]
    plain, lent = Scaled(weight.clone()), Scaled(torch.empty(3, 4, device="meta"))
    use_param_handles(lent)
    lent.weight = nn.Parameter(weight.clone(), requires_grad=trained)  # as the engine does
    handle = Lender(lent.weight)
    leaves, expected = [x.clone().requires_grad_() for x in inputs], [x.clone().requires_grad_() for x in inputs]
    outputs = [lent(x) for x in leaves]
    assert set(handle.seen()) == {"wait"}
    for x, output, leaf in zip(leaves, outputs, expected, strict=True):
        output.sum().backward()
        assert handle.seen() == ["check"] + ["buffer", "done"] * trained
        plain.weight.grad = None
        plain(leaf).sum().backward()
        assert torch.equal(x.grad, leaf.grad) and lent.weight.grad is None
        assert not trained or torch.equal(handle.grad, plain.weight.grad)


def arranged(name: str, *, trained: bool, postpones: bool = False) -> tuple[nn.Module, Lender, Tensor, nn.Module]:
    """A layer whose weight is lent, its handle, an input, and the same layer with a plain weight."""
    (layer, shape, (x, _)), (twin, *_) = layers()[name], layers()[name]
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    layer.weight, twin.weight = (nn.Parameter(weight.clone(), requires_grad=trained) for _ in range(2))
    return layer, Lender(layer.weight, postpones=postpones), x, twin


READS = {
    "column": (["wait"], ["postpone", "check", "buffer", "done"], ["check"]),
    "row": (["wait"], ["postpone", "check", "buffer", "done"], ["check"]),
    "norm": (["wait"], ["check", "buffer", "done"], ["check"]),
}
"""Calls in forward; in backward; in backward of a frozen weight."""


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("name", READS)
def test_a_weight_is_asked_for_before_every_read(name: str, trained: bool) -> None:
    layer, handle, x, twin = arranged(name, trained=trained)
    ours, plain = (x.clone().requires_grad_() for _ in range(2))
    forward, backward_, frozen = READS[name]
    output, expected = layer(ours), twin(plain)
    assert torch.equal(output, expected)
    assert handle.seen() == forward
    for result in (output, expected):
        result.backward(torch.ones_like(result))
    assert handle.seen() == (backward_ if trained else frozen)
    assert torch.equal(ours.grad, plain.grad)
    assert torch.equal(handle.grad, twin.weight.grad) if trained else handle.grad.isnan().all() and twin.weight.grad is None


@pytest.mark.parametrize("name", READS)
def test_without_gradient_of_the_input_backward_reads_no_weight(name: str) -> None:
    layer, handle, x, twin = arranged(name, trained=True)
    for module in (layer, twin):
        output = module(x)
        assert module is twin or handle.seen() == ["wait"]
        output.backward(torch.ones_like(output))
    assert "check" not in handle.calls and handle.calls[-2:] == ["buffer", "done"]
    assert torch.equal(handle.grad, twin.weight.grad)


@pytest.mark.parametrize("name", ["column", "row"])
def test_a_frozen_matrix_keeps_no_input(name: str) -> None:
    for trained in (True, False):
        layer, _, x, _ = arranged(name, trained=trained)
        x.requires_grad_()
        assert kept(lambda layer=layer, x=x: layer(x), {storage(layer.weight)}) == x.nbytes * trained


@pytest.mark.parametrize("trained", [True, False])
def test_an_embedding_is_read_in_forward_only(trained: bool) -> None:
    layer, handle, ids, twin = arranged("embedding", trained=trained)
    output, expected = layer(ids), twin(ids)
    assert torch.equal(output, expected) and output.requires_grad is trained
    assert handle.seen() == ["wait"]
    if trained:
        for result in (output, expected):
            result.backward(torch.ones_like(result))
        assert handle.calls == ["postpone", "buffer", "done"] and torch.equal(handle.grad, twin.weight.grad)


@pytest.mark.parametrize("postpones", [False, True])
@pytest.mark.parametrize("trained", [(True, True), (False, True), (True, False), (False, False)])
def test_a_norm_that_is_computed_again_asks_again(trained: tuple[bool, bool], postpones: bool) -> None:
    """(norm, matrix): the norm's weight is read for the matrix's gradient, also when that is postponed, and for its own input's."""
    generator, tp = torch.Generator().manual_seed(5), Mesh.single().tp
    values = [torch.randn(shape, generator=generator) for shape in ((8,), (6, 8), (5, 2, 8))]

    def run(norm: nn.Parameter, matrix: nn.Parameter, x: Tensor, between: Callable[[], None]) -> None:
        output = column_linear(recomputable_add_norm(x, None, norm, 1e-5)[1], matrix, tp, sequence_parallel=False)
        between()
        output.backward(torch.ones_like(output))

    ours, plain = ([nn.Parameter(v.clone(), requires_grad=t) for v, t in zip(values, (*trained, True), strict=True)] for _ in range(2))
    run(*plain, lambda: None)
    handles = [Lender(weight, postpones=postpones) for weight in ours[:2]]
    norm, matrix = handles

    def between() -> None:
        assert [handle.seen() for handle in handles] == [["wait"], ["wait"]]

    run(*ours, between)
    again, own = ["check"] * trained[1], ["check"] + ["buffer", "done"] * trained[0]
    late = postpones and trained[1]
    assert norm.seen() == (own if late else again + own)
    assert matrix.seen() == ["postpone"] * trained[1] + ["check"] + ["buffer", "done"] * (trained[1] and not late)
    assert torch.equal(ours[2].grad, plain[2].grad)
    assert len(matrix.kept) == late and norm.kept == []
    for work in matrix.kept:
        with torch.no_grad():
            work()
        assert norm.seen() == ["check"] and matrix.seen() == ["buffer", "done"]
    for handle, weight in zip(handles, plain[:2], strict=True):
        assert handle.grad.isnan().all() if weight.grad is None else torch.equal(handle.grad, weight.grad)


class Counting(Lender):
    """Every wait finds another version."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.versions, self.checked = count(), list[int]()
        super().__init__(parameter)

    def wait_unsharded(self) -> int:
        super().wait_unsharded()
        return next(self.versions)

    def check_version(self, version: int) -> None:
        self.checked.append(version)
        super().check_version(3)


@pytest.mark.parametrize("name", READS)
def test_backward_checks_the_version_that_its_own_forward_saw(name: str) -> None:
    layer, _, x, _ = arranged(name, trained=False)
    layer.weight = nn.Parameter(torch.ones(layer.weight.shape), requires_grad=False)
    handle = Counting(layer.weight)
    outputs = [layer(x.clone().requires_grad_()) for _ in range(3)]
    for index in (1, 0, 2):
        outputs[index].sum().backward()
    assert handle.checked == [1, 0, 2]


@pytest.mark.parametrize("name", READS)
def test_what_a_handle_refuses_is_not_read(name: str) -> None:
    layer, handle, x, _ = arranged(name, trained=True)

    def refuse(version: int = 0) -> int:
        raise RuntimeError(f"version {version}")

    handle.wait_unsharded = refuse
    with pytest.raises(RuntimeError, match="version 0"):
        layer(x)
    del handle.wait_unsharded
    output, handle.check_version = layer(x.clone().requires_grad_()), refuse
    with pytest.raises(RuntimeError, match="version 3"):
        output.sum().backward()


def factors(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    left, right = (torch.randn(shape, generator=generator).to(dtype).to(device) for shape in ((5, 7), (7, 3)))
    return left, right


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_product_is_accumulated_at_least_in_fp32(dtype: torch.dtype) -> None:
    left, right = factors(dtype, "cpu")
    view = torch.full((5, 3), torch.nan, dtype=torch.promote_types(dtype, torch.float32))
    exact, tolerance = left.double() @ right.double(), 4 * torch.finfo(dtype).eps
    for times in (1, 2):
        accumulate_product(view, float(times > 1), left, right)
        torch.testing.assert_close(view.double(), times * exact, rtol=tolerance, atol=4 * tolerance)


class Operators(TorchDispatchMode):
    """The operators that are called, and the numbers they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[tuple[str, tuple[float, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append((str(func), tuple(arg for arg in args if isinstance(arg, float))))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("fake", [False, True])
def test_a_device_gets_one_operator_for_narrow_factors(fake: bool) -> None:
    """RankDevice on the device that computes nothing, and by what compilers trace with."""
    with FakeTensorMode() if fake else torch.device("meta"):
        device = "cuda" if fake else "meta"
        view = torch.empty(5, 3, device=device)
        left, right = (torch.empty(shape, device=device, dtype=torch.bfloat16) for shape in ((5, 7), (7, 3)))
        with Operators() as seen:
            for beta in (0.0, 1.0):
                accumulate_product(view, beta, left, right)
    assert seen.called == [("megatron_llama.addmm_fp32.default", (0.0,)), ("megatron_llama.addmm_fp32.default", (1.0,))]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_wide_product_on_a_device(dtype: torch.dtype) -> None:
    """Transposed factors as layers give them, and a view inside a slot; with beta 0 its NaN does not count, beyond it nothing changes."""
    grad, x = (torch.randn(64, 2, width, generator=torch.Generator().manual_seed(7)).to(dtype).to("cuda") for width in (48, 80))
    left, right = grad.flatten(0, -2).t(), x.flatten(0, -2)
    slot = torch.full((48 * 80 + 128,), torch.nan, device="cuda")
    view, exact = slot[64 : 64 + 48 * 80].view(48, 80), left.double() @ right.double()
    for times in (1, 2, 3):
        accumulate_product(view, float(times > 1), left, right)
        torch.testing.assert_close(view.double(), times * exact, rtol=1e-5, atol=1e-4)
    assert slot[:64].isnan().all() and slot[64 + 48 * 80 :].isnan().all()
    torch.library.opcheck(cast(Any, addmm_fp32), (torch.zeros_like(view), left, right, 1.0))
