"""Context parallelism on the emulated cluster: how long attention takes in each ``--cp-comm-type``
beyond its computation, and what it sends.

One step is the forward and the backward passes of LAYERS attention layers between their products,
with the sequence over all hosts. Kernels are timed waits in proportion to their scores, as long in
every type; forward they take together as long as the gather of all keys and values of the model
that has one for each query head. What is really computed counts as part of the time.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_llama.config.schema import Config, ModelConfig, ParallelConfig
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.model import llama
from megatron_llama.model.llama import Attention, StageOptions
from megatron_llama.model.nn import attention, context
from megatron_llama.model.nn.context import local_sequence
from megatron_llama.model.positions import Positions
from tools.overlap.job import bits_per_second
from tools.overlap.measure import go_first, sent_bytes
from tools.overlap.waits import Clock

HEADS, DIM, LENGTH, LAYERS = 8, 64, 1024, 4
BACKWARD = 2.5
"""Work of a backward pass of attention, in forward passes."""
SHAPES = (8, 2)
"""Key/value heads."""
WHOLE = "all_gather at once"
"""Keys and values of all heads in one message."""
TYPES = ("all_gather", WHOLE, "ring", "a2a", "a2a+p2p")
COMPUTE = "compute"


@dataclass(frozen=True)
class ContextJob:
    """One run."""

    hosts: int
    rate: str
    rounds: int
    json: str | None

    @property
    def forward_seconds(self) -> float:
        """Seconds of the kernels of one layer's forward pass on one host."""
        elements = 2 * LENGTH // self.hosts * HEADS * DIM * (self.hosts - 1)
        return elements * 4 * 8 / bits_per_second(self.rate)


class Kernels:
    """Kernels of pieces, which take a time for each score."""

    def __init__(self, job: ContextJob) -> None:
        scores = LENGTH**2 / 2 * HEADS / job.hosts
        self.clock = Clock()
        self._seconds = job.forward_seconds / scores

    def forward(self, query: Tensor, key: Tensor, *others: Tensor, **options: Any) -> Any:
        """Compute ``attention.attend`` in its time."""
        result = _attend(query, key, *others, **options)
        self._wait(query, key, 1.0, **options)
        return result

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, *others: Tensor, **options: Any
    ) -> Any:
        """Compute ``attention.attend_backward`` in its time."""
        result = _attend_backward(grad, query, key, *others, **options)
        self._wait(query, key, BACKWARD, **options)
        return result

    def _wait(self, query: Tensor, key: Tensor, passes: float, **options: Any) -> None:
        scores = query.shape[1] * query.shape[2] * key.shape[2]
        self.wait(passes * scores * (0.5 if options.get("causal") else 1.0))

    def wait(self, scores: float) -> None:
        """Wait for the rest of the time of so many scores."""
        self.clock.end()
        self.clock.forward_seconds = scores * self._seconds
        self.clock.wait_forward()
        self.clock.begin()


_attend = attention.attend
_attend_backward = attention.attend_backward


class _Whole(torch.autograd.Function):
    """Attention of whole sequences by the kernels of pieces."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads = [tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)]
        out, lse = attention.attend(heads[0], heads[1], heads[2], causal=True)
        ctx.save_for_backward(*heads, out, lse)
        return out.permute(2, 0, 1, 3).flatten(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        query, *others = ctx.saved_tensors
        grad = grad.unflatten(2, (query.shape[1], -1)).permute(1, 2, 0, 3)  # type: ignore[no-untyped-call]
        grads = attention.attend_backward(grad, query, *others, causal=True)
        return tuple(one.permute(2, 0, 1, 3) for one in grads)


def whole(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Compute ``sliding_attention`` without a window."""
    out: Tensor = _Whole.apply(query, key, value)  # type: ignore[no-untyped-call]
    return out


