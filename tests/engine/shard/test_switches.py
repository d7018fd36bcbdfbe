"""What other libraries do otherwise where parameters are sharded: transformers' layerdrop and ``generate``."""

from __future__ import annotations

import copy

import megatron_llama as ml
import pytest
import torch
import torch.distributed as dist
from megatron_llama.engine.shard.marks import MARKS
from megatron_llama.launch.launcher import Place
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Wav2Vec2Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2Encoder, Wav2Vec2EncoderLayer

from tests.harness import Cluster

STEPS = 6


def encoder(layerdrop: float) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24}
    dropouts = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    convolution = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    return Wav2Vec2Encoder(Wav2Vec2Config(**sizes, **dropouts, **convolution, layerdrop=layerdrop))


def loss_of(module: nn.Module, step: int, rank: int) -> Tensor:
    x = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(10 * step + rank))
    loss: Tensor = module(x).last_hidden_state.square().mean()
    return loss


def losses_with_layerdrop(place: Place) -> tuple[list[float], list[float]]:
    """With layers that each rank would drop by numbers of its own, and of one process that drops none: with FSDP and DeepSpeed, too, all
    layers run."""
    module, plain = encoder(0.5), encoder(0.0)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    engine = ml.shard(module, units=[Wav2Vec2EncoderLayer], optimizer=ml.AdamW(lr=1e-2, weight_decay=0.0))
    torch.manual_seed(place.rank)
    ours, expected = [], []
    for step in range(STEPS):
        loss = loss_of(module, step, place.rank)
        loss.backward()
        engine.step()
        mean = loss.detach() / place.world_size
        dist.all_reduce(mean)
        ours.append(float(mean))
        exact = torch.stack([loss_of(plain, step, rank) for rank in range(place.world_size)]).mean()
        exact.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(exact))
    engine.close()
    assert not any(MARKS.keys() & vars(child) for child in module.modules())
    return ours, expected


def test_layers_that_some_rank_would_drop_run_on_all(cluster: Cluster) -> None:
    for ours, expected in cluster.run(2, losses_with_layerdrop):
        assert ours == pytest.approx(expected, rel=1e-6)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 31}
    return LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=64)).eval()


def generated(place: Place) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and lengths that differ by rank, twice, and a step in between."""
    model, plain = llama(), llama()
    engine = ml.shard(model, units=[LlamaDecoderLayer])
    results = []
    for _ in range(2):
        for module in (model, plain):
            prompt = torch.arange(1, 4 + place.rank)[None] % 31
            options = {"do_sample": False, "max_new_tokens": 3 + 4 * place.rank, "pad_token_id": 0, "eos_token_id": None}
            results.append(module.generate(prompt, **options)[0].tolist())
        ids = torch.arange(12)[None] % 31
        model(input_ids=ids, labels=ids).loss.backward()
        engine.step()
        with engine.gathered():
            assert not any(MARKS.keys() & vars(child) for child in model.modules())
            plain = copy.deepcopy(model)
    engine.close()
    return results[::2], results[1::2]


def test_ranks_generate_texts_of_different_lengths(cluster: Cluster) -> None:
    for ours, expected in cluster.run(2, generated):
        assert ours == expected and len(ours[0]) == len(ours[1])
