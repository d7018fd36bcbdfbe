"""One rank: builds every contender, lets them take turns, and on rank 0 prints what came out.

A window is so many training steps of one contender, one after the other. It holds as many gathers,
reductions and updates of all parameters as steps: it opens on shards only, as an update leaves
them, so the first gathers start with the clock; it closes after the last update, and what that has
sent already is waited for before the next contender, outside the clock. So a step is as long as in
an endless run, a gather that the next forward pass hides is free, and nobody leaves work to others.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_llama.data.loader import Batch
from tools.overlap import report
from tools.overlap.against import PREFIX, Against
from tools.overlap.catalogue import (
    COMPUTE,
    EXPERT_MODES,
    HF,
    HF_MODES,
    MODES,
    SEQUENCE,
    STEPS,
    baseline,
    half_block_seconds,
    mode_named,
    model,
)
from tools.overlap.contender import Contender, Setting
from tools.overlap.job import Job, Sample
from tools.overlap.memory import growth, look, peak_resident
from tools.overlap.waits import Clock

LOSS_TOLERANCE = 1e-3
"""Relative. Contenders with the same arithmetic differ in the order of sums only."""


def builders(against: str | None) -> dict[str, Callable[[Setting], Contender]]:
    """How to make each contender. Imports are put off: a missing one must not stop the others."""

    def other(name: str, setting: Setting) -> Contender:
        assert against is not None
        return Against(Path(against), name.removeprefix(PREFIX), setting)

    def ours(name: str, setting: Setting) -> Contender:
        from .ours import Ours

        mode = mode_named(name)
        assert mode is not None
        return Ours(mode, setting)

    def plain(name: str, setting: Setting) -> Contender:
        from .plain import Compute, Serial

        return Serial(setting) if name == "serial" else Compute(setting)

    def ddp(name: str, setting: Setting) -> Contender:
        from .ddp import Ddp

        return Ddp(setting, zero=name == "ddp-zero")

    def fsdp2(name: str, setting: Setting) -> Contender:
        from .fsdp2 import Fsdp2

        return Fsdp2(setting, reshard=name.endswith("-reshard"))

    def sharded(name: str, setting: Setting) -> Contender:
        from .sharded import Sharded

        mode = mode_named(name)
        assert mode is not None
        return Sharded(mode, setting)

    def hf(maker: Callable[[str, Setting], Contender], name: str, setting: Setting) -> Contender:
        return maker(name, replace(setting, hf=True))

    peers = {
        COMPUTE: plain,
        "serial": plain,
        "ddp": ddp,
        "ddp-zero": ddp,
        "fsdp2": fsdp2,
        "fsdp2-reshard": fsdp2,
    }
    makers = {**peers, **{mode.name: ours for mode in MODES + EXPERT_MODES}}
    makers |= {PREFIX + mode.name: other for mode in MODES}
    makers |= {HF + name: partial(hf, peers[name]) for name in peers}
    makers |= {name: partial(hf, sharded) for name in HF_MODES}
    return {name: partial(maker, name) for name, maker in makers.items()}


def build(
    names: tuple[str, ...], setting: Setting, against: str | None = None
) -> dict[str, Contender]:
    """All contenders. One that cannot be built ends the run, by name."""
    makers = builders(against)
    contenders = {}
    for name in names:
        try:
            contenders[name] = makers[name](setting)
        except Exception as error:
            sys.exit(
                f"error: contender {name} cannot be built on torch {torch.__version__}: "
                f"{type(error).__name__}: {error}"
            )
        dist.barrier()
    return contenders


def batch_of(number: int, rank: int) -> Batch:
    """The batch of one step, the same for all contenders."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    ids = torch.randint(0, model().vocab_size, (SEQUENCE + 1, 1), generator=generator)
    return Batch(ids[:-1], ids[1:])


def sent_bytes() -> int:
    """Bytes that left this host's interface."""
    with open("/proc/self/net/dev") as table:
        return next(int(line.split(":")[1].split()[8]) for line in table if "eth0:" in line)


@dataclass(frozen=True)
class Totals:
    """Of a whole window. Times are those of the slowest rank, everything else is the mean over
    ranks."""

    seconds: float
    nic_bytes: float
    payload_bytes: float
    cpu_seconds: float
    loss: float
    growth: float
    peak_growth: float


