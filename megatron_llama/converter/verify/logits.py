"""Computes logits in fp32 of models that need not fit into memory: layer by layer, and the head in
blocks of the vocabulary."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_llama.checkpoint.model_folders.safetensors_file import row_blocks
from megatron_llama.config.schema import ModelConfig
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.model.llama import Stage, StageOptions
from megatron_llama.model.load import load_stages
from megatron_llama.model.nn.functional import rms_norm
from megatron_llama.model.nn.head import soft_capped
from megatron_llama.model.plan.params import SCORE, Partition, has_tied_head, stage_units

TOLERANCE = 1e-4
"""Largest deviation of a logit that rounding can explain."""
_BLOCK = 2**26
"""Number of elements of logits, or of the head, in memory at a time."""
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
NORM = "model.norm.weight"


class Outputs(Protocol):
    """A model that has run up to its head."""

    @property
    def hidden(self) -> Tensor:
        """The input of the head, fp32 [s, h]."""
        ...

    @property
    def cap(self) -> float:
        """The model's final_logit_softcapping."""
        ...

    def head(self, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of the head, fp32."""
        ...


def outputs_of(model: ModelConfig) -> int:
    """Return the number of logits of a token: one for each id, or the score of a reward model."""
    return model.num_labels or model.vocab_size


class StreamedModel:
    """One of our models, run over ``tokens`` [s] with one layer's weights in memory at a time.
    Raises CheckpointError."""

    def __init__(self, model: ModelConfig, source: WeightSource, tokens: Tensor) -> None:
        self._model = model
        self._source = source
        self._mesh = Mesh.single(devices.accelerator(0))
        self.cap = 0.0 if model.num_labels else model.final_logit_softcapping
        with torch.no_grad():
            x = self._embedded(tokens).unsqueeze(1)
            positions = None
            for layer in range(model.num_hidden_layers):
                stage = self._stage(layer)
                positions = positions or stage.positions(len(tokens), self._mesh.device)
                x = stage(x, positions)
                del stage  # only one layer may be in memory: this one goes before the next comes
            norm = self._read(Rectangle(NORM, (model.hidden_size,), (0,), (model.hidden_size,), 0))
            self.hidden = rms_norm(
                x.squeeze(1), norm, model.rms_norm_eps, one_plus=model.apply_layernorm_1p
            )

    def head(self, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of the head, fp32."""
        shape = (outputs_of(self._model), self._model.hidden_size)
        name = EMBEDDING if has_tied_head(self._model) else HEAD
        if self._model.num_labels:
            name = SCORE
        return self._read(Rectangle(name, shape, (start, 0), (stop - start, shape[1]), 0))

    def _read(self, rectangle: Rectangle) -> Tensor:
        out = torch.empty(rectangle.size)
        self._source(rectangle, out)
        return out.to(self._mesh.device)

    def _embedded(self, tokens: Tensor) -> Tensor:
        x = torch.empty(len(tokens), self._model.hidden_size)
        for block in row_blocks(EMBEDDING, (self._model.vocab_size, self._model.hidden_size)):
            rows = torch.empty(block.size)
            local = tokens - block.offset[0]
            self._source(block, rows)
            in_block = (local >= 0) & (local < block.size[0])
            x[in_block] = rows[local[in_block]]
        return (x * self._model.embedding_multiplier).to(self._mesh.device)

    def _stage(self, layer: int) -> Stage:
        """Return a pipeline stage that is this layer alone."""
        layers = self._model.num_hidden_layers
        apart = Partition(
            (range(0), *(range(at, at + 1) for at in range(layers)), range(0)), (0,) * (layers + 2)
        )
        stage = Stage(self._model, self._mesh, StageOptions(), partition=apart, index=layer + 1)
        specs = [
            spec for unit in stage_units(self._model, apart, layer + 1) for spec in unit.params
        ]
        load_stages([stage], specs, self._source, dtype=torch.float32, device=self._mesh.device)
        return stage


@dataclass(frozen=True)
class LogitDeviation:
    """The distance between the logits of two models."""

    largest: float
    spread: float
    """Standard deviation of the logits. If they are all alike, agreement proves nothing."""
    tokens: int

    @property
    def within(self) -> bool:
        """Whether rounding can explain the deviation. It cannot explain a NaN."""
        return self.largest <= TOLERANCE

    def __str__(self) -> str:
        scale = f"tolerance {TOLERANCE:.0e}, spread {self.spread:.3g}"
        return f"largest deviation {self.largest:.2e} over {self.tokens:,} tokens ({scale})"


def _logits(side: Outputs, start: int, stop: int) -> Tensor:
    logits = F.linear(side.hidden, side.head(start, stop)).cpu()
    return soft_capped(logits, side.cap) if side.cap else logits


def logit_deviation(first: Outputs, second: Outputs, outputs: int) -> LogitDeviation:
    """Compare all logits of the same tokens, ``outputs`` of each."""
    length, width = first.hidden.shape
    rows = max(1, _BLOCK // max(length, width))
    largest = torch.zeros((), dtype=torch.float64)
    total = 0.0
    squares = 0.0
    with torch.no_grad():
        for start in range(0, outputs, rows):
            stop = min(start + rows, outputs)
            ours, theirs = (_logits(side, start, stop) for side in (first, second))
            largest = torch.maximum(largest, (ours - theirs).abs().max().double())
            total = total + float(ours.sum(dtype=torch.float64))
            squares = squares + float(ours.double().square().sum())
    count = length * outputs
    return LogitDeviation(
        float(largest), math.sqrt(max(0.0, squares / count - (total / count) ** 2)), length
    )
