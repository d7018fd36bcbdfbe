"""One small model of each family, as transformers' own config class makes it and as we say it, with weights that hide nothing."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import transformers
from megatron_llama.config.schema import Config, ModelConfig
from megatron_llama.engine.offload_options import OffloadConfig
from megatron_llama.model.hf import model_config_from_hf
from megatron_llama.prove.materials import DrawnWeights
from torch import Tensor, nn

from tests import torch_twin
from tests.harness import Cluster
from tests.parallel.cases import OPTIMIZER, STEPS, STRATEGIES, Layout, Record, Reference, global_samples, train, train_twin
from tests.parallel.draw import draw
from tests.torch_twin import filled

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


@dataclass(frozen=True)
class Twin:
    """A model of a family."""

    config_class: str
    """Of transformers; the name of the model's class follows."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of transformers' config beside the sizes."""

    @property
    def architecture(self) -> str:
        """The class of the model in transformers."""
        return self.config_class.removesuffix("Config").removesuffix("Text") + "ForCausalLM"

    def hf_config(self, **options: Any) -> Any:
        """What transformers' own class makes of the sizes."""
        tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        return getattr(transformers, self.config_class)(**(SIZES | tokens | dict(self.options) | options))

    @cached_property
    def ours(self) -> ModelConfig:
        """The model as we read it."""
        return model_config_from_hf(self.hf_config(architectures=[self.architecture]).to_dict(), where=self.config_class)

    def hf_model(self, dtype: torch.dtype = torch.float32, **options: Any) -> torch.nn.Module:
        """transformers' model with the weights of ``DrawnWeights``."""
        config = self.hf_config(attn_implementation="eager" if self.ours.attn_logit_softcapping else "sdpa", **options)
        return filled(getattr(transformers, self.architecture)(config), self.ours, DrawnWeights(self.ours), dtype)


