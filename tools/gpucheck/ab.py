"""What a switch of the trainer is worth: the same step with it off and on, in turns.

    python -m tools.gpucheck.ab SWITCH [options of pretrain] [--json FILE]
    torchrun --nproc-per-node N -m tools.gpucheck.ab SWITCH ...

Each turn builds everything anew. With one process each turn is a process of its own, so that one
variant has the memory, and what is chosen once for a process is chosen again. Under torchrun all
turns run in the same processes, each with communicators of its own.

Columns: *ratio* is the time of a step over that of the first variant, median over rounds. *same
losses* says whether all turns of a variant gave the same losses to the bit; of a switch that may
change none, also whether they are those of the first variant.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, and no other

import torch
import torch.distributed as dist

from megatron_llama.config.help import help_text
from megatron_llama.config.megatron_names import MEGATRON
from megatron_llama.config.parse import parse
from megatron_llama.config.schema import Config
from megatron_llama.config.sections import config_sections
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.groups import close_mesh
from megatron_llama.errors import ConfigError, UserError, describe
from megatron_llama.launch.join import join
from megatron_llama.launch.launcher import Place, place_from_environment
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.train.setup.kernels import chosen_flash
from megatron_llama.train.setup.resolve import check
from tools.bench_step import configuration
from tools.compare_sharding import Trial, random_batches
from tools.step.contenders import Entry
from tools.step.worker import Failed, Sample, Task, Worker

Variants = Mapping[str, Sequence[str]]
SWITCHES: Mapping[str, Variants] = MappingProxyType(
    {
        "attention": {
            "flash": ("--attention-backend", "flash"),
            "fused": ("--attention-backend", "fused"),
        },
        "flash-attention-3": {
            "flash": ("--attention-backend", "flash"),
            "fa3": ("--attention-backend", "fa3"),
        },
        "graphs": {"off": (), "on": ("--cuda-graph-scope", "block")},
        "deterministic": {"off": (), "on": ("--deterministic-mode",)},
        "grad-reduce-in-bf16": {"off": (), "on": ("--grad-reduce-in-bf16",)},
        "priority": {
            "none": ("--high-priority-stream-groups", "none"),
            "tp cp dp": ("--high-priority-stream-groups", "tp", "cp", "dp"),
        },
        "tp-comm-overlap": {"0": (), "4": ("--tp-comm-overlap", "4")},
        "tp-symm-mem": {"0": (), "symm_mem": ("--tp-comm-overlap", "symm_mem")},
        "fp8": {
            "bf16": (),
            "blockwise": ("--fp8", "blockwise"),
            "tensorwise": ("--fp8", "tensorwise"),
        },
        "pp-ctas": {"all": ("--nccl-pp-max-ctas", "0"), "4": ("--nccl-pp-max-ctas", "4")},
    }
)
"""The options of each variant; the first one is the baseline."""
EXACT = frozenset({"graphs"})
"""Switches that change no bit: every variant has to give the losses of the first."""


@dataclass(frozen=True)
class AbConfig:
    """How long, and where the rows go."""

    rounds: int = 2
    """How often the variants take turns."""
    steps: int = 4
    """Timed steps of a turn."""
    warmup: int = 2
    """Steps of a turn before these."""
    emulate_dp: int = 1
    """With one process: it has the state of one of so many ranks, data-parallel ones or as the
    options share them out, whose messages go nowhere."""
    json: str | None = None
    """Also write the rows into this file."""


@dataclass(frozen=True)
class Row:
    """One variant, medians over rounds."""

    name: str
    variant: str
    step_ms: float
    ratio: float
    peak_memory_bytes: int
    same_losses: str
    """``yes``, ``no``, or ``one turn``."""


def rows_of(switch: str, turns: Mapping[str, Sequence[Sample]]) -> list[Row]:
    """One for each variant that has had a turn, in their order."""
    base = next(iter(turns.values()))
    rows = []
    for variant, samples in turns.items():
        if not samples:
            continue
        pairs = zip(samples, base, strict=False)
        compared = (*samples, *base) if switch in EXACT else samples
        alike = "yes" if len({sample.losses for sample in compared}) == 1 else "no"
        rows.append(
            Row(
                switch,
                variant,
                statistics.median(sample.seconds for sample in samples) * 1e3,
                statistics.median(own.seconds / other.seconds for own, other in pairs),
                max(sample.peak_memory_bytes for sample in samples),
                alike if len(samples) > 1 else "one turn",
            )
        )
    return rows


def alone(config: Config, options: AbConfig) -> Sample:
    """One turn in a process of its own. Raises Failed."""
    dtype = "bf16" if config.training.bf16 else "fp32"
    worker = Worker(Task(Entry("ours", dtype), config, 0, options.emulate_dp))
    try:
        before = worker.steps(options.warmup).losses
        sample = worker.steps(options.steps)
    finally:
        worker.close()
    return replace(sample, losses=before + sample.losses)


def together(config: Config, options: AbConfig, place: Place, device: torch.device) -> Sample:
    """One turn in processes that have met: the slowest rank's time. Collective."""
    mesh = build_mesh(config, rank=place.rank, world_size=place.world_size, device=device)
    with chosen_flash(config.training, device, mesh.world):
        return _timed(Trial(config, mesh), options, device)


