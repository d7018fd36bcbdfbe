"""Passes that do not make a step, and what else happens around the calls of units, in one process."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron_llama.engine.shard.accesses import PassError
from megatron_llama.engine.shard.engine import ModuleEngine
from megatron_llama.engine.shard.optimizer import AdamW
from megatron_llama.engine.shard.peers import OrderError
from megatron_llama.engine.shard.placeholders import Placeholder, ShardedParameterError
from megatron_llama.engine.shard.shard import shard
from megatron_llama.errors import ConfigError, TrainingError
from megatron_llama.launch.launcher import Place
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.engine.shard.models import (
    CLIP,
    LENGTH,
    WIDTH,
    WORDS,
    Block,
    Net,
    Trained,
    adamw,
    difference,
    loss_of,
    net,
    part,
    plain,
    sharded,
    train,
)

SINGLE = Place(0, 1, 0)
EXACT = 1e-7


def steps(engine: ModuleEngine, count: int, first: int = 0) -> Trained:
    return train(SINGLE, engine, microbatches=engine.microbatches, steps=count, first=first)


def expected(count: int, microbatches: int = 1, model: nn.Module | None = None) -> Trained:
    return plain(model or net(), world=1, microbatches=microbatches, steps=count)


def test_modules_hold_placeholders_while_nothing_runs() -> None:
    model = net()
    with sharded(model) as engine:
        for _ in range(2):
            assert all(isinstance(p, Placeholder) for p in model.parameters())
            assert [n for n, _ in model.named_parameters()] == [n for n, _ in net().named_parameters()]
            loss_of(model, part(0, 0, 0)).backward()
            assert all(isinstance(p, Placeholder) for p in model.parameters())
            engine.step()
        with pytest.raises(ShardedParameterError, match=r"blocks\.0\.feed\.up\.weight: got linear"):
            F.linear(torch.ones(1, WIDTH), model.blocks[0].feed.up.weight)
        assert isinstance(model.blocks[0], Block) and type(model.blocks[0]).__name__ == "Block"


def test_too_many_backward_passes_are_named() -> None:
    with sharded(net(), microbatches=2) as engine:
        for number in range(2):
            loss_of(engine.model, part(0, number, 0)).backward()
        with pytest.raises(PassError, match=r"backward pass 3 of a step: got shard\(microbatches=2\).*engine\.step\(\) after the last"):
            loss_of(engine.model, part(0, 0, 0)).backward()


@pytest.mark.parametrize("recorded", [0, 1])
def test_too_few_backward_passes_are_named(recorded: int) -> None:
    with sharded(net(), microbatches=2) as engine:
        steps(engine, recorded)
        with pytest.raises(PassError, match=r"engine\.step\(\): got 0 backward passes, expected 2"):
            engine.step()
        loss_of(engine.model, part(0, 0, 0)).backward()
        with pytest.raises(PassError, match="got 1 backward passes, expected 2"):
            engine.step()
        # What is missing can still be made.
        loss_of(engine.model, part(0, 1, 0)).backward()
        engine.step()


def test_backward_of_an_earlier_step_is_refused() -> None:
    with sharded(net()) as engine:
        old = loss_of(engine.model, part(0, 0, 0))
        loss_of(engine.model, part(0, 0, 0)).backward()
        engine.step()
        with pytest.raises(PassError, match="got a forward pass from before the parameters changed"):
            old.backward()


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_parameters_without_gradient_are_named(strategy: str) -> None:
    model = net("without the last")
    with (
        sharded(model, strategy=strategy) as engine,
        pytest.raises(RuntimeError, match=r"engine\.step\(\): got no gradient of .*blocks\.3\.feed\.down.*find_unused"),
    ):
        loss_of(model, part(0, 0, 0)).backward()
        engine.step()


def test_a_parameter_that_is_left_out_later_is_named() -> None:
    model = net()
    with sharded(model) as engine:
        steps(engine, 1)
        model.way = "without the last"
        with pytest.raises(OrderError, match=r"got forward of head, expected forward of blocks\.3"):
            loss_of(model, part(0, 0, 0))


def test_find_unused_trains_with_zero() -> None:
    model = net()
    reference = net()
    optimizer = adamw(reference)
    with sharded(model, find_unused=True, static_order=False) as engine:
        for step, way in enumerate(["without the last", "plain", "without the last"]):
            for each in (model, reference):
                each.way = way
                loss_of(each, part(step, 0, 0)).backward()
            for parameter in reference.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            norm = nn.utils.clip_grad_norm_(reference.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            assert abs(engine.step().grad_norm.item() - norm.item()) < EXACT
        with engine.gathered():
            for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
                assert (one - other).abs().max() < EXACT, name


def test_a_nan_changes_nothing() -> None:
    with sharded(net()) as engine:
        first = steps(engine, 2)
        (loss_of(engine.model, part(5, 0, 0)) * float("nan")).backward()
        result = engine.step()
        assert result.skipped == 1 and not result.grad_norm.isfinite()
        with engine.gathered():
            assert all(torch.equal(p, first.parameters[n]) for n, p in engine.model.named_parameters())
        after = steps(engine, 1, first=2)
    whole = expected(3)
    assert abs(after.losses[0] - whole.losses[2]) < EXACT and abs(after.norms[0] - whole.norms[2]) < EXACT


class Leaks(nn.Module):
    """A module whose output is a view of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.t()


