"""Which way to shard is best here? Trains a few steps of your model in every mode, on your
machines, and prints one table.

torchrun --nproc-per-node 8 tools/compare_sharding.py --model llama2-7b --seq-length 4096 --bf16
--global-batch-size 64

Takes every option of ``pretrain`` (``--config FILE`` too). Tokens are random: of data only the
vocabulary is read, that of ``--tokenizer-model`` or ``--data-path`` (32,000 without one).
Modes take turns, ``--rounds`` times; each is built anew, so that one at a time needs memory. A mode
whose state does not fit is a line in the table, not the end. One that runs out of memory later, in
a step, ends the tool, because its other ranks are in the middle of their messages: leave it out
(``--modes``).
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, and no other

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_llama.checkpoint.failures import require_writable
from megatron_llama.config.help import help_text
from megatron_llama.config.megatron_names import MEGATRON
from megatron_llama.config.parse import Parsed, parse
from megatron_llama.config.schema import Config
from megatron_llama.config.sections import config_sections
from megatron_llama.data.loader import Batch
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.collectives import all_reduce
from megatron_llama.engine.comm.groups import close_mesh
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.engine.plan.buckets import BY_TRAFFIC, NO_SHARD
from megatron_llama.engine.plan.memory import sized
from megatron_llama.errors import ConfigError, UserError, describe
from megatron_llama.launch.launcher import place_from_environment
from megatron_llama.launch.mesh import build_mesh, init_mesh
from megatron_llama.model.init import InitialWeights
from megatron_llama.model.llama import build_stages
from megatron_llama.model.presets import LLAMA_VOCABULARY
from megatron_llama.pipeline.build import build_optimizer, compute_dtype
from megatron_llama.pipeline.runtime import PipelineRuntime
from megatron_llama.train.run.block_graphs import BlockGraphs
from megatron_llama.train.setup.auto import decide
from megatron_llama.train.setup.memory import MemoryPlan
from megatron_llama.train.setup.processes import launched_processes
from megatron_llama.train.setup.resolve import assemble, check
from megatron_llama.train.setup.vocabulary import find_vocabulary, with_vocabulary

T = TypeVar("T")
MODES = {name: (name, "default") for name in (NO_SHARD, *BY_TRAFFIC[:-1])}
MODES |= {f"{BY_TRAFFIC[-1]}-{slots}": (BY_TRAFFIC[-1], slots) for slots in ("2", "3", "all")}


@dataclass(frozen=True)
class CompareConfig:
    """What to compare, and how long."""

    modes: tuple[str, ...] = tuple(MODES)
    """Modes by name; `optim_grads_params-N` has N parameter slots."""
    steps: int = 4
    """Timed steps of a mode in a round, after two that are not."""
    rounds: int = 3
    """How often modes take turns."""
    json: str | None = None
    """Also write the rows into this file."""


@dataclass(frozen=True)
class Row:
    """One mode. Times are medians over rounds of the slowest rank; bytes are those of the rank with
    most."""

    name: str
    step_ms: float
    exposed_ms: float
    sent_bytes: float
    planned_bytes: float
    peak_memory_bytes: int | None
    """None where the system does not say."""


class OutOfMemory(Exception):
    """Some rank had not enough memory for a mode."""


class Trial:
    """One mode, built for a round. Building it sends nothing."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.config = config
        self.mesh = mesh
        stages = build_stages(config, mesh)
        self.engine: OverlappedDistributedOptimizer = build_optimizer(config, stages.values(), mesh)
        self.runtime = PipelineRuntime(
            stages, self.engine, mesh, config, dtype=compute_dtype(config)
        )
        self._graphs = None
        if config.training.cuda_graph_scope == "block":
            self._graphs = BlockGraphs(stages, self.engine, mesh)

    def load(self) -> None:
        """Initial weights, drawn on the device and gathered."""
        self.engine.load_weights(
            InitialWeights(
                self.config.training.seed, self.config.model.initializer_range, self.mesh.device
            )
        )

    def fill(self) -> None:
        """Random parameters, in a process whose messages go nowhere, so that nothing comes of what
        other ranks own: products with zeros would be faster than any others."""
        self.engine.settle()
        for stage in self.runtime.stages.values():
            for parameter in stage.parameters():
                if parameter.dim() > 1:
                    parameter.data.normal_(0.0, self.config.model.initializer_range)
                else:
                    parameter.data.fill_(1.0)

    def begin_graphs(self) -> None:
        """Let the blocks run as graphs, if they are to. Called after a step."""
        if self._graphs is not None:
            self._graphs.begin()

    def train(self, batches: Sequence[Batch], steps: int) -> None:
        """So many steps, to the last message."""
        optimizer = self.config.optimizer
        for _ in range(steps):
            self.engine.announce_step(optimizer.lr, clip=optimizer.clip_grad)
            self.runtime.step(batches)
            self.engine.step(optimizer.lr, clip=optimizer.clip_grad)
            self.begin_graphs()
        self.engine.settle()
        devices.synchronize(self.mesh.device)