def _timed(trial: Trial, options: AbConfig, device: torch.device) -> Sample:
    config = trial.config
    mesh = trial.mesh
    # The engine's threads have to end before the interpreter does.
    with closing(trial.engine):
        trial.load()
        batches = [batch.to(device) for batch in random_batches(config, mesh)]
        trial.train(batches, options.warmup)
        devices.reset_peak_memory(device)
        dist.barrier()
        begin = time.perf_counter()
        used = time.process_time()
        trial.train(batches, options.steps)
        took = torch.tensor([time.perf_counter() - begin], device=device)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        seconds = float(took) / options.steps
        loss = float(trial.runtime.step(batches))
        trial.engine.settle()
    processor = (time.process_time() - used) / options.steps
    return Sample(seconds, processor, (loss,), devices.peak_memory_bytes(device) or 0)


def main(words: list[str]) -> int:
    """Run and print. Returns 1 if a turn failed. Raises UserError."""
    sections = (*config_sections(), AbConfig)
    if not words or {"-h", "--help"} & set(words):
        print(
            help_text(
                "python -m tools.gpucheck.ab SWITCH [--option value ...]", __doc__ or "", sections
            ),
            end="",
        )
        return 0
    switch, *given = words
    if switch not in SWITCHES:
        raise ConfigError(
            describe(
                "SWITCH",
                got=switch,
                expected=f"one of {', '.join(SWITCHES)}",
                do="name one of them",
            )
        )
    options = parse(given, sections, aliases=MEGATRON).get(AbConfig)
    place = place_from_environment()
    world = max(place.world_size, options.emulate_dp)
    configs = {
        variant: check(
            configuration(parse([*given, *more], sections, aliases=MEGATRON)), world
        ).config
        for variant, more in SWITCHES[switch].items()
    }
    # Alone, this process leaves the device to those of the turns.
    device = torch.device("cpu")
    if place.world_size > 1:
        _, device = join(next(iter(configs.values())).parallel, place)
    turns: dict[str, list[Sample]] = {variant: [] for variant in configs}
    failed = list[str]()
    for _ in range(options.rounds):
        for variant, config in configs.items():
            try:
                if place.world_size > 1:
                    sample = together(config, options, place, device)
                    gc.collect()
                else:
                    sample = alone(config, options)
            except Failed as failure:
                failed.append(f"{switch} {variant}: {failure}")
                continue
            turns[variant].append(sample)
            if options.json is not None and place.rank == 0:
                found = [asdict(row) for row in rows_of(switch, turns)]
                Path(options.json).write_text(json.dumps(found, indent=2) + "\n")
    if place.rank == 0:
        for row in rows_of(switch, turns):
            said = f"{row.step_ms:.1f} ms, ratio {row.ratio:.3f}, same losses: {row.same_losses}"
            print(f"{row.name}: {row.variant}: {said}")
    for line in failed:
        print(f"error: {line}", file=sys.stderr)
    close_mesh()
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"error: {error}")
