"""The user's module: Hugging Face's LLaMA in the shape of our own model, with the same first
values, so that all contenders train the same; or its Mixtral of as many parameters, and routers. No
line of the package is in it; the hooks of ``waits`` only take time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from megatron_llama.config.schema import Config
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.model.init import InitialWeights
from tools.overlap.catalogue import EXPERTS_PER_TOKEN
from tools.overlap.waits import Clock, install

SEED = 1234


def hf_model(config: Config, experts: int = 0) -> Any:
    """``LlamaForCausalLM`` in fp32, with the values that our own model begins with. With
    ``experts`` it is ``MixtralForCausalLM``, whose experts share out the width of the MLP."""
    m = config.model
    shape: dict[str, Any] = {
        "vocab_size": m.vocab_size,
        "hidden_size": m.hidden_size,
        "intermediate_size": m.intermediate_size // max(1, experts),
        "num_hidden_layers": m.num_hidden_layers,
        "num_attention_heads": m.num_attention_heads,
        "num_key_value_heads": m.num_key_value_heads,
        "max_position_embeddings": m.max_position_embeddings,
        "rms_norm_eps": m.rms_norm_eps,
        "use_cache": False,
    }
    model: Any
    if experts:
        shape |= {"num_local_experts": experts, "num_experts_per_tok": EXPERTS_PER_TOKEN}
        model = MixtralForCausalLM(MixtralConfig(**shape, sliding_window=None))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape))
    values = InitialWeights(SEED, m.initializer_range)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Experts are stacked: a matrix of them all, one below the other.
            whole = parameter.flatten(0, -2) if parameter.dim() > 2 else parameter
            size = tuple(whole.shape)
            values(Rectangle(name, size, (0,) * len(size), size, 0), whole)
    return model


class UserModel(nn.Module):
    """The model with its loss. ``clock`` times its blocks."""

    def __init__(self, config: Config, clock: Clock, experts: int = 0) -> None:
        super().__init__()
        self.lm = hf_model(config, experts)
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