def contender(job: ContextJob, kind: str, keys: int, rank: int) -> Callable[[], float]:
    """Return a function that takes a step and returns a sum of its gradients."""
    sizes = (2, job.hosts // 2) if kind == "a2a+p2p" else ()
    parallel = ParallelConfig(
        context_parallel_size=job.hosts,
        cp_comm_type=kind.split()[0],  # type: ignore[arg-type]
        hierarchical_context_parallel_sizes=sizes,
    )
    model = ModelConfig(
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=keys,
        head_dim=DIM,
        num_hidden_layers=1,
    )
    config = Config(model=model, parallel=parallel)
    mesh = build_mesh(config, rank=rank, world_size=job.hosts, device=torch.device("cpu"))
    options = replace(StageOptions.of(parallel), attention_backend="auto")
    with torch.device("meta"):
        layer = Attention(model, mesh, options)
    generator = torch.Generator().manual_seed(keys)
    width = (HEADS + 2 * keys) * DIM
    sequence = local_sequence(torch.randn(LENGTH, 1, width, generator=generator), mesh.cp)
    turn = torch.ones(len(sequence), 1, 1, DIM // 2)
    positions = Positions(turn, torch.zeros_like(turn))

    def step() -> float:
        x = sequence.clone().requires_grad_()
        total = torch.zeros(())
        for _ in range(LAYERS):
            out = layer.attend(x * 1.0, positions)
            total = total + out.square().sum()
            (grad,) = torch.autograd.grad(out.square().sum(), x)
        return float(grad.square().sum())

    return step


def measure(job: ContextJob, rank: int) -> dict[tuple[str, int], list[tuple[float, float, float]]]:
    """Return (seconds, bytes sent, sum of squared gradients) of each type and shape in each
    round."""
    kernels = Kernels(job)
    steps = {
        (kind, keys): contender(job, kind, keys, rank)
        for kind in TYPES
        for keys in SHAPES
        if kind != "a2a+p2p" or job.hosts >= 4
    }

    def alone() -> float:
        for _ in range(LAYERS):
            for passes in (1.0, BACKWARD):
                kernels.wait(passes * LENGTH**2 / 2 * HEADS / job.hosts)
        return 0.0

    steps[COMPUTE, 0] = alone
    found: dict[tuple[str, int], list[tuple[float, float, float]]] = {name: [] for name in steps}
    dice = random.Random(0)
    with (
        mock.patch.object(attention, "attend", kernels.forward),
        mock.patch.object(attention, "attend_backward", kernels.backward),
        mock.patch.object(llama, "sliding_attention", whole),
    ):
        for round_number in range(job.rounds + 1):
            for name in dice.sample(list(steps), len(steps)):
                dist.barrier()
                kernels.clock.restart()
                sent = sent_bytes()
                most = 1 if name[0] == WHOLE else context.MOST_MESSAGES
                begin = time.perf_counter()
                kernels.clock.begin()
                with mock.patch.object(context, "MOST_MESSAGES", most):
                    total = steps[name]()
                seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
                dist.barrier()
                bytes_sent = torch.tensor(sent_bytes() - sent, dtype=torch.float64)
                gradients = torch.tensor(total, dtype=torch.float64)
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
                dist.all_reduce(bytes_sent)
                dist.all_reduce(gradients)
                if round_number:  # the first opens connections
                    values = (seconds, bytes_sent / job.hosts, gradients)
                    found[name].append((values[0].item(), values[1].item(), values[2].item()))
    return found


def report(job: ContextJob, found: dict[tuple[str, int], list[tuple[float, float, float]]]) -> str:
    """Return a line for each type and shape. Ends the process if the gradients differ."""
    pure = median(seconds for seconds, _, _ in found[COMPUTE, 0])
    lines = [
        f"attention of {LENGTH} tokens over {job.hosts} hosts, {job.rate}, {job.rounds} rounds; "
        f"compute alone {1e3 * pure / LAYERS:.1f} ms a layer",
        f"{'type':<20} {'kv heads':>8} {'step / compute':>24} {'MB sent a layer':>16}",
    ]
    rows = []
    for (kind, keys), samples in found.items():
        ratios = sorted(seconds / pure for seconds, _, _ in samples)
        sent = median(size for _, size, _ in samples) / LAYERS / 1e6
        spread = f"{median(ratios):.3f} ({ratios[0]:.2f} - {ratios[-1]:.2f})"
        lines.append(f"{kind:<20} {keys or '':>8} {spread:>24} {sent:>16.2f}")
        rows.append({"type": kind, "keys": keys, "ratios": ratios, "megabytes": sent})
        first = found[TYPES[0], keys][0][2] if keys else 0.0
        if any(abs(total - first) > 1e-4 * first for _, _, total in samples):
            sys.exit(f"error: {kind} with {keys} key/value heads has other gradients")
    if job.json is not None:
        with open(job.json, "w", encoding="utf-8") as file:
            json.dump({"job": asdict(job), "rows": rows}, file, indent=1)
    return "\n".join(lines)


def main() -> None:
    """Run a job, given as one argument."""
    go_first()
    job = ContextJob(**json.loads(sys.argv[1]))
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = measure(job, rank)
    if rank == 0:
        print(report(job, found), flush=True)
    dist.barrier()  # a rank that leaves takes the others with it
    os._exit(0)


if __name__ == "__main__":
    main()
