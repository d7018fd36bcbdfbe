"""How much communication a step hides on one GPU, over links that are modelled.

python tools/bench_links.py [--model llama2-7b] [--ranks 8] [--gigabytes-per-second 25,50,150,370]
[--json FILE]

The engine runs as one of several data-parallel ranks. Its gathers and reductions are not sent: each
takes its turn on a link that it occupies for its bytes * (n - 1) / n over the link's rate, and is
done then. The rate is that of one direction; gathers and reductions share the link. Three times are
measured in turns: *alone*, where messages take no time; *overlapped*, as the engine has it; and
*serial*, where computation waits for every message at once. *hidden* = (serial - overlapped) /
(serial - alone). A modelled message takes no multiprocessors and no memory bandwidth from the
computation, and the numbers it should bring never come: these are times of a schedule, and no
throughput of a cluster.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, and no other

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_llama.config.schema import Config, ParallelConfig, TrainingConfig
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm import exchange
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import init_mesh
from megatron_llama.model.presets import PRESETS
from megatron_llama.train.setup.resolve import check
from tools.compare_sharding import Trial, random_batches

Way = Literal["alone", "overlapped", "serial"]
WAYS: tuple[Way, ...] = ("alone", "overlapped", "serial")
STRATEGIES = ("optim", "optim_grads_params")


@dataclass(frozen=True)
class Row:
    """One strategy at one rate. Times are medians over rounds."""

    name: str
    gigabytes_per_second: float
    alone_ms: float
    overlapped_ms: float
    serial_ms: float
    sent_bytes: int
    """In a step, by this rank."""
    hidden: float | None
    """None: messages took too little to tell."""


def hidden_share(alone: float, overlapped: float, serial: float) -> float | None:
    """Of the time that messages take; None where that is less than a hundredth of a step."""
    return (serial - overlapped) / (serial - alone) if serial - alone > 0.01 * alone else None


class Arriving:
    """A message on a link, as torch.distributed's work is: ``wait`` makes the current stream
    wait."""

    def __init__(self, device: torch.device, arrived: torch.Event | None) -> None:
        self._device = device
        self._arrived = arrived

    def wait(self) -> None:
        """See the class."""
        if self._arrived is not None:
            devices.current_stream(self._device).wait_event(self._arrived)


class Link:
    """Stands in for the collectives of a device's backend. One message at a time, in the order in
    which they are issued."""

    def __init__(self, device: torch.device, ranks: int) -> None:
        self._device = device
        self._ranks = ranks
        self._stream = devices.new_stream(device)
        self._compute = devices.current_stream(device)
        self._cycles = cycles_per_second(device)
        self.way: Way = "alone"
        self.bytes_per_second = 1.0
        self.sent = 0

    def gather(self, full: Tensor, own: Tensor, **_: Any) -> Arriving:
        """In the place of ``all_gather_single``."""
        return self._send(full.nbytes)

    def scatter(self, own: Tensor, full: Tensor, **_: Any) -> Arriving:
        """In the place of ``reduce_scatter_single``."""
        return self._send(full.nbytes)

    def _send(self, size: int) -> Arriving:
        self.sent += size * (self._ranks - 1) // self._ranks
        if self.way == "alone":
            return Arriving(self._device, None)
        seconds = size * (self._ranks - 1) / self._ranks / self.bytes_per_second
        self._stream.wait_stream(devices.current_stream(self._device))
        with devices.on_stream(self._stream):
            torch.cuda._sleep(int(seconds * self._cycles))  # type: ignore[no-untyped-call]
            arrived = self._stream.record_event()
        if self.way == "serial":
            self._compute.wait_event(arrived)
        return Arriving(self._device, arrived)


def cycles_per_second(device: torch.device) -> float:
    """Of the clock that timed waits count."""
    cycles = 200_000_000
    rates = []
    for _ in range(3):
        devices.synchronize(device)
        begin = time.perf_counter()
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        devices.synchronize(device)
        rates.append(cycles / (time.perf_counter() - begin))
    return statistics.median(rates)


def configuration(options: argparse.Namespace, strategy: str) -> Config:
    """Resolved."""
    model = PRESETS[options.model]
    model = replace(model, num_hidden_layers=options.layers or model.num_hidden_layers)
    sizes = TrainingConfig(
        seq_length=options.seq_length,
        micro_batch_size=1,
        global_batch_size=options.ranks * options.microbatches,
        train_iters=1,
        bf16=True,
    )
    parallel = ParallelConfig(data_parallel_sharding_strategy=strategy)  # type: ignore[arg-type]
    return check(Config(model=model, training=sizes, parallel=parallel), options.ranks).config


def step_of(config: Config, ranks: int) -> tuple[torch.device, Callable[[], None]]:
    """One rank's engine, and a whole step of it, to the last message."""
    mesh = init_mesh(config, Place(0, ranks, 0))
    trial = Trial(config, mesh)
    trial.fill()
    batches = [batch.to(mesh.device) for batch in random_batches(config, mesh)]
    return mesh.device, lambda: trial.train(batches, 1)


