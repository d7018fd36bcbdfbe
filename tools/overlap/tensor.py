"""Tensor parallelism on the emulated cluster: a step of some blocks whose matrix products are timed
waits, with whole messages and with messages in pieces (``--tp-comm-overlap``).

Every host is a tensor-parallel rank. All contenders train the same first step with real products;
then products only take their time, so that the cores are free for the transport, and messages carry
what memory holds. Norms, attention and activations are computed, as in ``compute``, which sends
nothing and which every time is divided by: products take so long that all of it takes as long as
the messages at ``NOMINAL``.

*bound* is the least time of a step with the order in which a contender issues products and
messages: the link is ideal, and what is computed takes what it takes where nothing is sent. *over
link* is against the same bound with the link as this transport fills it while nothing is computed,
with several messages of the same size under way.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_llama.config.schema import Config, ModelConfig, ParallelConfig, TrainingConfig
from megatron_llama.engine import host_gemm as gemm
from megatron_llama.engine.comm import autograd, collectives
from megatron_llama.engine.comm.collectives import Pending
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.engine.param_handle import accumulate_product, attach_param_handle
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.model.init import InitialWeights
from megatron_llama.model.llama import Stage, build_stages
from megatron_llama.model.load import load_stages, rank_specs
from megatron_llama.model.nn import linear as layers
from megatron_llama.model.nn.functional import Residual
from megatron_llama.model.nn.linear import ColumnLinear, plain_linear
from tools.overlap.bound import FRAME_FACTOR
from tools.overlap.job import bits_per_second
from tools.overlap.measure import go_first
from tools.processor import processor

BLOCKS, SEQUENCE, SAMPLES = 2, 128, 16
STEPS = 2
"""Steps of a contender in one round."""
MESSAGES = 10
"""Messages of a block and step of ours, for which the network needs as long as the computation at
``NOMINAL``. The peer, which keeps gathered inputs, sends 8."""
NOMINAL = 400e6
IN_FLIGHT = 6
"""Messages that are under way at once where the link is measured."""
REHEARSALS = 9
"""Steps without messages, whose median is what is computed between two of them."""
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


def all_messages(hosts: int, rate: float) -> float:
    """Seconds that those of a step need at least."""
    return BLOCKS * MESSAGES * message_seconds(stream_bytes(), hosts, rate)


def stream_bytes() -> int:
    """Of the residual stream of all tokens."""
    return SEQUENCE * SAMPLES * MODEL.hidden_size * 4


class Event(NamedTuple):
    """Of a step: ``start`` (gathered bytes) or ``wait`` (number of the message); ``begin`` and
    ``end``."""

    what: str
    value: int
    at: float
    """By the clock, in seconds."""


class Products:
    """Matrix products that take the time of a device, of which each rank has one."""

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts
        self.seconds = 0.0
        """Of one floating-point operation."""
        self.real = True
        self.log: list[Event] | None = None
        self._owed = 0.0

    def share(self, rest: float) -> None:
        """Take as long, with the ``rest`` of a step's computation, as messages at ``NOMINAL``."""
        weights = MODEL.hidden_size * (4 * MODEL.hidden_size + 3 * MODEL.intermediate_size)
        flops = BLOCKS * 3 * 2 * weights * SEQUENCE * SAMPLES / self._hosts
        self.seconds = max(0.0, all_messages(self._hosts, NOMINAL) - rest) / flops

    def take(self, flops: float) -> None:
        """Take the time of a product, less what waits before it took too long."""
        seconds = flops * self.seconds
        if self.real:
            return
        begin = time.perf_counter()
        if self._owed < seconds:
            time.sleep(seconds - self._owed)
        self._owed = max(0.0, self._owed + time.perf_counter() - begin - seconds)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """A section in which the layers' products are these."""
        linear = gemm.linear

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

        def timed_accumulation(view: Tensor, beta: float, left: Tensor, right: Tensor) -> None:
            self.take(2 * left.numel() * right.shape[1])
            if self.real:
                accumulate_product(view, beta, left, right)

        with ExitStack() as stack:
            for module, name, function in (
                (gemm, "linear", timed_linear),
                (gemm, "linear_backward", timed_backward),
                (gemm, "linear_into", timed_into),
                (layers, "accumulate_product", timed_accumulation),
            ):
                stack.enter_context(mock.patch.object(module, name, function))
            yield


