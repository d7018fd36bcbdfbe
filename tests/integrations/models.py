"""A small language model and its data, for loops of other libraries."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from tests.launcher import ROOT

UNITS = {"units": [LlamaDecoderLayer]}
LENGTH = 32


def model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True, max_position_embeddings=256, eos_token_id=0, pad_token_id=1))


def data(count: int) -> list[dict[str, list[int]]]:
    """Bytes of text as samples; every third one has labels that count for nothing."""
    text = Path(ROOT / "README.md").read_bytes()
    samples = [list(text[LENGTH * n : LENGTH * n + LENGTH]) for n in range(count)]
    return [{"input_ids": ids, "labels": [-100] * (n % 3 * 5) + ids[n % 3 * 5 :]} for n, ids in enumerate(samples)]


def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([sample[name] for sample in samples]) for name in samples[0]}
