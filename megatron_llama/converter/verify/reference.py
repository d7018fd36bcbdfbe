"""HuggingFace's own implementation as a reference, if it is installed: it reads configuration and
weights of a folder by itself."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_llama.config.schema import ModelConfig
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.engine.plan.memory import sized
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.model.families import FAMILIES
from megatron_llama.model.plan.params import parameter_count


def obstacle(model: ModelConfig) -> str | None:
    """Return the reason why the reference cannot run here, or None if it can."""
    if find_spec("transformers") is None:
        return "transformers is not installed"
    needed = 4 * parameter_count(model)
    available = devices.memory_bytes(devices.accelerator(0)) // 2
    if needed > available:
        half = f"half of the device's memory is {sized(available)}"
        return f"it needs {sized(needed)} for the weights, {half}"
    return None


class TransformersModel:
    """The family's class with the weights of a folder, in fp32."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        import transformers
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        family = FAMILIES[config.model_type]
        name = family.classifier if config.num_labels else family.architecture
        architecture = getattr(transformers, name)
        # transformers' fused kernels leave out a cap on scores.
        kernels = {"attn_implementation": "eager"} if config.attn_logit_softcapping else {}
        # In the dtype of the files Gemma's factor of the embedding would be rounded to it, and stay
        # rounded. torch_dtype is the name that both transformers 4 and 5 understand.
        model: Any = architecture.from_pretrained(folder, torch_dtype=torch.float32, **kernels)
        self.cap = 0.0 if config.num_labels else config.final_logit_softcapping
        self._config = config
        self._head = "score" if config.num_labels else "lm_head"
        self._device = devices.accelerator(0)
        self._model = model.float().to(self._device).eval()

    def fill(self, source: WeightSource) -> None:
        """Replace the weights by those of a source."""
        if self._config.num_experts:
            from megatron_llama.checkpoint.model_folders.hf import stacked_experts

            source = stacked_experts.StackedExperts(source, self._config)
        for name, weight in self._model.named_parameters():
            shape = tuple(weight.shape)
            source(Rectangle(name, shape, (0,) * len(shape), shape, 0), weight.data)

    def run(self, tokens: Tensor) -> None:
        """Run the model over tokens [s] up to the head."""
        with torch.no_grad():
            output = self._model.model(tokens.unsqueeze(0).to(self._device), use_cache=False)
        self.hidden: Tensor = output.last_hidden_state[0]

    def head(self, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of the head, fp32."""
        rows: Tensor = getattr(self._model, self._head).weight.detach()[start:stop]
        return rows