@contextmanager
def logged(products: Products, *, silent: bool) -> Iterator[None]:
    """A section in which messages are written down, and with ``silent`` not sent."""

    def instead(issue: Callable[..., Pending], full: int) -> Callable[..., Pending]:
        def call(*tensors: Any, async_op: bool = True) -> Pending:
            number = 0
            if products.log is not None:
                number = sum(event.what == "start" for event in products.log)
                products.log.append(Event("start", tensors[full].nbytes, time.perf_counter()))
            pending = Pending(None, None) if silent else issue(*tensors, async_op=async_op)
            finish = pending.finish

            def wait() -> None:
                if products.log is not None:
                    products.log.append(Event("wait", number, time.perf_counter()))
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


def gaps(logs: Sequence[Sequence[Event]]) -> list[float]:
    """Seconds of computation before each event, medians over steps without messages."""
    return [
        statistics.median(
            log[index].at - (log[index - 1].at if index else log[0].at) for log in logs
        )
        for index in range(len(logs[0]))
    ]


def bound(
    events: Sequence[Event], before: Sequence[float], message: Callable[[int], float]
) -> float:
    """Return the least seconds of a step with this order: one message after the other has the link
    for the seconds of its gathered bytes, and ``before`` each event so much is computed."""
    clock = link = 0.0
    arrivals: list[float] = []
    for event, seconds in zip(events, before, strict=True):
        clock += seconds
        if event.what == "start":
            link = max(clock, link) + message(event.value)
            arrivals.append(link)
        elif event.what == "wait":
            clock = max(clock, arrivals[event.value])
    return clock


