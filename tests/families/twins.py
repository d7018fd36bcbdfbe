"""One small model of each family, as transformers' own config class makes it and as we say it, with weights that hide nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from megatron_llama.config.schema import Config, ModelConfig
from megatron_llama.model.init import InitialWeights
from megatron_llama.plans.params import Rectangle, hf_shapes
from torch import Tensor

from tests.harness import Cluster
from tests.parallel.cases import Layout, Record, Reference, train, train_twin

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
STD = 0.1
"""Of all weights around their initial values: at 0.02 attention is so flat that a wrong norm or bias would hide below rounding."""


@dataclass(frozen=True)
class Twin:
    """A model of a family."""

    config_class: str
    """Of transformers; the name of the model's class follows."""
    ours: ModelConfig
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of transformers' config beside the sizes."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Parts of names of tensors that are other ones in transformers: of a family that we have no declaration of."""

    def hf_config(self, **options: Any) -> Any:
        """What transformers' own class makes of the sizes."""
        sizes = {name: getattr(self.ours, name) for name in SIZES}
        sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": self.ours.rope_theta}
        return getattr(transformers, self.config_class)(**(sizes | dict(self.options) | options))

    def hf_model(self, dtype: torch.dtype = torch.float32, layers: int = SIZES["num_hidden_layers"]) -> torch.nn.Module:
        """transformers' model with the weights of ``DrawnWeights``."""
        config = self.hf_config(num_hidden_layers=layers, attn_implementation="sdpa")
        name = self.config_class.removesuffix("Config").removesuffix("Text") + "ForCausalLM"
        twin: torch.nn.Module = getattr(transformers, name)(config).to(dtype)
        model, weights = replace(self.ours, num_hidden_layers=layers), {}
        for tensor, shape in hf_shapes(model).items():
            values = torch.empty(shape, dtype=dtype)
            DrawnWeights(model)(Rectangle(tensor, shape, (0,) * len(shape), shape, 0), values)
            theirs = tensor
            for part, new in self.renamed.items():
                theirs = theirs.replace(part, new)
            weights[theirs] = values
        missing, unexpected = twin.load_state_dict(weights, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"} and model.tie_word_embeddings >= bool(missing), (missing, unexpected)
        return twin


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * pair for pair in range(4)],
    "long_factor": [2.0 + 0.7 * pair for pair in range(4)],
    "original_max_position_embeddings": 20,
}
"""Of half of each head; training samples are longer than the original context."""
MIXED = ("sliding_attention", "full_attention") * 2
LLAMA = ModelConfig(**SIZES)
TWINS = {
    "llama": Twin("LlamaConfig", replace(LLAMA, attention_bias=True, mlp_bias=True), {"attention_bias": True, "mlp_bias": True}),
    "mistral": Twin("MistralConfig", replace(LLAMA, model_type="mistral", head_dim=24, sliding_window=10), {"sliding_window": 10}),
    "qwen2": Twin("Qwen2Config", replace(LLAMA, model_type="qwen2", add_qkv_bias=True, tie_word_embeddings=True)),
    "qwen3": Twin("Qwen3Config", replace(LLAMA, model_type="qwen3", qk_norm="head", head_dim=24)),
    "phi3": Twin(
        "Phi3Config",
        replace(LLAMA, model_type="phi3", sliding_window=13, partial_rotary_factor=0.5, rope_scaling=LONGROPE),
        {
            "pad_token_id": 0,
            "sliding_window": 13,
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": LONGROPE["original_max_position_embeddings"],
            "rope_parameters": {**LONGROPE, "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "gemma3": Twin(
        "Gemma3TextConfig",
        replace(
            LLAMA,
            model_type="gemma3_text",
            qk_norm="head",
            norm_position="both",
            apply_layernorm_1p=True,
            hidden_act="gelu_pytorch_tanh",
            embedding_multiplier=math.sqrt(SIZES["hidden_size"]),
            final_logit_softcapping=4.0,
            tie_word_embeddings=True,
            head_dim=24,
            query_pre_attn_scalar=20.0,
            sliding_window=10,
            layer_types=MIXED,
            rope_local_base_freq=100.0,
        ),
        {
            "query_pre_attn_scalar": 20,
            "final_logit_softcapping": 4.0,
            "sliding_window": 10,
            "layer_types": list(MIXED),
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "olmo2": Twin(
        "Olmo2Config",
        replace(LLAMA, qk_norm="projection", norm_position="after"),
        renamed={"post_self_attn_layernorm": "post_attention_layernorm", "post_mlp_layernorm": "post_feedforward_layernorm"},
    ),
}


class DrawnWeights:
    """Normal numbers everywhere: matrices and biases around 0, norms around what multiplies by one."""

    def __init__(self, model: ModelConfig) -> None:
        self._matrices = InitialWeights(1234, STD)
        self._one = 0.0 if model.apply_layernorm_1p else 1.0

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        """See WeightSource."""
        if len(rectangle.shape) > 1:
            name = rectangle.name.replace("lora_", "drawn_")
            self._matrices(replace(rectangle, name=name), out)
            return
        column = replace(rectangle, shape=(*rectangle.shape, 1), offset=(*rectangle.offset, 0), size=(*rectangle.size, 1))
        self._matrices(column, out.unsqueeze(-1))
        if not rectangle.name.endswith(".bias"):
            out.add_(self._one)


@dataclass(frozen=True)
class FamilyLayout(Layout):
    """A layout of a family's model."""

    family: str = "llama"

    @property
    def model(self) -> ModelConfig:
        """The family's, with the layers of the layout."""
        return replace(TWINS[self.family].ours, num_hidden_layers=self.layers)

    @property
    def reference(self) -> FamilyLayout:
        """See Layout."""
        kept = ("family", "documents", "fp64", "clip", "steps", "layers", "freeze", "lora", "targets")
        return FamilyLayout(**{name: getattr(self, name) for name in kept})

    @property
    def name(self) -> str:
        """See Layout."""
        return f"{self.family} {super().name}"

    def config(self) -> Config:
        """See Layout."""
        return replace(super().config(), model=self.model)

    def weights(self) -> DrawnWeights:
        """See Layout."""
        return DrawnWeights(self.model)


def reference(cluster: Cluster, layout: FamilyLayout) -> Reference:
    """Train what a layout is compared with: one process in fp32 and in fp64, and transformers."""
    alone = layout.reference
    single, exact = (cluster.run(1, train, run)[0] for run in (alone, replace(alone, fp64=True)))
    return Reference(single, exact, _train_hf(alone))


def _train_hf(alone: FamilyLayout) -> Record | None:
    """None for what transformers has no counterpart of."""
    if alone.documents or alone.lora or alone.freeze:
        return None
    return train_twin(TWINS[alone.family].hf_model(layers=alone.layers), alone)
