"""nn.Linear that writes its gradients into slots, against torch's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from megatron_llama.engine.param_handle import attach_param_handle, param_handle_of
from megatron_llama.engine.shard.linear import AttachedLinears
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass
class Handle:
    """Keeps the gradient as the engine does: the first contribution overwrites NaN, later ones are added."""

    parameter: nn.Parameter
    dtype: torch.dtype
    version: int = 0
    written: int = 0
    view: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.view = torch.full(self.parameter.shape, float("nan"), dtype=self.dtype)

    def wait_unsharded(self) -> int:
        return self.version

    def check_version(self, version: int) -> None:
        if version != self.version:
            raise RuntimeError("another version")

    def grad_view(self) -> tuple[Tensor, float]:
        return self.view, float(self.written > 0)

    def grad_written(self) -> None:
        self.written += 1

    def keep_wgrad(self, work: Callable[[], object]) -> bool:
        return False

    def deliver(self, parameter: Tensor) -> None:
        """What hooks do with gradients that autograd accumulates."""
        if parameter.grad is None:
            return  # the layer has written it
        view, beta = self.grad_view()
        view.copy_(parameter.grad) if beta == 0 else view.add_(parameter.grad)
        parameter.grad = None
        self.grad_written()


def attached(module: nn.Module, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Handle], Callable[[], None]]:
    handles = {}
    for name, parameter in module.named_parameters():
        handles[name] = handle = Handle(parameter, dtype)
        attach_param_handle(parameter, handle)
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(handle.deliver)
    return handles, AttachedLinears(module).detach


class Net(nn.Module):
    """A layer that is used twice, one without bias, a product of torch with the weight of a layer, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 32)
        self.twice = nn.Linear(32, 32)
        self.last = nn.Linear(32, 24, bias=False)
        self.frozen = nn.Linear(24, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        x = x @ self.last.weight.t() + self.last(x)
        return self.frozen(x).square().sum()


def pair(dtype: torch.dtype = torch.float32) -> tuple[Net, Net]:
    torch.manual_seed(0)
    ours = Net().to(dtype)
    return ours, copy.deepcopy(ours)


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x = torch.randn(*shape, 24).to(dtype)
    return x.clone().requires_grad_(), x.clone().requires_grad_()


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (0,)])
def test_gradients_are_those_of_torch_and_written_where_the_engine_says(shape: tuple[int, ...]) -> None:
    ours, theirs = pair()
    handles, _ = attached(ours)
    (x, y), passes = inputs(*shape), 2
    for _ in range(passes):
        assert torch.equal(ours(x), theirs(y))
        ours(x).backward()
        theirs(y).backward()
    assert torch.equal(x.grad, y.grad)
    for name, parameter in trained(theirs).items():
        torch.testing.assert_close(handles[name].view, parameter.grad, rtol=2e-6, atol=2e-6)
    assert {name: handle.written for name, handle in handles.items()} == {
        "first.weight": 2,
        "first.bias": 2,
        "twice.weight": 4,
        "twice.bias": 4,
        "last.weight": 4,  # torch's product with it and the layer's own
        "frozen.weight": 0,
        "frozen.bias": 0,
    }
    assert all(parameter.grad is None for parameter in ours.parameters())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (3, 40), (2, 3, 4)])
def test_one_layer_is_equal_to_the_bit(shape: tuple[int, ...], bias: bool) -> None:
    ours = nn.Linear(24, 33, bias=bias)
    theirs = copy.deepcopy(ours)
    handles, _ = attached(ours)
    x, y = inputs(*shape)
    grad = torch.randn(*shape, 33)
    out, expected = ours(x), theirs(y)
    assert torch.equal(out, expected)
    out.backward(grad)
    expected.backward(grad)
    assert torch.equal(x.grad, y.grad)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(handles[name].view, parameter.grad), name


@pytest.mark.parametrize("bias", [True, False])
def test_an_output_may_be_changed_in_place(bias: bool) -> None:
    ours = nn.Sequential(nn.Linear(24, 32, bias=bias), nn.ReLU(inplace=True))
    theirs = copy.deepcopy(ours)
    handles, _ = attached(ours)
    x, y = inputs(3, 4)
    ours(x).sum().backward()
    theirs(y).sum().backward()
    assert torch.equal(x.grad, y.grad) and torch.equal(handles["0.weight"].view, theirs[0].weight.grad)


def test_a_wider_slot_gets_sums_that_are_not_rounded() -> None:
    ours, exact = nn.Linear(24, 32).bfloat16(), nn.Linear(24, 32)
    exact.load_state_dict(ours.state_dict())
    handles, _ = attached(ours)
    x, _ = inputs(64, dtype=torch.bfloat16)
    grad = torch.randn(64, 32).bfloat16()
    ours(x).backward(grad)
    exact(x.detach().float()).backward(grad.float())
    assert handles["weight"].view.dtype == torch.float32
    torch.testing.assert_close(handles["weight"].view, exact.weight.grad, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant: bool) -> None:
    ours, theirs = pair()
    handles, _ = attached(ours)
    x, y = inputs(6)
    checkpoint(ours, x, use_reentrant=reentrant).backward()
    theirs(y).backward()
    assert torch.equal(x.grad, y.grad)
    for name, parameter in trained(theirs).items():
        torch.testing.assert_close(handles[name].view, parameter.grad, rtol=2e-6, atol=2e-6)


