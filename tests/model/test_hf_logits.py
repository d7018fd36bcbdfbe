"""Random weights give the logits of transformers' LlamaForCausalLM.

Weights of std 0.1 and prompts beyond the original context: at std 0.02 attention is so flat that a wrong rotary scaling hides
below rounding.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron_llama.config.schema import Config, ModelConfig, ParallelConfig
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.model.init import InitialWeights
from megatron_llama.model.llama import build_stages
from megatron_llama.model.load import load_stages, rank_specs
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
    "gqa": replace(MHA, num_key_value_heads=2, rms_norm_eps=1e-6),
    "one kv head": replace(MHA, num_key_value_heads=1),
    "tied": replace(MHA, tie_word_embeddings=True),
    "llama3 scaling": replace(MHA, rope_scaling=LLAMA3, rope_theta=500000.0),
    "wide heads": replace(MHA, head_dim=32, num_key_value_heads=2),
}
LENGTH, BATCH = 160, 2
"""The prompt is longer than LLAMA3's original context."""


PROMPT = token_ids(LENGTH * BATCH).view(BATCH, LENGTH)
"""[b, s] ids of English text."""


def local_logits(place: Place, model: ModelConfig, sequence_parallel: bool) -> Tensor:
    """[s, b, padded_vocab / tp] of a one-stage model."""
    parallel = ParallelConfig(tensor_model_parallel_size=place.world_size, sequence_parallel=sequence_parallel)
    config = Config(model=model, parallel=parallel)
    mesh = build_mesh(config, rank=place.rank, world_size=place.world_size, device=torch.device("cpu"))
    [stage] = build_stages(config, mesh).values()
    load_stages([stage], rank_specs(config, mesh), InitialWeights(1234, model.initializer_range), dtype=torch.float32, device=mesh.device)
    with torch.no_grad():
        return stage(PROMPT.t(), stage.positions(LENGTH, torch.device("cpu")))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_logits_are_huggingfaces(cluster: Cluster, model: ModelConfig) -> None:
    with torch.no_grad():
        expected = hf_model(model)(PROMPT).logits.transpose(0, 1)
    assert expected.std() > 0.3, "logits that are all alike would prove nothing"
    for tp, sequence_parallel in ((1, False), (2, False), (2, True), (4, True)):
        found = torch.cat(cluster.run(tp, local_logits, model, sequence_parallel), dim=-1)
        assert found.shape[-1] == (384 if tp == 1 else 512)
        assert (found[..., : model.vocab_size] - expected).abs().max() < 1e-4, (tp, sequence_parallel)
