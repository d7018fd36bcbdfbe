"""A reward model: its scores and gradients are HuggingFace's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron_llama.config.schema import ModelConfig
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.model.hf import hf_config_from_model
from megatron_llama.model.init import WithScore
from megatron_llama.model.llama import Stage
from megatron_llama.model.load import load_stages
from megatron_llama.model.plan.params import stage_units, whole_model
from megatron_llama.prove.materials import DrawnWeights
from torch import Tensor

from tests.harness import Cluster
from tests.model.families.twins import SCORED, TWINS
from tests.model.test_params import paper_stage, specs_of
from tests.parallel.cases import LOSS_BOUND, MODEL, NORM_BOUND, Layout, Record, deviation, merged, token_ids
from tests.torch_twin import filled
from tests.tune.preference.cases import CASES, align, layout_for

CPU = torch.device("cpu")


def reward_model(model: ModelConfig = MODEL) -> ModelConfig:
    return replace(model, num_labels=1, pad_token_id=0)


def loaded(model: ModelConfig) -> Stage:
    stage = paper_stage(model, whole_model(model), 0)
    load_stages([stage], specs_of(stage_units(model, whole_model(model), 0)), DrawnWeights(model), dtype=torch.float32, device=CPU)
    return stage


def hf_reward_model(model: ModelConfig, weights_of: WeightSource | None = None) -> torch.nn.Module:
    """transformers' class of the model with the same weights."""
    import transformers

    written = hf_config_from_model(model, dtype="float32")
    config = transformers.AutoConfig.for_model(**written, attn_implementation="eager")
    return filled(getattr(transformers, written["architectures"][0])(config), model, weights_of or DrawnWeights(model))


def test_a_language_model_begins_with_a_drawn_score() -> None:
    """All other weights are its own."""
    model = reward_model()
    stage = paper_stage(model, whole_model(model), 0)
    source = WithScore(DrawnWeights(MODEL), 5, 0.02)
    load_stages([stage], specs_of(stage_units(model, whole_model(model), 0)), source, dtype=torch.float32, device=CPU)
    theirs = dict(loaded(model).named_parameters())
    for name, parameter in stage.named_parameters():
        assert torch.equal(parameter, theirs[name]) is ("score" not in name), name
    [score] = [parameter for name, parameter in stage.named_parameters() if "score" in name]
    assert 0.01 < float(score.std()) < 0.03


@pytest.mark.tries("num_labels")
@pytest.mark.parametrize("family", SCORED)
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


ADAPTED = Layout(tp=2, sp=True, dp=2, strategy="optim_grads_params", recompute="selective", lora=4, steps=4)


def trained(cluster: Cluster, layout: Layout) -> list[Record]:
    run = layout_for(layout, CASES["reward"])
    return [record for record, _ in cluster.run(run.world_size, align, run, CASES["reward"])]


@pytest.mark.long
def test_additions_and_the_score_train_as_in_one_process(cluster: Cluster) -> None:
    """Losses, gradient norms and every weight; every copy has the same bits. Without additions: tests/tune/preference/test_parity.py."""
    ranks, [alone] = trained(cluster, ADAPTED), trained(cluster, ADAPTED.reference)
    for rank in ranks:
        assert deviation(rank.losses, alone.losses) < LOSS_BOUND
        assert deviation(rank.norms, alone.norms) < NORM_BOUND
    found, expected = merged(ranks), merged([alone])
    assert found.keys() == expected.keys() and "lm_head.weight" not in found
    for name, weight in expected.items():
        # An element whose gradient is rounding alone moves by the learning rate in either direction.
        assert float((found[name] - weight).norm()) < 1e-4 * float(weight.norm()) + 1e-4, name
