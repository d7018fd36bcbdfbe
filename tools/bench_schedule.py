"""Do zero-bubble schedules save what their formulas say? Runs the real pipeline runtime with real
transfers; only the compute of a stage is a timed wait, so that two cores suffice and every rank has
a "device" of its own.

python tools/bench_schedule.py [--ranks 4] [--microbatches 8] [--unit-ms 40] [--rounds 5] [--json
FILE]

Forward, input gradient and weight gradient take one unit each; a rank's chunks share it. Schedules
take turns within one run; each line is the median step time over that of 1F1B, beside the ratio of
the makespans that validate() computes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, and no other

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from megatron_llama.config.schema import Config, ModelConfig, ParallelConfig
from megatron_llama.data.loader import Batch
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.plan.weight_access import WeightAccess
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.model.llama import StageOptions
from megatron_llama.model.plan.params import partition_of
from megatron_llama.model.positions import Positions
from megatron_llama.pipeline.runtime import PipelineRuntime
from megatron_llama.schedule import schedule_named, validate
from tools.processor import processor

SCHEDULES = ("1f1b", "zb-h1", "zb-v", "interleaved", "gpipe")
WIDTH = 8


class Waits:
    """The engine of a model without weights: weight passes are waits, and may be put off like
    gradients."""

    def __init__(self) -> None:
        self._key: Hashable | None = None
        self._deferred: dict[Hashable, list[Callable[[], None]]] = {}

    def access(self, unit: int, backward: bool) -> None:
        """Nothing to gather."""

    def begin_step(self, microbatches: int, accesses: Sequence[WeightAccess]) -> Tensor:
        """No loss scale."""
        return torch.ones(())

    def begin_evaluation(self, accesses: Sequence[WeightAccess]) -> None:
        """See the runtime's Engine."""

    def postpone_wgrads(self, key: Hashable | None) -> None:
        """See the runtime's Engine."""
        self._key = key

    def weight_pass(self, work: Callable[[], None]) -> None:
        """Wait now, or when the schedule says."""
        if self._key is None:
            work()
        else:
            self._deferred.setdefault(self._key, []).append(work)

    def run_wgrads(self, key: Hashable) -> None:
        """See the runtime's Engine."""
        for work in self._deferred.pop(key):
            work()


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, engine: Waits, seconds: float) -> Tensor:
        ctx.engine = engine
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        ctx.engine.weight_pass(partial(time.sleep, ctx.seconds))
        return grad.clone(), None, None


class WaitingStage(nn.Module):
    """A pipeline stage that computes nothing for a given time."""

    units = 1

    def __init__(
        self, config: ModelConfig, engine: Waits, seconds: float, *, is_first: bool, is_last: bool
    ) -> None:
        super().__init__()
        self.config = config
        self.engine = engine
        self.seconds = seconds
        self.is_first = is_first
        self.is_last = is_last
        self.on_weight_access: Callable[[int, bool], None] = engine.access
        self.options = StageOptions()
        self.head_weight = torch.empty(WIDTH, 0)

    def positions(self, length: int, *rest: object) -> Positions:
        """None are needed."""
        return Positions(torch.empty(0), torch.empty(0))

    def forward(
        self, x: Tensor, positions: Positions, noise: None = None, *, head: bool = True
    ) -> Tensor:
        """[s, b] ids or [s, b, WIDTH] in, [s, b, WIDTH] out. There is no noise, and so few scores
        that the head is never apart."""
        if self.is_first:
            x = torch.zeros(*x.shape, WIDTH, requires_grad=torch.is_grad_enabled())
        return _Wait.apply(x, self.engine, self.seconds)  # type: ignore[no-any-return, no-untyped-call]