def test_only_what_backward_asks_for_is_written() -> None:
    """Autograd does not say in ``needs_input_grad`` that torch.autograd.grad leaves a weight out."""
    ours, theirs = pair()
    handles, _ = attached(ours)
    x, y = inputs(6)
    (found,) = torch.autograd.grad(ours(x), x)
    (expected,) = torch.autograd.grad(theirs(y), y)
    assert torch.equal(found, expected)
    found, found_bias = torch.autograd.grad(ours(x), (ours.first.weight, ours.first.bias))
    expected, expected_bias = torch.autograd.grad(theirs(y), (theirs.first.weight, theirs.first.bias))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_bias, expected_bias)
    assert not any(handle.written for handle in handles.values())
    ours(x).backward(inputs=[ours.first.weight])
    assert {name for name, handle in handles.items() if handle.written} == {"first.weight"}


def test_gradients_of_gradients() -> None:
    ours, theirs = pair()
    handles, _ = attached(ours)
    x, y = inputs(6)
    for module, one in ((ours, x), (theirs, y)):
        (slope,) = torch.autograd.grad(module(one), one, create_graph=True)
        slope.square().sum().backward()
    for name, parameter in trained(theirs).items():
        if parameter.grad is not None:
            torch.testing.assert_close(handles[name].view, parameter.grad)


def test_plain_torch_wherever_something_else_looks_at_the_product() -> None:
    module = nn.Linear(24, 8)
    reference = copy.deepcopy(module)
    handles, _ = attached(module)
    x, y = inputs(5)
    with torch.autocast("cpu", torch.bfloat16):
        out, expected = module(x), reference(y)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
    out.float().sum().backward()
    assert handles["weight"].written == 1  # by the hook of plain torch: autocast's gradient is in bf16
    with torch.no_grad():
        assert torch.equal(module(x), reference(y)) and not module(x).requires_grad
    per_sample = torch.func.vmap(lambda one: module(one).sum())(x)
    torch.testing.assert_close(per_sample, reference(y).sum(-1))
    found = torch.func.jacrev(module)(x[0].detach())
    torch.testing.assert_close(found, reference.weight.detach())


def test_a_compiled_unit_stays_one_graph() -> None:
    ours, theirs = pair()
    handles, _ = attached(ours)
    x, y = inputs(5)
    torch.compile(ours, fullgraph=True, backend="aot_eager")(x).backward()
    theirs(y).backward()
    torch.testing.assert_close(x.grad, y.grad)
    for name, parameter in trained(theirs).items():
        torch.testing.assert_close(handles[name].view, parameter.grad)
        assert handles[name].written == 1  # autograd has summed them


def test_backward_refuses_a_weight_that_has_changed() -> None:
    module = nn.Linear(24, 8)
    handles, _ = attached(module)
    out = module(inputs(5)[0])
    handles["weight"].version += 1
    with pytest.raises(RuntimeError, match="another version"):
        out.sum().backward()


class Scaled(nn.Linear):
    """A subclass with a forward pass of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_what_is_attached_and_detached() -> None:
    module = nn.ModuleDict(
        {
            "plain": nn.Linear(4, 4),
            "subclass": Scaled(4, 4),
            "parametrized": torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
            "patched": nn.Linear(4, 4),
            "later": nn.Linear(4, 4),
        }
    )
    patched = module["patched"].forward = lambda input: input
    detach = AttachedLinears(module).detach
    assert {name for name, one in module.items() if "forward" in vars(one)} == {"plain", "patched", "later"}
    wrapped = module["later"].forward = lambda input: input
    detach()
    assert {name for name, one in module.items() if "forward" in vars(one)} == {"patched", "later"}
    assert module["patched"].forward is patched and module["later"].forward is wrapped
    assert nn.Linear.forward.__module__ == "torch.nn.modules.linear"


def test_hooks_of_layers_run_as_ever() -> None:
    ours, theirs = nn.Linear(24, 8), nn.Linear(24, 8)
    theirs.load_state_dict(ours.state_dict())
    handles, _ = attached(ours)
    seen: list[tuple[int, ...]] = []
    for module in (ours, theirs):
        module.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        module.register_forward_hook(lambda _, args, out: out * 3)
        module.register_full_backward_hook(lambda _, given, out: seen.append(tuple(out[0].shape)))
    x, y = inputs(5)
    ours(x).sum().backward()
    theirs(y).sum().backward()
    assert torch.equal(x.grad, y.grad) and torch.equal(handles["weight"].view, theirs.weight.grad)
    assert seen == [(5, 8), (5, 8)]


def test_an_old_style_weight_norm_is_left_to_autograd() -> None:
    """Its pre-hook puts a tensor in the place of the weight."""
    with pytest.warns(FutureWarning):
        module, reference = (torch.nn.utils.weight_norm(nn.Linear(24, 8)) for _ in range(2))
    reference.load_state_dict(module.state_dict())
    handles, _ = attached(module)
    x, y = inputs(5)
    module(x).sum().backward()
    reference(y).sum().backward()
    assert param_handle_of(module.weight) is None
    torch.testing.assert_close(handles["weight_v"].view, reference.weight_v.grad)
