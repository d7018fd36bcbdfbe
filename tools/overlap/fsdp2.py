"""torch's FSDP2 in its best configuration, over the same transport as ours: what is left to compare
is the order of events.

Stock FSDP2 cannot overlap anything on gloo. Here its gathers are asynchronous and prefetched
explicitly, its reductions are asynchronous and summed in a thread, and both travel over our
exchanges with buffers that are allocated once. One group per block, as its authors advise, and one
each for the embedding and the head, so that neither holds up the other's half of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import Work
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from megatron_llama.data.loader import Batch
from megatron_llama.engine.comm.exchange import Exchange, Reductions, gather
from megatron_llama.engine.comm.host.threads import ThreadStream
from megatron_llama.engine.comm.streams import Future
from megatron_llama.engine.mesh import Axis
from megatron_llama.launch.mesh import build_mesh
from tools.overlap.contender import Setting, adamw, clip_factor, decayed, wrapped
from tools.overlap.plain import sharding

PREFETCH = 2
"""Groups gathered ahead. With one the link is idle between the use of a group and the next gather
(1.67 instead of 1.52 with resharding at 400mbit); three, or all at once where parameters stay, were
no better."""


class _Waiting(Work):
    """An exchange as FSDP2 knows them."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange

    def wait(self, timeout: object = None) -> bool:
        self._exchange.wait()
        return True


class _Gather(AllGather):
    """The all-gathers of one group."""

    def __init__(self, axis: Axis, index: int) -> None:
        self._axis = axis
        self._index = index
        self._full: Tensor | None = None
        self._exchange: Exchange

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        if self._full is None:
            self._full = torch.empty(*size, dtype=dtype, device=device)
            own = self._full.chunk(self._axis.size)[self._axis.rank]
            self._exchange = gather(self._full, own, self._axis, index=self._index)
        return self._full

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Work | None:
        self._exchange.start()  # FSDP2 has copied the shards to their place in the output
        waiting = _Waiting(self._exchange)
        if not async_op:
            waiting.wait()
        return waiting if async_op else None


class _Reduce(ReduceScatter):
    """The reduce-scatters of one group. FSDP2 does not wait for them: ``finish`` does."""

    def __init__(self, owner: Fsdp2, index: int) -> None:
        self._owner = owner
        self._index = index
        self._buffers: dict[int, Tensor] = {}
        self._exchange: Exchange | None = None
        self._done: Future | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        numel = int(torch.Size(size).numel())  # type: ignore[arg-type]
        if numel not in self._buffers:
            self._buffers[numel] = torch.empty(*size, dtype=dtype, device=device)
        return self._buffers[numel]

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> Work | None:
        if self._exchange is None:
            self._exchange = self._owner.reductions.scatter(
                input_tensor, output_tensor, index=self._index, buffer=self._index
            )
        self._exchange.start()
        self._done = self._owner.stream.run(self._exchange.wait)
        return None

    def finish(self) -> None:
        assert self._done is not None
        self._done.wait()


class Fsdp2:
    """``reshard``: drop the parameters of a block after its forward pass and gather them again for
    backward."""

    def __init__(self, setting: Setting, *, reshard: bool) -> None:
        self._config = sharding(setting)
        self._hosts = setting.hosts
        axes = build_mesh(
            self._config, rank=setting.rank, world_size=setting.hosts, device=torch.device("cpu")
        )
        self._model = wrapped(setting, self._config)
        groups = self._model.groups
        largest = max(
            sum(p.numel() for module in group for p in module.parameters()) for group in groups
        )
        self.stream = ThreadStream()
        self.reductions = Reductions(
            axes.dp,
            largest=largest,
            dtype=torch.float32,
            wire=None,
            device=torch.device("cpu"),
            in_flight=len(groups),
        )
        self._reduces = [_Reduce(self, index) for index in range(len(groups))]
        self._groups = [
            self._shard(group, index, axes.dp_gather, reshard) for index, group in enumerate(groups)
        ]
        fully_shard(self._model, mesh=init_device_mesh("cpu", (setting.hosts,)))
        self._prefetch()
        self._shards: list[tuple[Any, nn.Parameter]] = []

    def _shard(self, group: list[nn.Module], index: int, axis: Axis, reshard: bool) -> FSDPModule:
        # The last block and the head are used again at once; gathering them again would only delay
        # backward.
        again = reshard and index < len(self._model.groups) - 2
        fully_shard(
            group, mesh=init_device_mesh("cpu", (self._hosts,)), reshard_after_forward=again
        )
        sharded = group[0]  # modules of one group share their state
        assert isinstance(sharded, FSDPModule)
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(1.0)  # the loss is divided instead
        sharded.set_custom_all_gather(_Gather(axis, index))
        sharded.set_custom_reduce_scatter(self._reduces[index])
        return sharded

    def _prefetch(self) -> None:
        self._model._set_unshard_async_op(True)  # type: ignore[operator]
        self._groups[0].set_unshard_in_backward(False)
        for index, group in enumerate(self._groups):
            group.set_modules_to_forward_prefetch(self._groups[index + 1 : index + 1 + PREFETCH])
            group.set_modules_to_backward_prefetch(
                self._groups[max(1, index - PREFETCH) : index][::-1]
            )

    def begin(self) -> None:
        """See Contender."""

    def step(self, batch: Batch) -> Tensor:
        """See Contender."""
        for group in self._groups[: 1 + PREFETCH]:
            group.unshard(async_op=True)
        loss: Tensor = self._model(batch.tokens, batch.labels)
        (loss / self._hosts).backward()  # type: ignore[no-untyped-call]
        for reduce in self._reduces:
            reduce.finish()
        self._update()
        return loss.detach()

    def _update(self) -> None:
        """On local tensors: the same arithmetic as on DTensors without their cost."""
        if not self._shards:
            # Only now: FSDP2 may replace its local tensors in its first forward pass.
            parameters: list[Any] = list(self._model.parameters())
            self._shards = [(p, nn.Parameter(p._local_tensor)) for p in parameters]
            decay = ((shard, shard.dim() > 1) for _, shard in self._shards)
            self._adamw = adamw(decayed(decay, self._config), self._config)
        for parameter, shard in self._shards:
            shard.grad = parameter.grad._local_tensor
            parameter.grad = None
        grads = [shard.grad for _, shard in self._shards if shard.grad is not None]
        square = torch.stack(torch._foreach_norm(grads)).square().sum()
        dist.all_reduce(square)
        torch._foreach_mul_(grads, clip_factor(square, self._config.optimizer.clip_grad))
        self._adamw.step()

    def drain(self) -> None:
        """See Contender."""

    def payload_bytes(self) -> None:
        """See Contender."""
