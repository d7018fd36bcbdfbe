"""What users attach to parameters: hooks on gradients, and attributes."""

from __future__ import annotations

from collections.abc import Callable

import megatron_llama as ml
import pytest
import torch
import torch.distributed as dist
from megatron_llama.engine.shard.placeholders import Placeholder, ShardedParameterError
from megatron_llama.errors import ConfigError
from megatron_llama.launch.launcher import Place
from torch import Tensor, nn

from tests.engine.shard.models import Block, loss_of, net, part
from tests.harness import Cluster


@pytest.mark.parametrize(
    "hook",
    [lambda p: p.register_hook(lambda grad: grad * 0), lambda p: p.register_post_accumulate_grad_hook(lambda p: None)],
    ids=["tensor hook", "post-accumulate hook"],
)
def test_a_hook_from_before_shard_is_refused_by_name(hook: Callable[[Tensor], torch.utils.hooks.RemovableHandle]) -> None:
    model = net()
    handle = hook(model.blocks[1].mix)
    with pytest.raises(
        ConfigError, match=r"blocks.1.mix: got a hook on its gradient from before shard\(\).*call self.weight.register_hook in forward"
    ):
        ml.shard(model, units=[Block])
    handle.remove()
    ml.shard(model, units=[Block]).close()


def test_a_gradient_from_before_shard_is_refused_by_name() -> None:
    model = net()
    loss_of(model, part(0, 0, 0)).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(ConfigError, match=r"blocks.1.mix: got a gradient from before shard\(\).*call model.zero_grad\(\)"):
        ml.shard(model, units=[Block])
    model.zero_grad()
    ml.shard(model, units=[Block]).close()


class HalvingFeed(nn.Module):
    """Two linear layers whose gradients are halved by a hook from before one call, and from after another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        before = [self.first.weight.register_hook(self.half), self.first.bias.register_hook(self.half)]
        out = self.second(torch.tanh(self.first(x)))
        after = [self.second.weight.register_hook(self.half)]
        # As in a plain loop: each forward pass has hooks of its own.
        self.handles = [*before, *after]
        return out

    def half(self, grad: Tensor) -> Tensor:
        self.calls += 1
        return grad / 2

    def forget(self) -> None:
        """Take the hooks of the last pass back."""
        for handle in self.handles:
            handle.remove()


def halved(engine: ml.ModuleEngine | None, model: nn.Sequential) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.0) if engine is None else None
    norms = []
    for step in range(4):
        torch.manual_seed(step)
        model(torch.randn(3, 12, dtype=torch.float64)).square().sum().backward()
        if engine is None:
            assert optimizer is not None
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
            optimizer.step()
            optimizer.zero_grad()
        else:
            norms.append(float(engine.step().grad_norm))
        for module in model:
            module.forget()
    return norms


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_hooks_that_forward_registers_see_the_gradients_as_in_torch(strategy: str) -> None:
    """In the step that is recorded, and in planned ones, in which layers wait for their weights themselves."""

    def build() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(HalvingFeed(), HalvingFeed(), HalvingFeed()).double()

    plain, ours = build(), build()
    expected = halved(None, plain)
    with ml.shard(ours, units=[HalvingFeed], strategy=strategy, optimizer=ml.AdamW(lr=0.05, weight_decay=0.0)) as engine:
        assert halved(engine, ours) == pytest.approx(expected, rel=1e-12)
    assert [feed.calls for feed in ours] == [feed.calls for feed in plain] == [12, 12, 12]


def test_attributes_are_on_what_modules_and_groups_see() -> None:
    model = net()
    marked = {"blocks.2.mix": model.blocks[2].mix, "head.weight": model.head.weight}
    for parameter in marked.values():
        parameter.no_weight_decay = True  # type: ignore[attr-defined]
    seen: set[str] = set()

    def look(module: nn.Module, args: object) -> None:
        seen.update(name for name, parameter in model.named_parameters() if hasattr(parameter, "no_weight_decay"))

    model.blocks[2].register_forward_pre_hook(look)
    group = ml.group(lambda name, parameter: hasattr(parameter, "no_weight_decay"), weight_decay=0.0)
    with ml.shard(model, units=[Block], optimizer=ml.AdamW(weight_decay=0.1, groups=[group])) as engine:
        assert set(engine.param_groups[0]["param_names"]) == set(marked)
        for step in range(2):
            seen.clear()
            loss_of(model, part(step, 0, 0)).backward()
            assert seen == set(marked)
            engine.step()
        for context in (engine.gathered(), engine.gathered(modify=True)):
            with context:
                look(model, ())
                assert seen == set(marked)


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_of_the_model_is_that_of_the_engine(assign: bool) -> None:
    """``assign`` would put the user's tensors into the module in place of the engine's."""
    torch.manual_seed(1)
    state = {name: torch.randn_like(value) for name, value in net().state_dict().items()}
    model = net()
    with ml.shard(model, units=[Block]) as engine:
        model.load_state_dict(state, assign=assign)
        assert all(isinstance(parameter, Placeholder) for parameter in model.parameters())
        found = engine.state_dict()["model"]
        assert found.keys() == state.keys() and all(torch.equal(value, state[name]) for name, value in found.items())


def leave_on_the_cpu(place: Place) -> str:
    """A group whose tensors are those of accelerators, as NCCL's is."""
    group = dist.new_group(backend="cuda:gloo")
    with pytest.raises(ConfigError) as error:
        ml.shard(net(), units=[Block], mesh=group)
    return str(error.value)


def test_a_model_on_the_cpu_beside_a_group_of_accelerators_is_refused(cluster: Cluster) -> None:
    for said in cluster.run(2, leave_on_the_cpu):
        assert "model: got parameters on cpu, expected cuda, as the process group has it; move the model there before shard()" in said


class Encoder(nn.Module):
    """A unit with a second method that reads its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)

    def encode(self, x: Tensor) -> Tensor:
        """As ``forward``."""
        return self.layer(x)  # type: ignore[no-any-return]


def test_a_method_beside_forward_is_refused_and_works_where_weights_are_whole() -> None:
    model = nn.Sequential(Encoder(), Encoder())
    x = torch.ones(2, 4)
    expected = model[0].encode(x)
    with ml.shard(model, units=[Encoder]) as engine:
        with pytest.raises(ShardedParameterError, match=r"^0.layer.weight: got linear while it is sharded.*inside engine.gathered"):
            model[0].encode(x)
        with engine.gathered():
            assert torch.equal(model[0].encode(x), expected)


@pytest.mark.parametrize(
    "name", ["ignored_params", "reshard_after_forward", "mp_policy", "offload_policy", "output_dtype", "shard_placement_fn"]
)
def test_a_keyword_of_fsdp2_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: got True, expected an argument of shard"):
        ml.shard(net(), units=[Block], **{name: True})
