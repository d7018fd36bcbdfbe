"""Tensor parallelism on the emulated cluster: a step of some blocks whose matrix products are timed
waits, with whole messages and with messages in pieces (``--tp-comm-overlap``).

Every host is a tensor-parallel rank. All contenders train the same first step with real products;
then products only take their time, so that the cores are free for the transport, and messages carry
what memory holds. Norms, attention and activations are computed, as in ``compute``, which sends
nothing and which every time is divided by.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_llama.config.schema import Config, ModelConfig, ParallelConfig, TrainingConfig
from megatron_llama.engine import host_gemm as gemm
from megatron_llama.engine.comm import autograd, collectives
from megatron_llama.engine.comm.collectives import Pending
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.model.init import InitialWeights
from megatron_llama.model.llama import Stage, build_stages
from megatron_llama.model.load import load_stages, rank_specs
from megatron_llama.model.nn.linear import ColumnLinear, plain_linear
from tools.overlap.bound import FRAME_FACTOR
from tools.overlap.job import bits_per_second
from tools.overlap.measure import go_first
from tools.processor import processor

BLOCKS, SEQUENCE, SAMPLES = 2, 128, 16
STEPS = 2
"""Steps of a contender in one round."""
MESSAGES = 10
"""Messages of a block and step of ours, for which the network needs as long as the products at
``NOMINAL``. The peer, which keeps gathered inputs, sends 8."""
NOMINAL = 400e6
COMPUTE, PEER, WHOLE = "compute", "serial", "whole"
NAMES = (COMPUTE, PEER, WHOLE, "2", "4", "8")
"""``serial``: as torchtitan's tensor parallelism, each message is waited for, and gathered inputs
are kept. ``whole``: ours with --tp-comm-overlap 0; numbers: its values."""
MODEL = ModelConfig(
    vocab_size=256,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=BLOCKS,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=SEQUENCE,
)


@dataclass(frozen=True)
class Job:
    """What the parent tells every rank."""

    hosts: int
    rate: str
    rounds: int
    json: str | None

    def dump(self) -> str:
        """As one command-line argument."""
        return json.dumps(asdict(self))


def configuration(name: str, hosts: int) -> Config:
    """A resolved configuration."""
    pieces = name if name.isdecimal() else "0"
    return Config(
        model=MODEL,
        parallel=ParallelConfig(
            tensor_model_parallel_size=hosts, sequence_parallel=True, tp_comm_overlap=pieces
        ),
        training=TrainingConfig(
            seq_length=SEQUENCE, micro_batch_size=SAMPLES, global_batch_size=SAMPLES, train_iters=1
        ),
    )


def message_seconds(size: int, hosts: int, rate: float) -> float:
    """Seconds that a collective of so many gathered bytes needs at least."""
    return size * (hosts - 1) / hosts * 8 * FRAME_FACTOR / rate


def stream_bytes() -> int:
    """Of the residual stream of all tokens."""
    return SEQUENCE * SAMPLES * MODEL.hidden_size * 4


class Products:
    """Matrix products that take the time of a device, of which each rank has one."""

    def __init__(self, hosts: int) -> None:
        weights = MODEL.hidden_size * (4 * MODEL.hidden_size + 3 * MODEL.intermediate_size)
        block = 3 * 2 * weights * SEQUENCE * SAMPLES / hosts
        whole = MESSAGES * message_seconds(stream_bytes(), hosts, NOMINAL)
        self.seconds = whole / block
        """Of one floating-point operation."""
        self.real = True
        self.log: list[tuple[str, float]] | None = None
        """("product", seconds), ("start", gathered bytes) and ("wait", number of the message), in
        order."""
        self._owed = 0.0

    def take(self, flops: float) -> None:
        """Take the time of a product, less what waits before it took too long."""
        seconds = flops * self.seconds
        if self.log is not None:
            self.log.append(("product", seconds))
        if self.real:
            return
        begin = time.perf_counter()
        if self._owed < seconds:
            time.sleep(seconds - self._owed)
        self._owed = max(0.0, self._owed + time.perf_counter() - begin - seconds)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """A section in which the layers' products are these."""
        linear, mm = gemm.linear, gemm.mm

        def timed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            self.take(2 * x.numel() * len(weight))
            return linear(x, weight) if self.real else x.new_empty(*x.shape[:-1], len(weight))

        def timed_backward(grad: Tensor, weight: Tensor) -> Tensor:
            return timed_linear(grad, weight.t())

        def timed_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
            self.take(2 * x.numel() * len(weight))
            if self.real:
                for target, block in zip(out, x, strict=True):
                    target.copy_(linear(block, weight))

        def timed_mm(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
            self.take(2 * left.numel() * right.shape[1])
            return mm(left, right) if self.real else left.new_empty(len(left), right.shape[1])

        with ExitStack() as stack:
            for name, function in (
                ("linear", timed_linear),
                ("linear_backward", timed_backward),
                ("linear_into", timed_into),
                ("mm", timed_mm),
            ):
                stack.enter_context(mock.patch.object(gemm, name, function))
            yield


@contextmanager
def logged(products: Products, *, silent: bool) -> Iterator[None]:
    """A section in which messages are written down, and with ``silent`` not sent."""

    def instead(issue: Callable[..., Pending], full: int) -> Callable[..., Pending]:
        def call(*tensors: Any, async_op: bool = True) -> Pending:
            number = 0
            if products.log is not None:
                number = sum(what == "start" for what, _ in products.log)
                products.log.append(("start", float(tensors[full].nbytes)))
            pending = Pending(None, None) if silent else issue(*tensors, async_op=async_op)
            finish = pending.finish

            def wait() -> None:
                if products.log is not None:
                    products.log.append(("wait", number))
                if finish is not None:
                    finish()

            pending.finish = wait
            return pending

        return call

    with (
        mock.patch.object(collectives, "all_gather", instead(collectives.all_gather, 0)),
        mock.patch.object(collectives, "reduce_scatter", instead(collectives.reduce_scatter, 1)),
    ):
        yield


def bound(log: Sequence[tuple[str, float]], hosts: int, rate: float, stretch: float) -> float:
    """Return the least seconds of a step with this order of products and messages: one message
    after the other has the link, which is ideal, and products take ``stretch`` times as long."""
    clock = link = 0.0
    arrivals: list[float] = []
    for what, value in log:
        if what == "product":
            clock += value * stretch
        elif what == "start":
            link = max(clock, link) + message_seconds(int(value), hosts, rate)
            arrivals.append(link)
        else:
            clock = max(clock, arrivals[int(value)])
    return clock


class Contender:
    """The blocks of a stage, and a step of them."""

    def __init__(self, name: str, mesh: Mesh, products: Products) -> None:
        self.name = name
        self._products = products
        config = configuration(name, mesh.tp.size)
        stages = build_stages(config, mesh)
        load_stages(
            stages.values(),
            rank_specs(config, mesh),
            InitialWeights(1, 0.05),
            dtype=torch.float32,
            device=mesh.device,
        )
        self._stage: Stage = stages[0]
        self._blocks = nn.ModuleList(self._stage.model.layers.values())
        self._blocks.requires_grad_(True)
        if name == PEER:
            for layer in self._blocks.modules():
                if isinstance(layer, ColumnLinear):
                    layer.forward = _Serial(layer)  # type: ignore[assignment,method-assign]

    def step(self, x: Tensor) -> Tensor:
        """Forward and backward of this rank's part [s / tp, b, h]; the gradient of that."""
        x = x.detach().requires_grad_()
        with logged(self._products, silent=self.name == COMPUTE):
            positions = self._stage.positions(SEQUENCE, x.device)
            out = x
            for block in self._blocks:
                out = block(out, positions)
            torch.autograd.backward([out], [torch.ones_like(out)])
        for parameter in self._blocks.parameters():
            parameter.grad = None
        assert x.grad is not None
        return x.grad


@dataclass(frozen=True)
class _Serial:
    """The forward pass of a column-parallel layer that keeps its gathered input."""

    layer: ColumnLinear

    def __call__(self, x: Tensor) -> Tensor:
        full = autograd.gather_sequence(x, self.layer.tp)
        return plain_linear(full, self.layer.weight, self.layer.tp)


def slowest(seconds: float, axis: Axis) -> float:
    """Of all ranks."""
    most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


def run(job: Job, rank: int) -> None:
    """Check that all contenders compute the same, measure them in turns, and print a table."""
    torch.manual_seed(rank)
    products = Products(job.hosts)
    mesh = build_mesh(
        configuration(WHOLE, job.hosts), rank=rank, world_size=job.hosts, device=torch.device("cpu")
    )
    x = torch.randn(SEQUENCE // job.hosts, SAMPLES, MODEL.hidden_size)
    with products.installed():
        contenders = {name: Contender(name, mesh, products) for name in NAMES}
        grads = {name: contender.step(x) for name, contender in contenders.items()}
        for name in NAMES[2:]:
            torch.testing.assert_close(grads[name], grads[PEER], rtol=1e-4, atol=1e-4)
        logs: dict[str, list[tuple[str, float]]] = {}
        for name, contender in contenders.items():
            products.log = logs[name] = []
            contender.step(x)
        products.log = None
        products.real = False
        samples: dict[str, list[float]] = {name: [] for name in NAMES}
        order = list(NAMES)
        dice = random.Random(0)
        gc.freeze()
        gc.disable()
        for _ in range(job.rounds + 1):
            dice.shuffle(order)
            for name in order:
                gc.collect()
                dist.barrier()
                begin = time.perf_counter()
                for _ in range(STEPS):
                    contenders[name].step(x)
                samples[name].append(slowest(time.perf_counter() - begin, mesh.tp) / STEPS)
    if rank == 0:
        # The first round opens connections.
        report(job, {name: seconds[1:] for name, seconds in samples.items()}, logs)


def report(
    job: Job, samples: dict[str, list[float]], logs: dict[str, list[tuple[str, float]]]
) -> None:
    """Print the table, and write the JSON if one is wanted."""
    rate = bits_per_second(job.rate)
    compute = statistics.median(samples[COMPUTE])
    planned = sum(value for what, value in logs[COMPUTE] if what == "product")
    rows: list[dict[str, Any]] = []
    for name in NAMES:
        pairs = list(zip(samples[name], samples[COMPUTE], samples[WHOLE], strict=True))
        ratio = statistics.median(own / alone for own, alone, _ in pairs)
        least = bound(logs[name], job.hosts, rate, compute / planned) / compute
        if name == COMPUTE:
            least = 1.0
        rows.append(
            {
                "name": name,
                "ratio": ratio,
                "bound": least,
                "over whole": statistics.median(own / whole for own, _, whole in pairs),
                "milliseconds": statistics.median(samples[name]) * 1e3,
                "messages": 0 if name == COMPUTE else sum(w == "start" for w, _ in logs[name]),
                "bytes": 0 if name == COMPUTE else sum(v for w, v in logs[name] if w == "start"),
            }
        )
    send = BLOCKS * MESSAGES * message_seconds(stream_bytes(), job.hosts, rate)
    print(f"\n{processor()}")
    print(
        f"tp {job.hosts}, {job.rate}, {BLOCKS} blocks, {SEQUENCE * SAMPLES} tokens, "
        f"{job.rounds} rounds of {STEPS} steps; products {planned * 1e3:.0f} ms a step, "
        f"our messages {send * 1e3:.0f} ms"
    )
    print(
        f"{'':<10}{'ratio':>8}{'bound':>8}{'over it':>9}{'of whole':>10}{'ms':>9}{'messages':>10}"
        f"{'MB':>8}"
    )
    for row in rows:
        print(
            f"{row['name']:<10}{row['ratio']:>8.3f}{row['bound']:>8.3f}"
            f"{row['ratio'] / row['bound'] - 1:>+9.1%}{row['over whole']:>10.3f}"
            f"{row['milliseconds']:>9.1f}{row['messages']:>10}{row['bytes'] / 1e6:>8.1f}"
        )
    sys.stdout.flush()
    if job.json is not None:
        with open(job.json, "w", encoding="utf-8") as file:
            file.write(json.dumps(rows, indent=2) + "\n")


def main() -> None:
    """Run a job, given as one argument."""
    go_first()
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    run(job, int(os.environ["RANK"]))
    dist.barrier()
    # The threads of so many process groups need no orderly end.
    os._exit(0)


if __name__ == "__main__":
    main()
