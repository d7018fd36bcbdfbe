"""Copies of a sharded model that are taken where its parameters are whole: an average of the weights, a file for somebody who has no engine."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import megatron_llama as ml
import pytest
import torch
from megatron_llama.engine.shard.placeholders import ShardedParameterError
from torch import nn

from tests.engine.shard.models import Net, loss_of, net, part
from tests.engine.shard.models import sharded as shard_net

Copied = Callable[[nn.Module], nn.Module]


def stepped(model: nn.Module, engine: ml.ModuleEngine, step: int) -> float:
    loss = loss_of(model, part(step, 0, 0))
    loss.backward()  # type: ignore[no-untyped-call]
    engine.step()
    return loss.item()


def from_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, nn.Module)
    return loaded


@pytest.mark.parametrize("copied", [copy.deepcopy, from_file])
def test_a_copy_is_a_plain_model(copied: Copied) -> None:
    model, alone = net(), net()
    engine = shard_net(model)
    twin = shard_net(alone)
    ids = part(9, 0, 0)
    for step in range(2):
        stepped(model, engine, step)
        stepped(alone, twin, step)
    with engine.gathered():
        own = copied(model)
        expected = model(ids)
    assert type(own) is Net and {type(one) for one in own.modules()} == {type(one) for one in net().modules()}
    assert not any("megatron_llama" in name for one in own.modules() for name in vars(one))
    assert not any("forward" in vars(one) for one in own.modules())
    # It computes alone, in the middle of a step of the engine, and with gradients.
    loss = loss_of(model, part(2, 0, 0))
    assert torch.equal(own(ids), expected)
    own.requires_grad_()
    loss_of(own, ids).backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in own.parameters())
    state = own.state_dict()
    assert {name: type(value) for name, value in state.items()} == dict.fromkeys(net().state_dict(), torch.Tensor)
    own.load_state_dict(state)
    loss.backward()  # type: ignore[no-untyped-call]
    engine.step()
    # The engine has the same bits as one whose model nobody has copied, and its layers still write their gradients themselves.
    stepped(alone, twin, 2)
    assert stepped(model, engine, 3) == stepped(alone, twin, 3)
    assert [name for name, one in model.named_modules() if "forward" in vars(one)] == [
        name for name, one in alone.named_modules() if "forward" in vars(one)
    ]
    assert any("forward" in vars(one) for one in model.modules())
    engine.close()
    twin.close()


@pytest.mark.parametrize("copied", [copy.deepcopy, from_file])
def test_a_sharded_model_is_not_copied(copied: Copied) -> None:
    model = net()
    with shard_net(model), pytest.raises(ShardedParameterError, match=r"inside engine\.gathered"):
        copied(model)
