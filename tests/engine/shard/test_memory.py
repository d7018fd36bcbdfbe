"""What is alive after ``shard``: what the plan of the engine says, to the byte, whoever still holds what the call was given."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection
from typing import Any

import megatron_llama as ml
import pytest
import torch
from megatron_llama.engine.plan.memory import host_buffer_bytes, state_bytes
from megatron_llama.engine.shard.shard_options import ShardOptions
from megatron_llama.launch.launcher import Place
from torch import Tensor, nn

from tests.harness import Cluster

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
WIDTH = 128
NUMBERS = 64
"""Smaller memory than this, in bytes, is that of numbers: of a norm, a scale, the ranks of a mesh."""


class Block(nn.Module):
    """A unit with a matrix, a vector and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("ramp", torch.linspace(0.0, 1.0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)) * self.ramp


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), *(Block() for _ in range(4)))


def grouped(module: nn.Sequential) -> torch.optim.AdamW:
    """Two groups, and a frozen parameter in one of them."""
    module[1].linear.weight.requires_grad_(False)
    return torch.optim.AdamW([{"params": module[0].parameters()}, {"params": module[1:].parameters(), "lr": 1e-2}])


WAYS: dict[str, Callable[[nn.Sequential], Any]] = {
    "ml.AdamW": lambda module: ml.AdamW(),
    "ml.group of names": lambda module: ml.AdamW(groups=[ml.group("*.bias", lr=1e-2)]),
    "ml.group of parameters": lambda module: ml.AdamW(groups=[ml.group(module[0].parameters(), lr=1e-2)]),
    "torch.optim.AdamW": lambda module: torch.optim.AdamW(module.parameters()),
    "torch.optim.AdamW with groups": grouped,
    "schedule-free": lambda module: ml.ScheduleFreeAdamW(),
    "bf16": lambda module: ml.AdamW(betas=(0.9, 0.95), exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16"),
    "8 bits": lambda module: ml.AdamW(exp_avg_dtype="8bit", exp_avg_sq_dtype="8bit"),
    "amsgrad": lambda module: torch.optim.AdamW(module.parameters(), amsgrad=True),
    "Muon": lambda module: ml.Muon(),
    "Muon and 8 bits": lambda module: ml.Muon(exp_avg_dtype="8bit", exp_avg_sq_dtype="8bit"),
    "torch's Muon and AdamW": lambda module: [
        torch.optim.Muon([p for p in module.parameters() if p.dim() == 2]),
        torch.optim.AdamW([p for p in module.parameters() if p.dim() < 2]),
    ],
    "SGD": lambda module: torch.optim.SGD(module.parameters()),
    "SGD with momentum in a group": lambda module: torch.optim.SGD(
        [{"params": module[0].parameters()}, {"params": module[1:].parameters(), "momentum": 0.9, "dampening": 0.1}]
    ),
    "Adagrad": lambda module: torch.optim.Adagrad(module.parameters()),
}


def alive() -> dict[int, Tensor]:
    """The tensors of this process, one for each memory, by its address."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    return {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors if tensor.untyped_storage().nbytes() >= NUMBERS}


def live_bytes(before: Collection[int], planned: int) -> int:
    """The bytes of what is alive and was not before. A thread of gloo lets go of a message's tensor after it has said that the message is
    there: what is more than planned may last for as long as that thread gets no processor."""
    deadline = time.monotonic() + 20.0
    while True:
        live = sum(tensor.untyped_storage().nbytes() for address, tensor in alive().items() if address not in before)
        if live <= planned or time.monotonic() > deadline:
            return live


def live_and_planned(place: Place, way: str, strategy: str, unused: str | None = None) -> list[tuple[int, int]]:
    """After ``shard`` and after two steps, with the optimizer that was given still in a variable. ``unused``: and a bias is frozen in the second."""
    before = alive()
    module = model()
    given = WAYS[way](module)
    options: dict[str, Any] = {"strategy": strategy, "clip": 1.0, "unused": unused}
    engine = ml.shard(module, units=[Block], optimizer=given, **options)
    plan = engine._engine.bucket_plan
    defaults = ShardOptions(
        **{"microbatches": 1, "param_slots": 2, "grad_slots": 2, "shard_size": 0, "bucket_size": 0, "dtype": None, "reduce_dtype": None},
        **{"optimizer_offload": "none", "reduction": "mean", "static_order": True, "find_unused": unused is not None, "ignored_values": "rank0", "buffers": "own", "loss_scaling": None, "offload_options": {}},
        **options,
    )
    engine_options = defaults.for_engine(torch.float32, engine.optimizer.made, ranks=place.world_size)
    planned = sum(size for name, size in state_bytes(engine_options, plan).items() if name != "scalars") + host_buffer_bytes(engine_options, plan, dp=place.world_size)
    planned += sum(buffer.nbytes for buffer in module.buffers())
    counts = []
    for steps in range(3):
        if steps:
            module[2].linear.bias.requires_grad_(unused is None or steps == 1)
            module(torch.ones(2, WIDTH)).square().mean().backward()
            engine.step()
        engine._engine.settle()  # gathers and updates under way have memory of their own
        counts.append((live_bytes(before, planned), planned))
    engine.close()
    assert given is not None
    return counts


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_is_alive_but_what_the_plan_counts(strategy: str, cluster: Cluster) -> None:
    for way in WAYS:
        for counts in cluster.run(2, live_and_planned, way, strategy):
            assert all(live == planned for live, planned in counts), (way, counts)


@pytest.mark.parametrize("way", ["ml.AdamW", "8 bits", "SGD with momentum in a group"])
def test_a_part_that_is_left_out_has_the_memory_of_its_bucket(way: str, cluster: Cluster) -> None:
    for counts in cluster.run(2, live_and_planned, way, "optim_grads_params", "skip"):
        assert all(live == planned for live, planned in counts), counts