def test_a_view_of_a_parameter_does_not_leave_its_unit() -> None:
    model = nn.Sequential(Leaks(), Leaks(), Leaks())
    with sharded(model, (Leaks,)), pytest.raises(PassError, match=r"the output of 0: got a view of memory that 0\.weight shares"):
        model(torch.ones(2))


class Keeps(nn.Module):
    """A unit with an auxiliary loss that it does not return."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.auxiliary: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.weight
        self.auxiliary = (x.cos() @ self.weight).square().mean()
        return out


@pytest.mark.parametrize("recorded", [0, 2])
@pytest.mark.parametrize("slots", [2, 3])
def test_a_loss_that_a_unit_keeps_to_itself_is_refused(slots: int, recorded: int) -> None:
    """Also where it comes in after the steps that show the order of units, which it does not change."""
    model = nn.Sequential(*(Keeps() for _ in range(6)))
    with (
        sharded(model, (Keeps,), param_slots=slots) as engine,
        pytest.raises(PassError, match=r"got one that did not begin at its outputs"),
    ):
        for _ in range(recorded):
            model(torch.ones(1, WIDTH)).sum().backward()
            engine.step()
        loss = model(torch.ones(1, WIDTH)).sum()
        for unit in model:
            assert isinstance(unit, Keeps) and unit.auxiliary is not None
            loss = loss + unit.auxiliary
        loss.backward()


def test_a_gradient_of_a_gradient_is_refused_where_units_share_slots() -> None:
    model = net()
    with sharded(model) as engine:
        x = torch.ones(LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
        with pytest.raises(PassError, match=r"got create_graph=True.*optim_grads"):
            torch.autograd.grad(engine.model.blocks[1](x).sum(), x, create_graph=True)


class Clamps(nn.Linear):
    """Changes its weight in place."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return F.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_a_weight_that_the_model_changes_is_refused(strategy: str) -> None:
    model = nn.Sequential(*(Clamps(WIDTH, WIDTH) for _ in range(3)))
    with sharded(model, (Clamps,), strategy=strategy), pytest.raises(PassError, match=r"0\.weight: got a change in place"):
        model(torch.ones(1, WIDTH))


def test_parameters_that_come_after_shard_are_named() -> None:
    model = net()
    with sharded(model) as engine:
        model.blocks[1].register_parameter("extra", nn.Parameter(torch.ones(2)))
        loss_of(model, part(0, 0, 0)).backward()
        with pytest.raises(PassError, match=r"added after shard\(\): blocks\.1\.extra"):
            engine.step()


def test_another_tensor_in_the_place_of_a_parameter_is_refused() -> None:
    model = net()
    with sharded(model) as engine:
        with engine.gathered():
            own = {name: value.detach().clone() for name, value in model.named_parameters()}
        with torch.no_grad(), pytest.raises(ShardedParameterError, match="got another tensor in its place"):
            torch.func.functional_call(model, own, (part(0, 0, 0),))
        model.head.weight = nn.Parameter(own["head.weight"])
        with pytest.raises(ShardedParameterError, match="got another tensor in its place"):
            model(part(0, 0, 0))


class Product(torch.autograd.Function):
    """Takes a weight as a fused loss does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].flatten(0, -2).t() @ x.flatten(0, -2)


class FusedHead(nn.Module):
    """A head that is the embedding, and that a function reads outside of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, WIDTH)
        self.block = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = Product.apply(self.block(self.embed(ids)).tanh(), self.head.weight)
        return out


def test_a_function_that_reads_a_tied_weight_gives_it_its_gradient() -> None:
    torch.manual_seed(0)
    model = FusedHead()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.0)
    ids = torch.arange(8).view(2, 4)
    with sharded(model, lambda module: isinstance(module, nn.Linear) and module.bias is not None) as engine:
        for _ in range(3):
            twin(ids).square().sum().backward()
            expected = torch.stack([p.grad.norm() for p in twin.parameters() if p.grad is not None]).norm()
            optimizer.zero_grad()
            model(ids).square().sum().backward()
            assert abs(float(engine.step(lr=0.0).grad_norm) / float(expected) - 1) < 1e-6