def _rotary(rope_type: str = "default", theta: float = 10000.0, **numbers: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": theta, **numbers}


WINDOW = 9
"""Far fewer positions than a sample has."""
LONGROPE: dict[str, Any] = {
    "short_factor": [1.0 + 0.1 * pair for pair in range(4)],
    "long_factor": [2.0 + 0.7 * pair for pair in range(4)],
    "original_max_position_embeddings": 20,
}
"""Of half of each head; training samples are longer than the original context."""
TWINS = {
    "llama": Twin("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "mistral": Twin("MistralConfig", {"sliding_window": WINDOW, "head_dim": 24}),
    "qwen2": Twin(
        "Qwen2Config", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2, "tie_word_embeddings": True}
    ),
    "qwen3": Twin("Qwen3Config", {"head_dim": 24, "rope_parameters": _rotary("yarn", factor=4.0, original_max_position_embeddings=64)}),
    "phi3": Twin(
        "Phi3Config",
        {
            "sliding_window": WINDOW,
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": LONGROPE["original_max_position_embeddings"],
            "rope_parameters": _rotary("longrope", **LONGROPE, partial_rotary_factor=0.5),
        },
    ),
    "gemma2": Twin(
        "Gemma2Config",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 40,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
            "sliding_window": WINDOW,
        },
    ),
    "gemma3": Twin(
        "Gemma3TextConfig",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 40,
            "final_logit_softcapping": 4.0,
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {"full_attention": _rotary("linear", 1e6, factor=8.0), "sliding_attention": _rotary()},
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": Twin("Olmo2Config", {"attention_bias": True, "head_dim": 24}),
    "mixtral": Twin("MixtralConfig", {"intermediate_size": 104, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "qwen3_moe": Twin(
        "Qwen3MoeConfig",
        {
            "head_dim": 24,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": WINDOW,
        },
    ),
    "llama4": Twin(
        "Llama4TextConfig",
        {
            "head_dim": 20,
            "intermediate_size": 40,
            "intermediate_size_mlp": 96,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "moe_layers": [0, 2, 3],
            "no_rope_layers": [1, 0, 1, 1],
            "attention_chunk_size": WINDOW,
            "floor_scale": 3,
            "attn_scale": 0.5,
            "rope_parameters": _rotary("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
        },
    ),
}


BALANCE, Z_LOSS = 0.3, 0.05
"""Weights of the routers' losses, with which they move a norm by far more than its bound."""
SCORED = tuple(family for family in TWINS if family != "llama4")
"""Those whose reward models transformers has a class for."""


@dataclass(frozen=True)
class FamilyLayout(Layout):
    """A layout of a family's model."""

    family: str = "llama"
    balance: str = "none"
    """The loss that balances experts."""
    z_loss: float = 0.0
    """Weight of the routers' z-loss."""

    @property
    def model(self) -> ModelConfig:
        """The family's."""
        return replace(TWINS[self.family].ours, pad_token_id=self.pad)

    @property
    def reference(self) -> FamilyLayout:
        """See Layout."""
        kept = ("family", "pad", "trains_pad", "documents", "fp64", "clip", "steps", "freeze", "lora", "targets", "balance", "z_loss", "first")
        return FamilyLayout(**{name: getattr(self, name) for name in kept})

    @property
    def name(self) -> str:
        """See Layout."""
        losses = [self.balance] * (self.balance != "none") + ["z-loss"] * (self.z_loss > 0)
        return " ".join([self.family, super().name, *losses])

    def config(self) -> Config:
        """See Layout."""
        config = super().config()
        kind: dict[str, Any] = {"moe_router_load_balancing_type": self.balance, "moe_aux_loss_coeff": BALANCE if self.balance != "none" else 0.0}
        return replace(config, model=self.model, training=replace(config.training, **kind, moe_z_loss_coeff=self.z_loss))

    def weights(self) -> DrawnWeights:
        """See Layout."""
        return DrawnWeights(self.model)


FIXED = [
    *(Layout(tp=2, dp=2, sp=True, strategy=strategy, microbatches=2) for strategy in STRATEGIES),
    Layout(pp=2, virtual=2, microbatches=4, schedule="interleaved"),
    Layout(pp=2, virtual=2, microbatches=4, schedule="zb-v", recompute="selective"),
    Layout(tp=4, pp=2, sp=True, microbatches=4, schedule="zb-h1", recompute="full"),
    Layout(tp=2, cp=2),
]
"""The four strategies, virtual stages, and more ranks than key/value heads."""
DIVIDED = [
    *(Layout(dp=4, ep=2, strategy=strategy, microbatches=2) for strategy in STRATEGIES),
    Layout(tp=2, sp=True, dp=2, ep=2, strategy="optim_grads", recompute="selective"),
    Layout(dp=2, ep=2, cp=2, strategy="optim_grads_params", microbatches=2),
    Layout(pp=2, dp=2, ep=2, microbatches=4, schedule="zb-h1", strategy="optim_grads"),
    Layout(pp=2, virtual=2, dp=2, ep=2, microbatches=2, schedule="interleaved", recompute="full"),
    Layout(pp=2, dp=2, ep=2, tp=2, sp=True, microbatches=4, schedule="1f1b", strategy="optim_grads_params"),
    Layout(dp=8, ep=2, shard_size=4, strategy="optim_grads"),
    Layout(dp=4, cp=2, ep=2, shard_size=2, strategy="optim_grads_params", microbatches=2),
    Layout(dp=4, ep=2, strategy="optim_grads", microbatches=2, offload=OffloadConfig(optimizer_offload="exact")),
    Layout(pp=2, dp=2, ep=2, microbatches=4, schedule="zb-h1", offload=OffloadConfig(optimizer_offload="exact", offload_speculative=True)),
]
"""Of experts that ranks divide among them: the four strategies, each other axis, replicas of shards, and optimizers on the host."""
EXCHANGED = [replace(layout, exchange=True) for layout in (DIVIDED[0], *DIVIDED[3:9])]
"""Some of these with tokens that travel only to ranks that have some of their experts."""
DRAWN = 10


def family_layouts(family: str) -> list[FamilyLayout]:
    """The fixed ones, and others of the random layouts for each family."""
    pool = [layout for layout in draw() if layout.layers == SIZES["num_hidden_layers"] and layout.world_size > 1]
    chosen = FIXED + random.Random(family).sample(pool, DRAWN)
    model = TWINS[family].ours
    chosen += [*DIVIDED, *EXCHANGED] if model.num_experts else []
    plain = {"kv_heads": Layout().kv_heads, "tied": False, "documents": False, "steps": STEPS}
    return [FamilyLayout(**(asdict(layout) | plain | {"offload": layout.offload, "family": family})) for layout in chosen]


ROUTED = [
    Layout(tp=2, cp=2, sp=True, cp_comm="ring", microbatches=2, recompute="full"),
    Layout(tp=2, dp=2, ep=2, sp=True, strategy="optim_grads_params", microbatches=2, recompute="selective"),
    Layout(pp=2, dp=2, ep=2, exchange=True, strategy="optim", microbatches=2, schedule="zb-h1"),
    Layout(pp=2, virtual=2, dp=2, strategy="optim_grads", microbatches=2, schedule="zb-v"),
    Layout(tp=2, pp=2, sp=True, microbatches=4, schedule="zb-h1", recompute="full"),
]
"""With losses of routers: each axis, all that is computed again, and gradients that are postponed."""


def routed_layouts(family: str) -> list[FamilyLayout]:
    """Each loss of routers in each of those layouts, for a family with experts. LLaMA 4 has none."""
    model = TWINS[family].ours
    if not model.num_experts or model.moe_router_score_function == "sigmoid":
        return []
    losses = [(balance, 0.0) for balance in ("seq_aux_loss", "global_aux_loss", "hf_aux_loss")] + [("none", Z_LOSS)]
    return [FamilyLayout(**(asdict(one) | {"offload": one.offload, "family": family, "balance": balance, "z_loss": z})) for balance, z in losses for one in ROUTED]


SECONDS = 900.0
"""What one run may take, on a machine that has other work."""


def reference(cluster: Cluster, layout: FamilyLayout) -> Reference:
    """Train what a layout is compared with: one process in fp32 and in fp64, and transformers."""
    alone = layout.reference
    single, exact = (cluster.run(1, train, run, timeout=SECONDS)[0] for run in (alone, replace(alone, fp64=True)))
    return Reference(single, exact, _train_hf(alone))


def _train_hf(alone: FamilyLayout) -> Record | None:
    """None for what transformers has no counterpart of."""
    if alone.documents or alone.lora or alone.freeze:
        return None
    model = TWINS[alone.family].hf_model(pad_token_id=alone.pad)
    return train_routers(model, alone) if alone.balance != "none" or alone.z_loss else train_twin(model, alone)


def train_routers(model: Any, layout: FamilyLayout) -> Record:
    """``train_twin`` with transformers' own loss of routers: called with the logits of one sequence of one block, of one block, or of all
    blocks as its models do."""
    balance, experts, chosen = sys.modules[type(model).__module__].load_balancing_loss_func, layout.model.num_experts, layout.model.num_experts_per_tok
    losses: list[float] = []

    def loss_of(index: int) -> Tensor:
        text = global_samples(layout.first + index)
        out = model(text[:, :-1], output_router_logits=True)
        loss = nn.functional.cross_entropy(out.logits.flatten(0, 1), text[:, 1:].flatten())
        losses.append(loss.item())
        blocks = out.router_logits
        if layout.balance == "hf_aux_loss":
            loss = loss + BALANCE * balance(blocks, experts, chosen)
        elif layout.balance != "none":
            # transformers does not divide by the experts of a token.
            parts = [part for logits in blocks for part in (logits.chunk(len(text)) if layout.balance == "seq_aux_loss" else (logits,))]
            terms = [balance((part,), experts, chosen) / chosen for part in parts]
            loss = loss + BALANCE * torch.stack(terms).sum() * len(blocks) / len(parts)
        return loss + layout.z_loss * torch.stack([logits.logsumexp(-1).square().mean() for logits in blocks]).sum()

    _, norms = torch_twin.train(model, torch_twin.adamw(model.parameters(), OPTIMIZER), lambda index: [loss_of(index)], layout.steps, layout.clip)
    return Record(tuple(losses), tuple(norms))
