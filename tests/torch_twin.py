"""Training by transformers' models, torch's optimizers and nothing else: what every other training is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from megatron_llama.config.schema import ModelConfig, OptimizerConfig
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.model.init import InitialWeights
from megatron_llama.model.plan.params import hf_shapes
from torch import Tensor, nn


def drawn(source: WeightSource, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """A whole tensor with the values that a source of weights has for it."""
    values = torch.full(shape, torch.nan, dtype=dtype)
    source(Rectangle(name, shape, (0,) * len(shape), shape, 0), values)
    return values


def filled(twin: nn.Module, model: ModelConfig, source: WeightSource, dtype: torch.dtype = torch.float32) -> nn.Module:
    """transformers' model with the values of a source of weights."""
    twin = twin.to(dtype)
    weights = {name: drawn(source, name, shape, dtype) for name, shape in hf_shapes(model).items()}
    if model.num_experts:
        weights = stacked_experts(model, weights)
    missing, unexpected = twin.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"} and model.tie_word_embeddings >= bool(missing), (missing, unexpected)
    return twin


MIXTRAL_MATRICES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""Names in Mixtral's files."""


def stacked_experts(model: ModelConfig, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names of files under those of transformers 5's modules: one for all gates and ups of a block, one for all downs."""
    if model.model_type == "llama4_text":
        return _turned(weights)
    kept = {name.replace("block_sparse_moe", "mlp"): weight for name, weight in weights.items()}
    for layer in range(model.num_hidden_layers):
        owner = f"model.layers.{layer}.mlp.experts"
        matrices: dict[str, list[Tensor]] = {name: [] for name in MIXTRAL_MATRICES.values()}
        for name in [name for name in kept if name.startswith(f"{owner}.")]:
            short = name.split(".")[-2]
            matrices[MIXTRAL_MATRICES.get(short, short)].append(kept.pop(name))
        if matrices["down_proj"]:
            kept[f"{owner}.down_proj"] = torch.stack(matrices["down_proj"])
            pairs = zip(matrices["gate_proj"], matrices["up_proj"], strict=True)
            kept[f"{owner}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
    return kept


def _turned(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """LLaMA 4's: of all experts of a block, inputs before outputs."""
    kept = {name: weight for name, weight in weights.items() if ".feed_forward.experts." not in name}
    owners = dict.fromkeys(name.partition(".experts.")[0] for name in weights if ".feed_forward.experts." in name)
    for owner in owners:
        experts = len([name for name in weights if name.startswith(f"{owner}.experts.")]) // 3
        gate, up, down = (
            [weights[f"{owner}.experts.{expert}.{name}.weight"].t() for expert in range(experts)] for name in MIXTRAL_MATRICES.values()
        )
        kept[f"{owner}.experts.gate_up_proj"] = torch.stack([torch.cat(pair, 1) for pair in zip(gate, up, strict=True)])
        kept[f"{owner}.experts.down_proj"] = torch.stack(down)
    return kept


def hf_model(model: ModelConfig, dtype: torch.dtype = torch.float32) -> nn.Module:
    """transformers' LlamaForCausalLM with the initial weights; of a reward model its LlamaForSequenceClassification."""
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    names = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"]
    names += ["head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "pad_token_id"]
    options: dict[str, Any] = {name: getattr(model, name) for name in names}
    options["rope_parameters"] = {"rope_type": "default", **(model.rope_scaling or {}), "rope_theta": model.rope_theta}
    options |= {"attn_implementation": "sdpa", **({"num_labels": model.num_labels} if model.num_labels else {})}
    twin = (LlamaForSequenceClassification if model.num_labels else LlamaForCausalLM)(LlamaConfig(**options))
    return filled(twin, model, InitialWeights(1234, model.initializer_range), dtype)


def by_decay(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Groups of what is trained: with weight decay what has two or more dims, and the rest without."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [[parameter for parameter in trained if (parameter.dim() > 1) is decays] for decays in (True, False)]
    return [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (weight_decay, 0.0), strict=True) if group]


def adamw(parameters: Iterable[nn.Parameter], options: OptimizerConfig) -> torch.optim.AdamW:
    """torch's, as our options say."""
    betas = (options.adam_beta1, options.adam_beta2)
    return torch.optim.AdamW(by_decay(parameters, options.weight_decay), lr=options.lr, betas=betas, eps=options.adam_eps)


def next_token_loss(model: nn.Module, text: Tensor) -> Tensor:
    """The mean over all tokens of ``text``, [b, s + 1], but the first of each row."""
    logits = model(text[:, :-1]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    losses_of: Callable[[int], Iterable[Tensor]],
    steps: int,
    clip: float,
    after_step: Callable[[int], object] = lambda step: None,
) -> tuple[list[float], list[float]]:
    """The losses of all backward passes, and the norms of all steps before clipping. ``losses_of``: of the microbatches of a step, each of
    which goes backward before the next is asked for. ``clip``: 0 for none."""
    losses, norms = [], []
    for step in range(steps):
        for loss in losses_of(step):
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
        # With no bound the gradients are multiplied by one.
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip or torch.inf).item())
        optimizer.step()
        optimizer.zero_grad()
        after_step(step)
    return losses, norms


def follow(
    parameters: Mapping[str, nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
    gradients: Iterable[Mapping[str, Tensor]],
    clip: float,
) -> None:
    """Take steps with gradients that are given."""
    for step in gradients:
        # As clip_grad_norm_, with the engine's factor, which is in fp32: in fp64 an element of thousands would be rounded to another bf16.
        norm = nn.utils.get_total_norm(step.values())
        scale = ((norm + 1e-6) / clip).clamp(min=1.0).to(torch.float32) if clip else 1.0
        for name, parameter in parameters.items():
            parameter.grad = step[name] / scale
        for optimizer in optimizers:
            optimizer.step()
