"""What a user says about the optimizer, as groups of parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron_llama.engine.options import ADAM, TORCH, TorchGroup
from megatron_llama.engine.shard.names import parameter_names
from megatron_llama.engine.shard.optimizer import AdamW, ParameterGroup, parameter_groups
from megatron_llama.engine.shard.user_groups import group
from megatron_llama.errors import ConfigError
from torch import nn


def small_model() -> nn.Sequential:
    """A convolution, a norm and two linear layers that share a weight."""
    model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    model[3].weight = model[2].weight
    return model


def by_name(groups: tuple[ParameterGroup, ...]) -> dict[str, ParameterGroup]:
    found = {name: each for each in groups for name in each.names}
    assert len(found) == sum(len(each.names) for each in groups)
    return found


def test_weight_decay_is_for_two_or_more_dims() -> None:
    groups = parameter_groups(AdamW(lr=0.5, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.1), parameter_names(small_model()))
    assert {name: each.options["weight_decay"] for name, each in by_name(groups).items()} == {
        "0.weight": 0.1,
        "0.bias": 0.0,
        "1.weight": 0.0,
        "1.bias": 0.0,
        "2.weight": 0.1,
        "2.bias": 0.0,
    }
    numbers = groups[0].update_options()
    assert (numbers.lr, numbers.adam_beta1, numbers.adam_beta2, numbers.adam_eps) == (0.5, 0.8, 0.9, 1e-5)
    assert numbers.weight_decay == 0.1


def test_the_first_group_that_matches_wins_and_fills_in_what_it_does_not_say() -> None:
    model = small_model()
    optimizer = AdamW(
        lr=1.0,
        weight_decay=0.1,
        groups=[
            group("1.*", lr=2.0, weight_decay=0.2),
            group(lambda name, parameter: parameter.dim() == 1, betas=(0.0, 0.5)),
            group(iter([model[0].weight, model[0].bias]), eps=1.0),
            # By the second name of the shared weight.
            group("3.weight", lr=4.0),
        ],
    )
    found = by_name(parameter_groups(optimizer, parameter_names(model)))
    assert {name: (one.lr, one.options["betas"][1], one.options["eps"], one.options["weight_decay"]) for name, one in found.items()} == {
        "1.weight": (2.0, 0.999, 1e-8, 0.2),
        "1.bias": (2.0, 0.999, 1e-8, 0.2),
        "0.bias": (1.0, 0.5, 1e-8, 0.0),
        "2.bias": (1.0, 0.5, 1e-8, 0.0),
        "0.weight": (1.0, 0.999, 1.0, 0.1),
        "2.weight": (4.0, 0.999, 1e-8, 0.1),
    }


def test_names_are_matched_without_wrappers() -> None:
    model = nn.Sequential(torch.compile(nn.Linear(2, 2)))
    assert [name for name, _ in model.named_parameters()] == ["0._orig_mod.weight", "0._orig_mod.bias"]
    groups = parameter_groups(AdamW(groups=[group("0.weight", lr=7.0)]), parameter_names(model))
    assert {name: one.lr for name, one in by_name(groups).items()} == {"0.weight": 7.0, "0.bias": 1e-3}


def test_frozen_parameters_are_in_no_group() -> None:
    model = small_model()
    model[2].weight.requires_grad_(False)
    assert "2.weight" not in by_name(parameter_groups(AdamW(), parameter_names(model)))
    assert "2.weight" not in by_name(parameter_groups(torch.optim.AdamW(model.parameters()), parameter_names(model)))


def test_a_group_that_matches_nothing_is_named() -> None:
    model = small_model()
    model[2].weight.requires_grad_(False)
    foreign = nn.Parameter(torch.zeros(3, 5))
    for groups, expected in (
        ([group("*.beta")], r"ml.group\('\*.beta'\): got a match of no parameter, .*a name of this model is 0.weight"),
        ([group("2.weight")], r"ml.group\('2.weight'\): got a match of only frozen parameters"),
        (
            [group("1.*"), group("1.bias")],
            r"ml.group\('1.bias'\): got a match of only parameters that ml.group\('1.\*'\) matches before it",
        ),
        ([group([foreign])], r"ml.group of 1 parameter: got 1 parameter that the model does not have.*\(3, 5\)"),
        ([group([])], "ml.group of 0 parameters: got a match of no parameter"),
    ):
        with pytest.raises(ConfigError, match=expected):
            parameter_groups(AdamW(groups=groups), parameter_names(model))


@pytest.mark.parametrize(
    "values", [{"lr": -1.0}, {"lr": float("nan")}, {"betas": (1.0, 0.9)}, {"eps": -1e-8}, {"weight_decay": float("inf")}]
)
def test_values_that_adamw_does_not_have(values: dict[str, Any]) -> None:
    name = next(iter(values))
    with pytest.raises(ConfigError, match=f"ml.AdamW: got {name}="):
        AdamW(**values)
    with pytest.raises(ConfigError, match=rf"ml.group\('a'\): got {name}="):
        group("a", **values)


def test_what_is_no_group() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    for match, expected in ((weight, "one tensor"), (["*.bias"], "an iterable with '\\*.bias'"), (3, "got 3")):
        with pytest.raises(TypeError, match=expected):
            group(match)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="what ml"):
        AdamW(groups=[{"params": [weight]}])  # type: ignore[list-item]


def test_the_groups_of_torch_are_taken_as_they_are() -> None:
    """In their order, empty ones too: a scheduler has one function for each."""
    model = small_model()
    model[1].requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [
            {"params": list(model[1].parameters()), "lr": torch.tensor(3.0)},
            {"params": [*model[0].parameters()], "betas": (0.5, 0.6), "weight_decay": 0.3},
            {"params": [*model[2].parameters()], "eps": 1e-3},
        ],
        fused=True,
        weight_decay=0.1,
    )
    kind = "torch.optim.AdamW"
    assert parameter_groups(optimizer, parameter_names(model)) == (
        ParameterGroup(3.0, {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}, (), kind),
        ParameterGroup(1e-3, {"betas": (0.5, 0.6), "eps": 1e-8, "weight_decay": 0.3}, ("0.weight", "0.bias"), kind),
        ParameterGroup(1e-3, {"betas": (0.9, 0.999), "eps": 1e-3, "weight_decay": 0.1}, ("2.weight", "2.bias"), kind),
    )


def test_what_torch_has_and_the_engine_has_not() -> None:
    model = small_model()
    optimizer = torch.optim.AdamW([*model[0].parameters(), nn.Parameter(torch.zeros(1))], differentiable=True)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    optimizer.state[model[0].weight], optimizer.state[model[0].bias] = {"step": 1}, {"step": 1}
    with pytest.raises(ConfigError) as error:
        parameter_groups(optimizer, parameter_names(model))
    lines = str(error.value).splitlines()
    starts = [line.split(", expected")[0].strip(" -") for line in lines]
    assert starts == [
        "shard(optimizer=torch.optim.AdamW):",
        "group 0: got differentiable=True",
        "group 0: got a learning-rate scheduler",
        "group 0: got 1 parameter that the model does not have",
        *(f"{name}: got a trainable parameter in no group" for name in ("1.weight", "1.bias", "2.weight", "2.bias")),
        "got the state of 2 parameters",
    ]


def test_torchs_adamw_is_the_engines_unless_its_options_are_others() -> None:
    for options, rule in (({}, ADAM), ({"fused": True}, ADAM), ({"amsgrad": True}, TORCH), ({"maximize": True}, TORCH)):
        model = small_model()
        (found,) = parameter_groups(torch.optim.AdamW(model.parameters(), **options), parameter_names(model))
        assert found.rule == rule and isinstance(found.update_options(), TorchGroup) == (rule == TORCH)


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"shard\(optimizer=\): got builtins.str, expected ml.AdamW"):
        parameter_groups("adamw", parameter_names(small_model()))  # type: ignore[arg-type]