def test_gradients_are_not_thrown_away_in_silence() -> None:
    model = net()
    with sharded(model) as engine:
        loss = loss_of(model, part(0, 0, 0))
        model.zero_grad()
        engine.optimizer.zero_grad()
        loss.backward()
        for zero_grad in (model.zero_grad, engine.optimizer.zero_grad):
            with pytest.raises(PassError, match="got gradients that no step has used"):
                zero_grad()
        engine.step()
        model.zero_grad()


def test_sparse_gradients_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(8, WIDTH, sparse=True), nn.Linear(WIDTH, 1))
    with sharded(model, (nn.Linear,)), pytest.raises(PassError, match=r"0\.weight: got a sparse gradient"):
        model(torch.tensor([1])).sum().backward()


@pytest.mark.parametrize("closed", [True, False])
def test_an_engine_that_nobody_holds_leaves_nothing_behind(closed: bool) -> None:
    model = net()
    for _ in range(2):
        engine = sharded(copy.deepcopy(model))
        steps(engine, 2)
        core = weakref.ref(engine._engine)
        if closed:
            engine.close()
        del engine
        gc.collect()
        assert core() is None


class Fails(Exception):
    """What a test makes a forward pass raise."""


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("recorded", [0, 2])
def test_a_forward_pass_that_fails_can_be_repeated(recorded: int, failing: int) -> None:
    model = net()
    broken = True

    def fail(module: nn.Module, args: Any) -> None:
        if broken:
            raise Fails

    with sharded(model, microbatches=2) as engine:
        found = steps(engine, recorded)
        handle = model.blocks[failing].feed.register_forward_pre_hook(fail)
        loss_of_first = part(recorded, 0, 0)
        with pytest.raises(Fails):
            model(loss_of_first)
        assert all(isinstance(p, Placeholder) for p in model.parameters())
        broken = False
        handle.remove()
        after = steps(engine, 2, first=recorded)
    whole = expected(recorded + 2, microbatches=2)
    found.losses += after.losses
    found.norms += after.norms
    found.parameters = after.parameters
    assert difference(found, whole) < EXACT