def measured(name: str, config: Config, mesh: Mesh, steps: int) -> Row:
    """One mode, once. Raises OutOfMemory on every rank where one cannot build it. Collective."""
    gc.collect()
    devices.reset_peak_memory(mesh.device)
    return _timed(name, built_everywhere(lambda: Trial(config, mesh), mesh), steps)


def built_everywhere(build: Callable[[], T], mesh: Mesh) -> T:
    """What ``build`` makes on this rank. Raises OutOfMemory on every rank where one has not enough
    memory for it, so that nobody is left waiting for that one. Collective."""
    built: T | None = None
    with suppress(torch.OutOfMemoryError):  # said below, by all
        built = build()
    if _most(mesh, float(built is None)):
        raise OutOfMemory
    assert built is not None
    return built


def _timed(name: str, trial: Trial, steps: int) -> Row:
    config = trial.config
    mesh = trial.mesh
    recorder = trial.mesh.recorder
    batches = list(random_batches(config, mesh))
    trial.load()
    trial.train(batches, 2)
    recorder.traffic.clear()
    recorder.marks.clear()
    recorder.take_exposed_seconds()
    if not devices.is_host(mesh.device):
        recorder.mark = lambda: devices.timed_event(mesh.device)
    begin = time.perf_counter()
    trial.train(batches, steps)
    seconds = time.perf_counter() - begin
    exposed = recorder.take_exposed_seconds()
    if recorder.mark is not None:
        exposed = sum(before.elapsed_time(after) for before, after in recorder.marks) / 1e3
    planned = (
        MemoryPlan(config, mesh.world.size).traffic(mesh.pp.rank).sent if mesh.dp.size > 1 else 0.0
    )
    trial.engine.close()
    values = (
        seconds / steps * 1e3,
        exposed / steps * 1e3,
        sent_bytes(mesh) / steps,
        planned,
        float(devices.peak_memory_bytes(mesh.device) or 0),
    )
    step_ms, exposed_ms, sent, planned, peak = (_most(mesh, value) for value in values)
    return Row(name, step_ms, exposed_ms, sent, planned, int(peak) or None)


def _most(mesh: Mesh, value: float) -> float:
    tensor = torch.tensor(value, dtype=torch.float64, device=mesh.device)
    all_reduce(tensor, mesh.world, dist.ReduceOp.MAX).wait()
    return float(tensor)


def sent_bytes(mesh: Mesh) -> float:
    """Payload that left this rank on the axes of data parallelism."""
    total = 0.0
    for axis in {
        axis.name: axis for axis in (mesh.dp_shard, mesh.dp_gather, mesh.dp_replica)
    }.values():
        for (name, operation), traffic in mesh.recorder.traffic.items():
            if name == axis.name:
                total += (
                    traffic.bytes * (2 if operation == "all_reduce" else 1) * (1 - 1 / axis.size)
                )
    return total


