"""Those who offload elsewhere, each as its authors say to use it, on the same plain LLaMA. They
need a GPU; nothing of them is imported before they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_llama.config.schema import Config
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.host_memory import free_bytes
from megatron_llama.engine.mesh import Mesh
from tools.compare_sharding import random_batches
from tools.offload.catalogue import Numbers
from tools.offload.ours import Sample
from tools.step.plain import PlainLlama

Work = Callable[[], object]
Built = tuple[Work, Work]
"""What does a step, and what ends it all."""


@dataclass(frozen=True)
class Peer:
    """Another implementation."""

    name: str
    package: str
    host_bytes: int
    """Of host memory that it takes for an element."""
    bound: Callable[[Numbers], float]
    """Seconds of a step at least, in the way it goes about it."""
    build: Callable[[Config, torch.device], Built]


def _zero_offload(n: Numbers) -> float:
    """Gradients leave in fp32 during the last backward pass; Adam is followed by passes that
    unscale and round."""
    return (n.compute - n.backward) + max(n.backward, n.copy(4)) + n.update * 44 / 30 + n.copy(2)


def _zenflow(n: Numbers) -> float:
    """Every microbatch counts as a step, every fourth one has a boundary."""
    cold = 0.9
    window = 4
    part = (
        max(n.compute / n.microbatches, cold * n.copy(2), n.update / window)
        + (n.update * 16 / 30 + n.copy(2)) / window
    )
    return n.microbatches * part


def _serial(n: Numbers) -> float:
    """Updates behind the last backward pass, copies beside them."""
    return n.compute + n.update


def _batches(config: Config, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    for batch in random_batches(config, Mesh.single()):
        yield batch.tokens.t().contiguous().to(device), batch.labels.t().contiguous().to(device)


def _deepspeed(config: Config, device: torch.device, *, zenflow: bool) -> Built:
    import deepspeed  # type: ignore[import-not-found]

    if not dist.is_initialized():
        dist.init_process_group(
            devices.backend(device),
            store=dist.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
        )
    batches = list(_batches(config, device))
    o = config.optimizer
    zero: dict[str, Any] = {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
    }
    if zenflow:
        block = {
            "topk_ratio": 0.1,
            "select_strategy": "step",
            "select_interval": 1000,
            "update_interval": 4,
        }
        zero["zenflow"] = block | {"full_warm_up_rounds": 0, "overlap_step": True}
    numbers = {
        "lr": o.lr,
        "betas": [o.adam_beta1, o.adam_beta2],
        "eps": o.adam_eps,
        "weight_decay": o.weight_decay,
    }
    options = {
        "train_micro_batch_size_per_gpu": config.training.micro_batch_size,
        "gradient_accumulation_steps": len(batches),
        "gradient_clipping": o.clip_grad,
        "bf16": {"enabled": config.training.bf16},
        "optimizer": {"type": "AdamW", "params": numbers},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }
    model = PlainLlama(config.model)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=options
    )

    def step() -> None:
        for tokens, labels in batches:
            engine.backward(engine(tokens, labels))
            engine.step()

    return step, engine.destroy


def _nothing() -> None:
    """Nothing to end."""


def _torchao(config: Config, device: torch.device) -> Built:
    from torchao.optim import CPUOffloadOptimizer  # type: ignore[import-not-found]

    model = PlainLlama(config.model).to(
        device, torch.bfloat16 if config.training.bf16 else torch.float32
    )
    o = config.optimizer
    batches = list(_batches(config, device))
    numbers = {
        "lr": o.lr,
        "betas": (o.adam_beta1, o.adam_beta2),
        "eps": o.adam_eps,
        "weight_decay": o.weight_decay,
    }
    optimizer = CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients=False, fused=True, **numbers
    )
    return partial(_plain_step, model, optimizer, batches), _nothing


def _plain_step(model: nn.Module, optimizer: Any, batches: list[tuple[Tensor, Tensor]]) -> None:
    for tokens, labels in batches:
        (model(tokens, labels) / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


PEERS = (
    Peer(
        "DeepSpeed ZeRO-Offload", "deepspeed", 18, _zero_offload, partial(_deepspeed, zenflow=False)
    ),
    Peer("DeepSpeed ZenFlow", "deepspeed", 36, _zenflow, partial(_deepspeed, zenflow=True)),
    Peer("torchao CPUOffloadOptimizer", "torchao", 8, _serial, _torchao),
)
"""torchao's keeps bf16 states where parameters are bf16, and clips nothing."""


def obstacle(peer: Peer, device: torch.device, elements: int) -> str | None:
    """Why it cannot take part; None: it can."""
    if find_spec(peer.package) is None:
        return f"{peer.package} is not installed"
    if devices.is_host(device):
        return "needs a GPU"
    free = free_bytes()
    needed = peer.host_bytes * elements
    return (
        f"needs {needed / 1e9:.0f} GB of host memory, {free / 1e9:.0f} GB are free"
        if needed > free
        else None
    )


class Other:
    """A peer, built."""

    def __init__(self, peer: Peer, config: Config, device: torch.device) -> None:
        self._device = device
        self._step, self._end = peer.build(config, device)

    def steps(self, count: int) -> Sample:
        """See Ours. Where it waits it does not say."""
        begin = devices.timed_event(self._device)
        for _ in range(count):
            self._step()
        end = devices.timed_event(self._device)
        devices.synchronize(self._device)
        return Sample(begin.elapsed_time(end) / 1e3 / count)

    def close(self) -> None:
        """See Ours."""
        self._end()