def test_a_backward_pass_that_fails_is_a_clear_error_until_it_is_discarded() -> None:
    model = net()

    def fail(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(refuse)

    def refuse(grad: Tensor) -> None:
        raise Fails

    with sharded(model) as engine:
        steps(engine, 1)
        handle = model.blocks[1].feed.register_forward_hook(fail)
        with pytest.raises(Fails):
            loss_of(model, part(1, 0, 0)).backward()
        handle.remove()
        with pytest.raises(PassError, match="a backward pass that ended with an error"):
            engine.step()
        with pytest.raises(PassError, match="a backward pass that ended with an error"):
            loss_of(model, part(1, 0, 0))
        engine.discard()
        steps(engine, 1)


def test_forward_passes_without_grad_may_come_at_any_time() -> None:
    whole = expected(3, microbatches=2)
    model = net()
    seen = []

    def look() -> None:
        with torch.no_grad():
            seen.append(model(part(9, 0, 0)))
            seen.append(model.blocks[2](torch.ones(1, 5, WIDTH, dtype=torch.float64)))

    with sharded(model, microbatches=2) as engine:
        found = Trained()
        look()
        for step in range(3):
            for microbatch in range(2):
                loss = loss_of(model, part(step, microbatch, 0)) / 2
                look()
                loss.backward()
                look()
            found.norms.append(engine.step().grad_norm.item())
        look()
        with engine.gathered():
            found.parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    found.losses = whole.losses
    assert difference(found, whole) < EXACT
    assert torch.equal(seen[2], seen[0]) and torch.equal(seen[3], seen[1]) and not torch.equal(seen[-2], seen[0])


def test_another_order_is_refused_by_name() -> None:
    model = net()
    with sharded(model) as engine:
        steps(engine, 1)
        model.way = "twice"
        with pytest.raises(
            OrderError, match=r"access 3 of the step: got forward of blocks\.0, expected forward of blocks\.1.*static_order=False"
        ):
            loss_of(model, part(1, 0, 0))


def test_a_step_that_ends_early_is_named() -> None:
    model = net()

    def twice(module: nn.Module, ids: Tensor) -> Tensor:
        return loss_of(module, ids) + loss_of(module, ids)

    with sharded(model) as engine:
        twice(model, part(0, 0, 0)).backward()
        engine.step()
        with pytest.raises((OrderError, RuntimeError), match=r"got backward of blocks\.3, expected forward of "):
            loss_of(model, part(0, 0, 0)).backward()


def test_units_that_are_called_without_the_model() -> None:
    model = net()

    def loss(module: nn.Module, ids: Tensor) -> Tensor:
        x = module.embed(ids)
        for block in module.blocks:
            x = block(x)
        return F.cross_entropy(module.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    frozen = net()
    for each in (model, frozen):
        each.scale.requires_grad_(False)
    whole = plain(frozen, world=1, microbatches=1, steps=3, loss=loss)
    with sharded(model) as engine:
        assert difference(train(SINGLE, engine, microbatches=1, steps=3, loss=loss), whole) < EXACT


def test_the_number_of_microbatches_may_not_change_inside_of_a_step() -> None:
    with sharded(net(), microbatches=1) as engine:
        steps(engine, 1)
        loss_of(engine.model, part(1, 0, 0))
        with pytest.raises(PassError, match=r"engine\.microbatches = \.\.\.: got a step whose passes have begun"):
            engine.microbatches = 2


class Seen(nn.Module):
    """A unit that notes the dtypes of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, factor: Tensor, index: Tensor) -> Tensor:
        self.seen = [self.linear.weight.dtype, x.dtype, factor.dtype, index.dtype]
        return torch.tanh(self.linear(x)) * factor + index


class Casts(nn.Module):
    """A model whose unit gets an fp32 tensor that the model has made."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = Seen()
        self.seen: list[torch.dtype] = []

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        self.seen = [batch["x"].dtype, batch["index"].dtype]
        return self.unit(batch["x"], factor=torch.ones(1, dtype=torch.float32), index=batch["index"])


def test_a_compute_dtype_has_masters_in_fp32_and_casts_inputs() -> None:
    torch.manual_seed(1)
    model = Casts()
    start = model.unit.linear.weight.detach().clone()
    with shard(model, units=[Seen], dtype=torch.bfloat16, optimizer=AdamW(lr=1e-4, weight_decay=0.0)) as engine:
        assert model.unit.linear.weight.dtype == torch.bfloat16
        out = model({"x": torch.ones(2, WIDTH), "index": torch.ones(2, 1, dtype=torch.int64)})
        assert out.dtype == torch.bfloat16
        assert model.seen == [torch.bfloat16, torch.int64]
        assert model.unit.seen == [torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int64]
        out.sum().backward()
        engine.step()
        with engine.gathered(modify=True):
            moved = (model.unit.linear.weight - start).abs()
    # The first step of AdamW moves each weight by the learning rate: far below bf16's resolution of these weights.
    assert moved.dtype == torch.float32 and moved.max() < 1.1e-4 and moved.mean() > 0.9e-4


def test_all_problems_are_named_at_once() -> None:
    model = net()
    model.head.float()
    with pytest.raises(ConfigError) as error:
        shard(model, strategy="zero3", clip=-1.0, microbatches=0, param_slots=0, reduction="max", optimiser="adam")
    for words in ("strategy: got 'zero3'", "clip: got -1.0", "microbatches: got 0", "param_slots: got 0", "reduction: got 'max'"):
        assert words in str(error.value)
    assert "optimiser: got 'adam'" in str(error.value) and "one dtype" in str(error.value) and "head.weight" in str(error.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sharded(net(), (nn.Conv2d,)), r"units: got no module.*it has .*Block"),
        (lambda: sharded(net().to(torch.float8_e5m2)), r"dtype: got None for parameters of torch\.float8_e5m2"),
        (lambda: shard(net(), dtype=torch.int8), "dtype: got torch.int8"),
        (lambda: sharded(nn.Tanh()), "model: got no parameters"),
        (lambda: sharded(sharded(net()).model), "already"),
        (lambda: sharded(nn.LazyLinear(3)), "UninitializedParameter"),
    ],
)
def test_models_that_cannot_be_sharded(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_a_closed_engine_says_so() -> None:
    engine = sharded(net())
    engine.close()
    engine.close()
    with pytest.raises(PassError, match=r"got engine\.close\(\) before"):
        engine.model(part(0, 0, 0))


def test_parameters_on_the_meta_device_are_named_until_they_have_values() -> None:
    with torch.device("meta"):
        model = Net()
    with sharded(model) as engine:
        with pytest.raises(TrainingError, match=r"got no values of .*blocks\.0\.feed\.up\.weight"):
            model(part(0, 0, 0))
        engine.initialize(lambda module: [nn.init.constant_(p, 0.5) for p in module.parameters(recurse=False)])
        assert model(part(0, 0, 0)).isfinite().all()


@pytest.mark.parametrize("trained", [True, False])
def test_a_parameter_that_changes_inside_of_a_pass_is_refused(trained: bool) -> None:
    model = net("plain" if trained else "frozen")

    def change(module: Block, args: Any) -> None:
        module.mix.requires_grad_(not trained)

    model.blocks[1].register_forward_pre_hook(change)
    with sharded(model) as engine, pytest.raises(PassError, match=rf"blocks\.1\.mix: got requires_grad={not trained}"):
        loss_of(engine.model, part(0, 0, 0))


def test_hooks_of_the_user_see_the_parameters() -> None:
    model = net()
    seen: list[float] = []
    before = model.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(module.mix.sum().item()))
    with sharded(model) as engine:
        model.blocks[0].register_forward_hook(lambda module, args, output: seen.append(module.mix.sum().item()))
        model.blocks[0].register_forward_pre_hook(lambda module, args: seen.append(module.mix.sum().item()), prepend=True)
        steps(engine, 1)
    before.remove()
    assert seen == [net().blocks[0].mix.sum().item()] * 3