def random_batches(config: Config, mesh: Mesh) -> Iterator[Batch]:
    """This rank's microbatches."""
    training = config.training
    generator = torch.Generator().manual_seed(mesh.data_rank)
    for _ in range(training.global_batch_size // (training.micro_batch_size * mesh.data_size)):
        shape = (training.seq_length + 1, training.micro_batch_size)
        ids: Tensor = torch.randint(0, config.model.vocab_size, shape, generator=generator)
        yield Batch(ids[:-1].contiguous(), ids[1:].contiguous())


def table(rows: Sequence[Row], failed: Sequence[str]) -> Iterator[str]:
    """For people."""
    yield (
        f"{'mode':<26}{'step ms':>10}{'of best':>9}{'exposed ms':>12}"
        f"{'sent':>12}{'planned':>12}{'peak memory':>13}"
    )
    best = min((row.step_ms for row in rows), default=0.0)
    for row in rows:
        sent = sized(round(row.sent_bytes))
        planned = sized(round(row.planned_bytes))
        peak = "n/a" if row.peak_memory_bytes is None else sized(row.peak_memory_bytes)
        times = f"{row.step_ms:>10.1f}{row.step_ms / best:>9.3f}{row.exposed_ms:>12.1f}"
        yield f"{row.name:<26}{times}{sent:>12}{planned:>12}{peak:>13}"
    yield from (f"{name:<26}does not fit into memory" for name in failed)


def main(words: list[str]) -> None:
    """Run, print the table on rank 0, write the JSON. Raises UserError."""
    sections = (*config_sections(), CompareConfig)
    if {"-h", "--help"} & set(words):
        usage = "torchrun --nproc-per-node N tools/compare_sharding.py [--option value ...]"
        print(help_text(usage, __doc__ or "", sections), end="")
        return
    parsed = parse(words, sections, aliases=MEGATRON)
    options = parsed.get(CompareConfig)
    place = place_from_environment()
    unknown = [mode for mode in options.modes if mode not in MODES]
    if unknown:
        raise ConfigError(
            describe(
                "--modes",
                got=", ".join(unknown),
                expected=f"of {', '.join(MODES)}",
                do="leave the others out",
            )
        )
    config = checked(parsed, place.world_size)
    if options.json is not None:
        require_writable(Path(options.json).parent)
    mesh = init_mesh(config, place)
    memory = launched_processes(place, mesh.world).memory
    configs = {
        mode: decide(_in_mode(config, mode), place.world_size, memory)[0] for mode in options.modes
    }
    meshes = {
        mode: build_mesh(chosen, rank=mesh.rank, world_size=place.world_size, device=mesh.device)
        for mode, chosen in configs.items()
    }
    found: dict[str, list[Row]] = {mode: [] for mode in options.modes}
    failed: set[str] = set()
    for round_ in range(options.rounds):
        for mode in (
            options.modes[round_ % len(options.modes) :]
            + options.modes[: round_ % len(options.modes)]
        ):
            try:
                found[mode].append(measured(mode, configs[mode], meshes[mode], options.steps))
            except OutOfMemory:
                failed.add(mode)
    if mesh.rank == 0:
        rows = [_median(found[mode]) for mode in options.modes if found[mode]]
        print("\n".join(table(rows, sorted(failed))))
        if options.json is not None:
            Path(options.json).write_text(
                json.dumps([asdict(row) for row in rows], indent=2) + "\n"
            )


def _in_mode(config: Config, mode: str) -> Config:
    strategy, slots = MODES[mode]
    parallel = replace(config.parallel, data_parallel_sharding_strategy=strategy, param_slots=slots)  # type: ignore[arg-type]
    return replace(config, parallel=parallel)


def checked(parsed: Parsed, world_size: int) -> Config:
    """The configuration for steps on random tokens. They need a vocabulary, not a tokenizer: it is
    that of the tokenizer or dataset that is named, if one is. Raises UserError."""
    config = assemble(parsed)
    if config.data.data_path or config.data.tokenizer_model is not None:
        config = with_vocabulary(config, find_vocabulary(config, None))
    size = config.model.vocab_size or LLAMA_VOCABULARY
    steps = config.training.train_iters or 1
    config = replace(
        config,
        model=replace(config.model, vocab_size=size),
        training=replace(config.training, train_iters=steps),
    )
    return check(config, world_size).config


def _median(rows: Sequence[Row]) -> Row:
    times = {
        name: statistics.median(getattr(row, name) for row in rows)
        for name in ("step_ms", "exposed_ms")
    }
    return replace(
        rows[-1], **times, peak_memory_bytes=max(row.peak_memory_bytes or 0 for row in rows) or None
    )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
    finally:
        close_mesh()
