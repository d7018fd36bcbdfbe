"""What the measurement asks of a contender, and what contenders share: the model, its optimizer, a
batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn

from megatron_llama.config.schema import Config
from megatron_llama.data.loader import Batch
from megatron_llama.engine.mesh import Mesh
from megatron_llama.model.init import InitialWeights
from megatron_llama.model.llama import Stage, build_stages
from megatron_llama.model.load import load_stages, rank_specs
from megatron_llama.model.nn.functional import Residual
from megatron_llama.model.nn.linear import column_linear
from megatron_llama.model.positions import Positions
from tools.overlap.loss import token_losses
from tools.overlap.waits import Clock, install

if TYPE_CHECKING:
    from tools.overlap.user import UserModel

SEED = 1234


class Contender(Protocol):
    """One kind of data-parallel training. ``begin``, some steps, ``drain``; then again."""

    def begin(self) -> None:
        """Steps follow. What an update would have left behind is sent now: shards that have to be
        gathered."""

    def step(self, batch: Batch) -> Tensor:
        """Forward, backward, update. Returns the loss, 0-dim, of this rank's batch or of all."""

    def drain(self) -> None:
        """Wait for everything in flight."""

    def payload_bytes(self) -> float | None:
        """Bytes of parameters and gradients sent so far, as recorded; None: not recorded."""


@dataclass(frozen=True)
class Setting:
    """What all contenders of a run have in common."""

    rank: int
    hosts: int
    clock: Clock
    hf: bool = False
    """Whether the module that is wrapped is Hugging Face's instead of ours."""
    experts: int = 0
    """Experts of a block; 0: it has an MLP."""


class Head(nn.Module):
    """The final norm and the output head as one module: FSDP2 wraps modules."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.norm = stage.model.norm
        self.weight = cast(nn.Parameter, stage.head_weight)
        self.tp = stage.mesh.tp

    def forward(self, residual: Residual) -> Tensor:
        """[s, b, h] -> logits [s, b, padded_vocab]."""
        normed = self.norm(*residual)[1]
        return column_linear(normed, self.weight, self.tp, sequence_parallel=False)


class Model(nn.Module):
    """The layers of a Stage of one process, with the loss, for those who wrap modules: embedding,
    blocks, head."""

    def __init__(self, config: Config, clock: Clock) -> None:
        super().__init__()
        mesh = Mesh.single()
        stages = build_stages(config, mesh)
        weights = InitialWeights(SEED, config.model.initializer_range)
        load_stages(
            stages.values(),
            rank_specs(config, mesh),
            weights,
            dtype=torch.float32,
            device=mesh.device,
        )
        stage = stages[0]
        self._stage = (stage,)  # in a tuple: its parameters are those of the modules below
        self.embedding = cast(nn.Module, stage.model.embed_tokens)
        self.blocks = nn.ModuleList(stage.model.layers.values())
        self.head = Head(stage)
        self.requires_grad_(True)
        install([(f"blocks.{index}", block) for index, block in enumerate(self.blocks)], clock)

    @property
    def groups(self) -> list[list[nn.Module]]:
        """What is sharded together, in forward order."""
        return [[self.embedding], *([block] for block in self.blocks), [self.head]]

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of ids [s, b], 0-dim."""
        positions: Positions = self._stage[0].positions(tokens.shape[0], tokens.device)
        residual = Residual(self.embedding(tokens))
        for block in self.blocks:
            residual = block(residual, positions)
        head = self._stage[0]
        return token_losses(
            self.head(residual), labels, head.mesh.tp, head.config.vocab_size
        ).mean()


def wrapped(setting: Setting, config: Config) -> Model | UserModel:
    """The module that a peer wraps."""
    if not setting.hf:
        return Model(config, setting.clock)
    from tools.overlap.user import UserModel  # transformers are needed for these contenders only

    return UserModel(config, setting.clock)


def decayed(tensors: Iterable[tuple[Tensor, bool]], config: Config) -> list[dict[str, object]]:
    """Parameter groups for torch's AdamW. Of each tensor: whether weights decay."""
    pairs = list(tensors)
    groups = (
        (config.optimizer.weight_decay, [t for t, decay in pairs if decay]),
        (0.0, [t for t, decay in pairs if not decay]),
    )
    return [{"params": tensors, "weight_decay": rate} for rate, tensors in groups if tensors]


def adamw(groups: Sequence[dict[str, object]], config: Config) -> torch.optim.AdamW:
    """With the numbers of the configuration."""
    o = config.optimizer
    return torch.optim.AdamW(
        groups, lr=o.lr, betas=(o.adam_beta1, o.adam_beta2), eps=o.adam_eps, fused=True
    )


def clip_factor(squared_norm: Tensor, clip: float) -> Tensor:
    """By which gradients of this squared norm are multiplied, 0-dim."""
    return (clip / (squared_norm.sqrt() + 1e-6)).clamp(max=1.0)