def test_zero_grad_of_the_model_does_nothing() -> None:
    with sharded(net()) as engine:
        engine.model.zero_grad()
        assert difference(steps(engine, 2), expected(2)) < EXACT
        engine.model.zero_grad(set_to_none=False)


def test_a_conversion_of_the_model_that_changes_nothing() -> None:
    model = net()
    model.register_buffer("table", torch.ones(3, dtype=torch.float32))
    with sharded(model) as engine:
        assert model.to("cpu") is model and model.double() is model
        assert model.table.dtype == torch.float64
        with pytest.raises(ShardedParameterError, match=r"model: got a move to torch\.float32.*dtype="):
            model.float()
        assert model.table.dtype == torch.float64
        assert difference(steps(engine, 2), expected(2)) < EXACT


class Rescaled(Net):
    """A model that reads a parameter of its own inside of a checkpoint."""

    def _run(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(lambda y: block(y) * self.scale, x, use_reentrant=self.way == "reentrant")


@pytest.mark.parametrize("way", ["reentrant", "not reentrant"])
def test_parameters_of_the_model_are_read_again_in_backward(way: str) -> None:
    torch.manual_seed(3)
    first = Rescaled(way).double()
    whole = plain(copy.deepcopy(first), world=1, microbatches=2, steps=3)
    with sharded(first, microbatches=2) as engine:
        assert difference(steps(engine, 3), whole) < EXACT


@pytest.mark.parametrize("name", ["clip", "lr"])
def test_numbers_that_are_none_are_refused(name: str) -> None:
    with sharded(net()) as engine:
        loss_of(engine.model, part(0, 0, 0)).backward()
        if name == "clip":
            engine.clip = float("nan")
        with pytest.raises(ConfigError, match=rf"{name}: got nan, expected finite"):
            engine.step(lr=float("nan") if name == "lr" else None)


def test_inputs_are_cast_inside_of_gathered_as_otherwise() -> None:
    with shard(nn.Sequential(nn.Linear(4, 4)), units=[nn.Linear], dtype=torch.bfloat16) as engine:
        x = torch.randn(2, 4)
        with torch.no_grad():
            expected = engine.model(x)
            with engine.gathered():
                assert torch.equal(engine.model(x), expected)
            with engine.gathered(modify=True):
                assert engine.model(x).dtype == torch.float32


class Reader(nn.Module):
    """A recurrent layer between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_recurrent_layers_are_units(slots: int) -> None:
    """nn.LSTM keeps references to its parameters beside those of nn.Module."""

    def reader() -> nn.Module:
        torch.manual_seed(2)
        return Reader().double()

    alone = plain(reader(), world=1, microbatches=2, steps=3)
    with sharded(reader(), [nn.LSTM], microbatches=2, param_slots=slots, grad_slots=slots) as engine:
        assert difference(steps(engine, 3), alone) < EXACT


def test_a_unit_that_calls_a_unit_which_it_does_not_have_is_refused() -> None:
    model = net()
    model.blocks[0].register_forward_pre_hook(lambda module, args: (model.blocks[2](args[0]),))
    with sharded(model) as engine, pytest.raises(PassError, match=r"blocks\.2: got a call inside of blocks\.0"):
        engine.model(part(0, 0, 0))


def test_a_model_whose_engine_is_closed_is_built_anew() -> None:
    model = net()
    with sharded(model):
        pass
    with pytest.raises(ConfigError, match=r"build it anew to shard it after engine\.close\(\)"):
        sharded(model)