def configuration(name: str, ranks: int) -> Config:
    """A model of one block per stage."""
    virtual = 2 if name in ("interleaved", "zb-v") else 1
    model = ModelConfig(
        vocab_size=WIDTH,
        hidden_size=WIDTH,
        num_hidden_layers=ranks * virtual,
        num_key_value_heads=1,
    )
    parallel = ParallelConfig(
        pipeline_model_parallel_size=ranks,
        pipeline_schedule=name,  # type: ignore[arg-type]
        virtual_pipeline_model_parallel_size=virtual,
    )
    return Config(model=model, parallel=parallel)


def runtime_of(name: str, mesh: Mesh, unit: float) -> PipelineRuntime:
    """The runtime of one contender."""
    config = configuration(name, mesh.pp.size)
    engine = Waits()
    partition = partition_of(config)
    seconds = unit * mesh.pp.size / partition.stages
    last = partition.stages - 1
    stages = {
        index: WaitingStage(
            config.model, engine, seconds, is_first=index == 0, is_last=index == last
        )
        for index in partition.stages_of(mesh.pp.rank)
    }
    return PipelineRuntime(stages, engine, mesh, config, dtype=torch.float32)  # type: ignore[arg-type]


def measure(rank: int, options: argparse.Namespace, port: int, result: Any) -> None:
    """One process: every schedule in turn, several rounds."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=options.ranks
    )
    # With virtual stages: the links of all schedules.
    mesh = build_mesh(
        configuration("zb-v", options.ranks),
        rank=rank,
        world_size=options.ranks,
        device=torch.device("cpu"),
    )
    runtimes = {name: runtime_of(name, mesh, options.unit_ms / 1e3) for name in SCHEDULES}
    ids = torch.zeros(4, 1, dtype=torch.int64)
    batches = [Batch(ids, ids) for _ in range(options.microbatches)]
    times: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    for round_ in range(options.rounds + 1):
        for name, runtime in runtimes.items():
            dist.barrier()
            begin = time.perf_counter()
            runtime.step(batches)
            if round_:  # the first opens connections
                times[name].append(time.perf_counter() - begin)
    if rank == 0:
        result.put(times)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Run, print the table, write the JSON."""
    parser = argparse.ArgumentParser(
        "python tools/bench_schedule.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=4, help="pipeline ranks (default 4)")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step (default 8)")
    parser.add_argument("--unit-ms", type=float, default=40.0, help="length of a unit (default 40)")
    parser.add_argument(
        "--rounds", type=int, default=5, help="how often schedules take turns (default 5)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the rows into this file"
    )
    options = parser.parse_args()
    if options.json and not options.json.resolve().parent.is_dir():
        parser.error(f"--json {options.json}: its folder is not there")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    spawn = multiprocessing.get_context("spawn")
    result = spawn.SimpleQueue()
    for rank in range(options.ranks):
        spawn.Process(target=measure, args=(rank, options, port, result), daemon=True).start()
    times = result.get()
    rows = report(times, options.ranks, options.microbatches)
    print("\n".join((processor(), *(line(row) for row in rows))))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


def report(times: dict[str, list[float]], ranks: int, microbatches: int) -> list[dict[str, Any]]:
    """One row per schedule: measured and planned ratio to 1F1B."""
    plans = {}
    for name in SCHEDULES:
        parallel = configuration(name, ranks).parallel
        virtual = parallel.virtual_pipeline_model_parallel_size
        plans[name] = validate(
            schedule_named(name, ranks=ranks, microbatches=microbatches, virtual=virtual)
        ).makespan
    base = statistics.median(times["1f1b"])
    return [
        {
            "name": name,
            "seconds": statistics.median(times[name]),
            "ratio": statistics.median(times[name]) / base,
            "planned_ratio": plans[name] / plans["1f1b"],
            "spread": (max(times[name]) - min(times[name])) / statistics.median(times[name]),
        }
        for name in SCHEDULES
    ]


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    measured = f"{row['seconds'] * 1e3:8.1f} ms   {row['ratio']:.3f} of 1f1b"
    return (
        f"{row['name']:<12}{measured}   planned {row['planned_ratio']:.3f}   spread "
        f"{row['spread']:.1%}"
    )


if __name__ == "__main__":
    main()