def measure(options: argparse.Namespace, strategy: str) -> list[Row]:
    """All rates of one strategy."""
    gc.collect()  # of the strategy before
    config = configuration(options, strategy)
    rows = list[Row]()
    device, step = step_of(config, options.ranks)
    link = Link(device, options.ranks)
    exchange.all_gather_single, exchange.reduce_scatter_single = link.gather, link.scatter
    step()
    for rate in options.rates:
        times: dict[Way, list[float]] = {way: [] for way in WAYS}
        link.bytes_per_second = rate * 1e9
        for _ in range(options.rounds):
            for link.way in WAYS:
                link.sent = 0
                begin = time.perf_counter()
                step()
                times[link.way].append(time.perf_counter() - begin)
        alone, overlapped, serial = (statistics.median(times[way]) for way in WAYS)
        hidden = hidden_share(alone, overlapped, serial)
        rows.append(
            Row(strategy, rate, alone * 1e3, overlapped * 1e3, serial * 1e3, link.sent, hidden)
        )
        print(line(rows[-1]), flush=True)
    return rows


def line(row: Row) -> str:
    """For people."""
    times = (
        f"{row.alone_ms:.1f} ms alone, {row.overlapped_ms:.1f} overlapped, "
        f"{row.serial_ms:.1f} serial"
    )
    share = "too little to tell" if row.hidden is None else f"{row.hidden:.1%} hidden"
    return f"{row.name:<20}{row.gigabytes_per_second:>6g} GB/s: {times}: {share}"


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line; exits with status 2 and one message where it is wrong."""
    parser = argparse.ArgumentParser(
        "python tools/bench_links.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", default="llama2-7b", choices=sorted(PRESETS), help="preset (default llama2-7b)"
    )
    parser.add_argument("--layers", type=int, default=0, help="so many blocks of it (default: all)")
    parser.add_argument(
        "--seq-length", type=int, default=4096, help="tokens of a sample (default 4096)"
    )
    parser.add_argument(
        "--ranks", type=int, default=8, help="data-parallel ranks, of which this is one (default 8)"
    )
    parser.add_argument(
        "--microbatches",
        type=int,
        default=1,
        help="of a rank in a step (default 1: the least to hide behind)",
    )
    parser.add_argument(
        "--gigabytes-per-second",
        default="25,50,150,370",
        help="rates of the link (default 25,50,150,370)",
    )
    parser.add_argument(
        "--strategies",
        default=",".join(STRATEGIES),
        help=f"with commas between (default {','.join(STRATEGIES)})",
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="how often the three times are taken (default 3)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the rows into this file"
    )
    options = parser.parse_args(words)
    try:
        options.rates = [float(rate) for rate in options.gigabytes_per_second.split(",")]
    except ValueError:
        parser.error(
            f"--gigabytes-per-second {options.gigabytes_per_second}: expected numbers "
            "with commas between"
        )
    if (
        min(options.rates) <= 0
        or options.ranks < 2
        or options.rounds < 1
        or options.microbatches < 1
        or options.layers < 0
    ):
        parser.error(
            "rates are positive, --ranks is at least 2, --rounds and --microbatches at "
            "least 1, --layers not negative"
        )
    return options


def main(words: Sequence[str]) -> int:
    """The exit status."""
    options = parse(words)
    if devices.is_host(devices.accelerator(0)):
        print(
            "error: no GPU here; tools/bench_overlap.sh measures overlap on the host",
            file=sys.stderr,
        )
        return 2
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.ranks)
    rows = [row for strategy in options.strategies.split(",") for row in measure(options, strategy)]
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
