"""A reward model: its scores and gradients are HuggingFace's, in every layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron_llama.config.hf import hf_config_from_model
from megatron_llama.config.schema import ModelConfig
from megatron_llama.model.llama import Stage
from megatron_llama.model.load import load_stages
from megatron_llama.plans.params import hf_shapes, stage_units, whole_model
from megatron_llama.prove.materials import DrawnWeights
from torch import Tensor

from tests.families.twins import TWINS
from tests.parallel.cases import MODEL, token_ids
from tests.plans.test_params import paper_stage, specs_of

CPU = torch.device("cpu")


def reward_model(model: ModelConfig = MODEL) -> ModelConfig:
    return replace(model, num_labels=1, pad_token_id=0)


def loaded(model: ModelConfig) -> Stage:
    stage = paper_stage(model, whole_model(model), 0)
    load_stages([stage], specs_of(stage_units(model, whole_model(model), 0)), DrawnWeights(model), dtype=torch.float32, device=CPU)
    return stage


def hf_reward_model(model: ModelConfig) -> torch.nn.Module:
    """transformers' class of the model with the same weights."""
    import transformers
    from megatron_llama.plans.params import Rectangle

    written = hf_config_from_model(model, dtype="float32")
    config = transformers.AutoConfig.for_model(**written, attn_implementation="eager")
    twin: torch.nn.Module = getattr(transformers, written["architectures"][0])(config)
    weights = {}
    for name, shape in hf_shapes(model).items():
        weights[name] = torch.empty(shape)
        DrawnWeights(model)(Rectangle(name, shape, (0,) * len(shape), shape, 0), weights[name])
    twin.load_state_dict(weights)
    return twin


@pytest.mark.parametrize("family", TWINS)
def test_scores_and_gradients_are_huggingfaces(family: str) -> None:
    model = reward_model(TWINS[family].ours)
    stage = loaded(model)
    tokens = (token_ids(2 * 24) % (model.vocab_size - 1) + 1).view(2, 24).t().contiguous()
    for parameter in stage.parameters():
        parameter.requires_grad_()
    scores = stage(tokens, stage.positions(24, CPU))
    assert scores.shape == (24, 2)
    weights = torch.tensor([1.5, -0.5])
    (scores[-1] * weights).sum().backward()

    twin = hf_reward_model(model)
    theirs: Tensor = twin(tokens.t()).logits[:, 0]
    (theirs * weights).sum().backward()
    torch.testing.assert_close(scores[-1], theirs, rtol=1e-4, atol=1e-4 * float(theirs.detach().abs().max()))
    wanted = {name: parameter.grad for name, parameter in twin.named_parameters()}
    for name in ("score.weight", "model.norm.weight", "model.layers.0.self_attn.o_proj.weight"):
        ours = stage.get_parameter(name).grad
        assert ours is not None and wanted[name] is not None
        torch.testing.assert_close(ours, wanted[name], rtol=1e-3, atol=1e-4 * float(wanted[name].abs().max()))