class _Handle:
    """A weight that is there, and a place for its gradient: layers write gradients as they do for
    the engine."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._view = torch.zeros_like(parameter, requires_grad=False)

    def wait_unsharded(self) -> int:
        return 0

    def check_version(self, version: int) -> None:
        pass

    def grad_view(self) -> tuple[Tensor, float]:
        return self._view, 0.0

    def grad_written(self) -> None:
        pass

    def keep_wgrad(self, work: Callable[[], object]) -> bool:
        return False


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
        for parameter in self._blocks.parameters():
            parameter.requires_grad_()
            attach_param_handle(parameter, _Handle(parameter))
        if name == PEER:
            for layer in self._blocks.modules():
                if isinstance(layer, ColumnLinear):
                    layer.forward = _Serial(layer)  # type: ignore[assignment,method-assign]

    def step(self, x: Tensor, *, silent: bool = False) -> Tensor:
        """Forward and backward of this rank's part [s / tp, b, h]; the gradient of that. With
        ``silent`` no message is sent."""
        x = x.detach().requires_grad_()
        with logged(self._products, silent=silent or self.name == COMPUTE):
            positions = self._stage.positions(SEQUENCE, x.device)
            residual = Residual(x)
            for block in self._blocks:
                residual = block(residual, positions)
            out = residual.sum()
            torch.autograd.backward([out], [torch.ones_like(out)])
        assert x.grad is not None
        return x.grad


@dataclass(frozen=True)
class _Serial:
    """The forward pass of a column-parallel layer that keeps its gathered input."""

    layer: ColumnLinear

    def __call__(self, x: Tensor) -> Tensor:
        full = autograd.gather_sequence(x, self.layer.tp)
        return plain_linear(full, self.layer.weight, self.layer.tp)


def _rehearsal(contender: Contender, products: Products, x: Tensor) -> list[Event]:
    """What a step without messages does when."""
    dist.barrier()
    products.log = [Event("begin", 0, time.perf_counter())]
    contender.step(x, silent=True)
    log = [*products.log, Event("end", 0, time.perf_counter())]
    products.log = None
    return log


def link_seconds(sizes: Iterable[int], tp: Axis) -> dict[int, float]:
    """Seconds of a message of so many gathered bytes, while others of its size are under way:
    medians. Collective."""
    found = {}
    for size in sorted(sizes):
        whole = torch.empty(size // 4)
        shard = torch.empty(size // 4 // tp.size)
        samples = []
        for _ in range(REHEARSALS):
            dist.barrier()
            begin = time.perf_counter()
            messages = [collectives.all_gather(whole, shard, tp) for _ in range(IN_FLIGHT)]
            for message in messages:
                message.wait()
            samples.append(slowest(time.perf_counter() - begin, tp) / IN_FLIGHT)
        found[size] = statistics.median(samples)
    return found


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
        products.real = False
        rehearsed = [_rehearsal(contenders[COMPUTE], products, x) for _ in range(REHEARSALS)]
        rest = statistics.median(log[-1].at - log[0].at for log in rehearsed)
        products.share(slowest(rest, mesh.tp))
        logs = {
            name: [_rehearsal(contender, products, x) for _ in range(REHEARSALS)]
            for name, contender in contenders.items()
        }
        sizes = {event.value for log in logs.values() for event in log[0] if event.what == "start"}
        link = link_seconds(sizes, mesh.tp)
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
        report(job, {name: seconds[1:] for name, seconds in samples.items()}, logs, link)


def report(
    job: Job,
    samples: dict[str, list[float]],
    logs: dict[str, list[list[Event]]],
    link: Mapping[int, float],
) -> None:
    """Print the table, and write the JSON if one is wanted. ``link``: seconds of a message."""
    rate = bits_per_second(job.rate)
    compute = statistics.median(samples[COMPUTE])
    ideal = partial(message_seconds, hosts=job.hosts, rate=rate)
    rows: list[dict[str, Any]] = []
    for name in NAMES:
        pairs = list(zip(samples[name], samples[COMPUTE], samples[WHOLE], strict=True))
        ratio = statistics.median(own / alone for own, alone, _ in pairs)
        events = logs[name][0]
        before = gaps(logs[name])
        # What a contender computes beyond ``compute`` is its own: it is not in its bound.
        stretch = min(1.0, compute / sum(before))
        before = [seconds * stretch for seconds in before]
        least = bound(events, before, ideal) / compute
        on_link = bound(events, before, link.__getitem__) / compute
        sent = [event.value for event in events if event.what == "start"]
        if name == COMPUTE:
            least, on_link, sent = 1.0, 1.0, []
        rows.append(
            {
                "name": name,
                "ratio": ratio,
                "bound": least,
                "bound on link": on_link,
                "over whole": statistics.median(own / whole for own, _, whole in pairs),
                "milliseconds": statistics.median(samples[name]) * 1e3,
                "messages": len(sent),
                "bytes": sum(sent),
            }
        )
    print(f"\n{processor()}")
    print(
        f"tp {job.hosts}, {job.rate}, {BLOCKS} blocks, {SEQUENCE * SAMPLES} tokens, "
        f"{job.rounds} rounds of {STEPS} steps; computation {compute * 1e3:.0f} ms a step, "
        f"our messages {all_messages(job.hosts, rate) * 1e3:.0f} ms"
    )
    print(
        f"{'':<10}{'ratio':>8}{'bound':>8}{'over it':>9}{'over link':>11}{'of whole':>10}"
        f"{'ms':>9}{'messages':>10}{'MB':>8}"
    )
    for row in rows:
        print(
            f"{row['name']:<10}{row['ratio']:>8.3f}{row['bound']:>8.3f}"
            f"{row['ratio'] / row['bound'] - 1:>+9.1%}"
            f"{row['ratio'] / row['bound on link'] - 1:>+11.1%}{row['over whole']:>10.3f}"
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