def window(contender: Contender, batches: list[Batch], clock: Clock) -> Totals:
    """Let a contender train, from a barrier to a barrier."""
    clock.restart()
    gc.collect()
    dist.barrier()
    payload = contender.payload_bytes() or 0.0
    sent = sent_bytes()
    cpu = time.process_time()
    begin = time.perf_counter()
    loss = torch.zeros(())
    moments = []
    peak_resident()
    contender.begin()
    for batch in batches:
        loss = contender.step(batch)
        moments.append(look())
    seconds = time.perf_counter() - begin
    contender.drain()
    cpu = time.process_time() - cpu
    dist.barrier()
    grown = growth(moments) if len(moments) > 2 else (0, 0)
    most = torch.tensor([seconds, *grown], dtype=torch.float64)
    means = torch.tensor(
        [sent_bytes() - sent, (contender.payload_bytes() or 0.0) - payload, cpu, float(loss)],
        dtype=torch.float64,
    )
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(means.div_(dist.get_world_size()))
    return Totals(most[0].item(), *means.tolist(), *most[1:].tolist())


def sample(totals: Totals, empty: Totals, steps: int, *, recorded: bool) -> Sample:
    """One step of a window. ``empty``: a window without steps. What is gathered for the first of
    them, the last one gathers again."""
    return Sample(
        seconds=totals.seconds / steps,
        nic_bytes=(totals.nic_bytes - empty.nic_bytes) / steps,
        payload_bytes=(totals.payload_bytes - empty.payload_bytes) / steps if recorded else None,
        cpu_seconds=totals.cpu_seconds / steps,
        loss=totals.loss,
        growth=totals.growth,
        peak_growth=totals.peak_growth,
    )


def run(job: Job, rank: int) -> dict[str, list[Sample]]:
    """Every contender once per round, in random order, after some steps that open connections."""
    begin = time.perf_counter()
    clock = Clock()
    contenders = build(job.names, Setting(rank, job.hosts, clock, experts=job.experts), job.against)
    numbers = count()
    dice = random.Random(0)
    order = list(job.names)
    gc.freeze()
    gc.disable()  # collected before windows instead
    first = batch_of(next(numbers), rank)
    empty = {name: _prepare(contender, first, clock) for name, contender in contenders.items()}
    if rank == 0:
        print(f"ready: {time.perf_counter() - begin:.0f} s", flush=True)
    clock.forward_seconds = half_block_seconds(job.hosts)
    samples: dict[str, list[Sample]] = {name: [] for name in order}
    for round_ in range(job.rounds):
        begin = time.perf_counter()
        batches = [batch_of(next(numbers), rank) for _ in range(STEPS)]
        dice.shuffle(order)
        for name in order:
            recorded = contenders[name].payload_bytes() is not None
            samples[name].append(
                sample(
                    window(contenders[name], batches, clock), empty[name], STEPS, recorded=recorded
                )
            )
        if rank == 0:
            print(
                f"round {round_ + 1} of {job.rounds}: {time.perf_counter() - begin:.0f} s",
                flush=True,
            )
    return samples


def _prepare(contender: Contender, batch: Batch, clock: Clock) -> Totals:
    """Open connections, allocate what is allocated once, and look at a window without steps. The
    order of a user's module is known after its first step."""
    window(contender, [batch, batch], clock)
    return window(contender, [], clock)


def stray(samples: dict[str, list[Sample]]) -> list[str]:
    """Contenders that train something else than the others: same batches, same arithmetic, another
    loss."""
    alike = [
        n
        for n in samples
        if n != baseline(n) and ((mode := mode_named(n)) is None or (mode.clip and not mode.bf16))
    ]
    losses = {name: samples[name][-1].loss for name in alike}
    middle = sorted(losses.values())[len(losses) // 2] if losses else 0.0
    return [
        f"{name} has loss {loss:.5f}"
        for name, loss in losses.items()
        if abs(loss - middle) > LOSS_TOLERANCE * middle
    ]


def go_first() -> None:
    """Ahead of other processes of this machine, whose load is no part of what is measured. Before
    any thread is started."""
    os.setpriority(os.PRIO_PROCESS, 0, -20)
    group = Path(
        "/proc/self/autogroup"
    )  # where sessions share the cores equally, whatever the priority of their processes
    if group.exists():
        group.write_text("-20")


def main() -> None:
    """Run a job, given as one argument."""
    go_first()
    warnings.filterwarnings("ignore")  # of torch, about its own ways
    job = Job.load(sys.argv[1])
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    samples = run(job, rank)
    if rank == 0:
        report.write(job, samples)
    dist.barrier()  # a rank that leaves takes the others with it
    # Another optimizer makes other weights of the same first step.
    muon = {mode.name for mode in MODES if mode.optimizer == "muon"}
    wrong = stray({name: found for name, found in samples.items() if name not in muon})
    if wrong:
        sys.exit(f"error: not all contenders train the same model: {'; '.join(wrong)}")
    sys.stdout.flush()
    dist.barrier()
    # The threads of so many process groups and engines need no orderly end.
    os._exit(0)


if __name__ == "__main__":
    main()
