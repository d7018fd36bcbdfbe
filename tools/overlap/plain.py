"""No communication at all, and communication after the computation."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_llama.config.schema import Config
from megatron_llama.data.loader import Batch
from megatron_llama.engine.comm.exchange import Reductions, gather
from megatron_llama.launch.mesh import build_mesh
from tools.overlap.catalogue import MODES, configuration
from tools.overlap.contender import Setting, adamw, clip_factor, decayed, wrapped

ALIGN = 64


def sharding(setting: Setting) -> Config:
    """What peers take from our configuration: the shape of the model, the optimizer, and axes with
    communicators."""
    return configuration(MODES[0], setting.hosts, setting.experts)


class Shards:
    """This rank's part of all parameters, and its optimizer, as flat tensors: one of matrices,
    which decay, one of norms."""

    def __init__(self, model: nn.Module, setting: Setting, config: Config) -> None:
        self.full: list[tuple[Tensor, Tensor]] = []
        """(parameters, gradients), padded to equal shards."""
        self.shards: list[nn.Parameter] = []
        self.clip = config.optimizer.clip_grad
        kinds = [
            [p for p in model.parameters() if (p.dim() > 1) is matrix] for matrix in (True, False)
        ]
        for parameters in kinds:
            weights, grads = _flatten(parameters, setting.hosts)
            own = slice(
                setting.rank * weights.numel() // setting.hosts,
                (setting.rank + 1) * weights.numel() // setting.hosts,
            )
            shard = nn.Parameter(weights[own])
            shard.grad = grads[own]
            self.full.append((weights, grads))
            self.shards.append(shard)
        self._adamw = adamw(decayed(zip(self.shards, (True, False), strict=True), config), config)

    def squared_norm(self) -> Tensor:
        """Of this rank's part of the gradient, 0-dim."""
        return (
            torch.stack(
                [torch.linalg.vector_norm(s.grad) for s in self.shards if s.grad is not None]
            )
            .square()
            .sum()
        )

    def update(self, squared_norm: Tensor) -> None:
        """Clip and step."""
        factor = clip_factor(squared_norm, self.clip)
        for shard in self.shards:
            assert shard.grad is not None
            shard.grad.mul_(factor)
        self._adamw.step()

    def zero(self) -> None:
        """Autograd adds to what is there."""
        for _, grads in self.full:
            grads.zero_()


def _flatten(parameters: list[nn.Parameter], hosts: int) -> tuple[Tensor, Tensor]:
    """Make parameters and their gradients views of two flat tensors."""
    numel = sum(p.numel() for p in parameters)
    weights, grads = (torch.zeros(-(-numel // (hosts * ALIGN)) * hosts * ALIGN) for _ in range(2))
    at = 0
    for parameter in parameters:
        place = slice(at, at + parameter.numel())
        weights[place].copy_(parameter.detach().view(-1))
        parameter.data = weights[place].view_as(parameter)
        parameter.grad = grads[place].view_as(parameter)
        at += parameter.numel()
    return weights, grads


class Compute:
    """The same model and waits; every rank updates its share with its own gradients, and nobody
    learns of it."""

    def __init__(self, setting: Setting) -> None:
        config = sharding(setting)
        self._model = wrapped(setting, config)
        self._shards = Shards(self._model, setting, config)

    def begin(self) -> None:
        """See Contender."""

    def step(self, batch: Batch) -> Tensor:
        """See Contender."""
        self._shards.zero()
        loss: Tensor = self._model(batch.tokens, batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self._shards.update(self._shards.squared_norm())
        return loss.detach()

    def drain(self) -> None:
        """See Contender."""

    def payload_bytes(self) -> None:
        """See Contender."""


class Serial:
    """What Megatron's distributed optimizer did before it overlapped: the whole backward pass, then
    one reduce-scatter of everything, the norm, the update, one all-gather. Over our transport."""

    def __init__(self, setting: Setting) -> None:
        config = sharding(setting)
        axis = build_mesh(
            config, rank=setting.rank, world_size=setting.hosts, device=torch.device("cpu")
        ).dp
        self._model = wrapped(setting, config)
        self._shards = shards = Shards(self._model, setting, config)
        largest = max(grads.numel() for _, grads in shards.full)
        reductions = Reductions(
            axis,
            largest=largest,
            dtype=torch.float32,
            wire=None,
            device=torch.device("cpu"),
            in_flight=2,
        )
        pairs = list(zip(shards.full, shards.shards, strict=True))
        self._reductions = [
            reductions.scatter(full[1], _grad(shard), index=i, buffer=i)
            for i, (full, shard) in enumerate(pairs)
        ]
        self._gathers = [
            gather(full[0], shard.data, axis, index=2 + i) for i, (full, shard) in enumerate(pairs)
        ]
        self._hosts = setting.hosts

    def begin(self) -> None:
        """See Contender."""

    def step(self, batch: Batch) -> Tensor:
        """See Contender."""
        self._shards.zero()
        loss: Tensor = self._model(batch.tokens, batch.labels)
        (loss / self._hosts).backward()  # type: ignore[no-untyped-call]
        for exchange in self._reductions:
            exchange.start()
        for exchange in self._reductions:
            exchange.wait()
        square = self._shards.squared_norm()
        dist.all_reduce(square)
        self._shards.update(square)
        for exchange in self._gathers:
            exchange.start()
        for exchange in self._gathers:
            exchange.wait()
        return loss.detach()

    def drain(self) -> None:
        """See Contender."""

    def payload_bytes(self) -> None:
        """See Contender."""


def _grad(shard: nn.Parameter) -> Tensor:
    assert shard.grad is not None
    return shard.grad
