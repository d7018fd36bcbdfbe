"""The user's module: Hugging Face's LLaMA in the shape of our own model, with the same first
values, so that all contenders train the same; or its Mixtral in that of our own with experts. No
line of the package is in it; the hooks of ``waits`` only take time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from megatron_llama.config.schema import Config, ModelConfig
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.model.init import InitialWeights
from megatron_llama.model.plan.experts import expert_names, router_name
from tools.overlap.waits import Clock, install

SEED = 1234


def hf_model(config: Config) -> Any:
    """``LlamaForCausalLM`` in fp32, with the values that our own model begins with, or
    ``MixtralForCausalLM`` if that has experts."""
    m = config.model
    shape: dict[str, Any] = {
        "vocab_size": m.vocab_size,
        "hidden_size": m.hidden_size,
        "intermediate_size": m.intermediate_size,
        "num_hidden_layers": m.num_hidden_layers,
        "num_attention_heads": m.num_attention_heads,
        "num_key_value_heads": m.num_key_value_heads,
        "max_position_embeddings": m.max_position_embeddings,
        "rms_norm_eps": m.rms_norm_eps,
        "use_cache": False,
    }
    model: Any
    if m.num_experts:
        shape |= {
            "num_local_experts": m.num_experts,
            "num_experts_per_tok": m.num_experts_per_tok,
            "rope_theta": m.rope_theta,
        }
        model = MixtralForCausalLM(MixtralConfig(**shape, sliding_window=None))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape))
    values = InitialWeights(SEED, m.initializer_range)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for theirs, part in _named_in_files(name, parameter, m):
                size = tuple(part.shape)
                values(Rectangle(theirs, size, (0,) * len(size), size, 0), part)
    return model


def _named_in_files(
    name: str, parameter: Tensor, model: ModelConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a parameter by their names in files, where each expert has its own."""
    prefix, _, within = name.rpartition(".mlp.")
    if within == "gate.weight":
        yield f"{prefix}.{router_name(model)}", parameter
    elif within.startswith("experts."):
        for expert, matrix in enumerate(parameter):
            gate, up, down = expert_names(model, expert)
            names = (gate, up) if within.endswith("gate_up_proj") else (down,)
            for theirs, part in zip(names, matrix.chunk(len(names)), strict=True):
                yield f"{prefix}.{theirs}", part
    else:
        yield name, parameter


class UserModel(nn.Module):
    """The model with its loss. ``clock`` times its blocks."""

    def __init__(self, config: Config, clock: Clock) -> None:
        super().__init__()
        self.lm = hf_model(config)
        self.blocks = list(self.lm.model.layers)
        install([(f"layers.{index}", block) for index, block in enumerate(self.blocks)], clock)

    @property
    def groups(self) -> list[list[nn.Module]]:
        """What is sharded together, in forward order."""
        ends = [self.lm.model.norm, self.lm.lm_head]
        return [[self.lm.model.embed_tokens], *([block] for block in self.blocks), ends]

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of ids [s, b], 0-dim."""
        logits = self.lm(input_ids=tokens.T, use_cache=False).logits
        return cross_entropy(logits.flatten(0, 1), labels.T.flatten())
