"""torch's DistributedDataParallel, with buckets of one layer, and with its sharded optimizer."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from megatron_llama.data.loader import Batch
from tools.overlap.contender import Setting, adamw, decayed, wrapped
from tools.overlap.plain import sharding


class Ddp:
    """``zero``: every rank updates some parameters and broadcasts them."""

    def __init__(self, setting: Setting, *, zero: bool) -> None:
        config = sharding(setting)
        model = wrapped(setting, config)
        block = sum(p.numel() * p.element_size() for p in model.blocks[0].parameters())
        # The default of 25 MB would make one bucket of the whole model: nothing could overlap.
        self._model = DistributedDataParallel(
            model,
            bucket_cap_mb=block / 2**20,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
            process_group=dist.new_group(),
        )
        groups = decayed(((p, p.dim() > 1) for p in model.parameters()), config)
        o = config.optimizer
        self._optimizer: torch.optim.Optimizer = (
            ZeroRedundancyOptimizer(
                groups,
                torch.optim.AdamW,
                process_group=dist.new_group(),
                parameters_as_bucket_view=True,
                lr=o.lr,
                betas=(o.adam_beta1, o.adam_beta2),
                eps=o.adam_eps,
                fused=True,
            )
            if zero
            else adamw(groups, config)
        )
        self._clip = o.clip_grad

    def begin(self) -> None:
        """See Contender."""

    def step(self, batch: Batch) -> Tensor:
        """See Contender."""
        loss: Tensor = self._model(batch.tokens, batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def drain(self) -> None:
        """See Contender."""

    def payload_bytes(self) -> None:
        """See Contender."""
