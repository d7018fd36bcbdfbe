"""Random weights give the logits of transformers' LlamaForCausalLM.

Weights of std 0.1 and prompts beyond the original context: at std 0.02 attention is so flat that a wrong rotary scaling hides
below rounding.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron_llama.config.schema import Config, ModelConfig, ParallelConfig
from megatron_llama.engine.mesh import Mesh
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.model.init import InitialWeights
from megatron_llama.model.llama import build_stages
from megatron_llama.model.load import load_stages, rank_specs
from megatron_llama.model.nn.rotary import rope_frequencies
from torch import Tensor

from tests.harness import Cluster
from tests.parallel.cases import token_ids
from tests.torch_twin import hf_model

MHA = ModelConfig(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
    max_position_embeddings=256,
    initializer_range=0.1,
)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
MODELS = {
    "mha": MHA,
    "gqa": replace(MHA, num_key_value_heads=2, rms_norm_eps=1e-6),
    "one kv head": replace(MHA, num_key_value_heads=1),
    "tied": replace(MHA, tie_word_embeddings=True, num_key_value_heads=2),
    "llama3 scaling": replace(MHA, rope_scaling=LLAMA3, rope_theta=500000.0),
    "llama3 scaling by 32": replace(MHA, rope_scaling=LLAMA3 | {"factor": 32.0}, rope_theta=500000.0),
    "linear scaling": replace(MHA, rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "wide heads": replace(MHA, head_dim=32, num_key_value_heads=2),
}
LENGTH, BATCH = 160, 2
"""The prompt is longer than LLAMA3's original context."""
models = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())


def prompt() -> Tensor:
    """[b, s] ids of English text."""
    return token_ids(LENGTH * BATCH).view(BATCH, LENGTH)


def config_of(model: ModelConfig, tp: int = 1, *, sequence_parallel: bool = False) -> Config:
    return Config(model=model, parallel=ParallelConfig(tensor_model_parallel_size=tp, sequence_parallel=sequence_parallel))


def stage_logits(mesh: Mesh, config: Config) -> Tensor:
    """[s, b, padded_vocab / tp] of a one-stage model."""
    [stage] = build_stages(config, mesh).values()
    source = InitialWeights(1234, config.model.initializer_range)
    load_stages([stage], rank_specs(config, mesh), source, dtype=torch.float32, device=mesh.device)
    with torch.no_grad():
        return stage(prompt().t(), stage.positions(LENGTH, torch.device("cpu")))


def local_logits(place: Place, model: ModelConfig, sequence_parallel: bool) -> Tensor:
    config = config_of(model, place.world_size, sequence_parallel=sequence_parallel)
    mesh = build_mesh(config, rank=place.rank, world_size=place.world_size, device=torch.device("cpu"))
    return stage_logits(mesh, config)


def hf_logits(model: ModelConfig) -> Tensor:
    """[s, b, vocab]."""
    with torch.no_grad():
        return hf_model(model)(prompt()).logits.transpose(0, 1)


def furthest(found: Tensor, expected: Tensor) -> float:
    return float((found[..., : expected.shape[-1]] - expected).abs().max())


@models
def test_logits_are_huggingfaces(cluster: Cluster, model: ModelConfig) -> None:
    expected = hf_logits(model)
    assert expected.std() > 0.3, "logits that are all alike would prove nothing"
    found = stage_logits(Mesh.single(), config_of(model))
    assert furthest(found, expected) < 1e-4
    for tp, sequence_parallel in ((2, False), (2, True), (4, True)):
        split = torch.cat(cluster.run(tp, local_logits, model, sequence_parallel), dim=-1)
        assert split.shape[-1] == 512
        assert furthest(split, expected) < 1e-4


def test_the_bound_sees_a_missing_scaling() -> None:
    for name in ("llama3 scaling", "linear scaling"):
        assert furthest(stage_logits(Mesh.single(), config_of(replace(MODELS[name], rope_scaling=None))), hf_logits(MODELS[name])) > 1e-2


@models
def test_rotary_frequencies_are_bit_for_bit_huggingfaces(model: ModelConfig) -> None:
    rotary = hf_model(model).model.rotary_emb
    ours = rope_frequencies(model.head_dim, model.rope_theta, model.rope_scaling, torch.device("cpu"))
    assert torch.equal(ours, rotary.inv_freq) and ours.dtype is torch.float32
    assert rotary.attention_scaling == 1.0


def test_llama3_scaling_has_all_three_bands() -> None:
    """The published numbers of Llama 3.1: short waves kept, long ones divided by 8, a blend between."""
    published = LLAMA3 | {"original_max_position_embeddings": 8192}
    plain, scaled = (rope_frequencies(128, 500000.0, scaling, torch.device("cpu")) for scaling in (None, published))
    ratio = plain / scaled
    assert int((ratio == 1).sum()) > 20 and int((ratio == 8).sum()) > 20
    assert int(((ratio > 1) & (ratio < 8)).sum()) > 3
