"""How long does the device wait for an optimizer on the host? Every mode of --optimizer-offload,
waiting for everything at once, others.

    python tools/bench_offload.py [--json FILE]
    python tools/bench_offload.py --model llama2-7b --num-layers 12 --seq-length 4096
    --global-batch-size 4 --bf16

The second one is for a GPU: of this size everybody's state fits into 128 GiB of the host, that of
DeepSpeed's ZenFlow included (36 bytes an element). Contenders take turns, ``--rounds`` times; every
figure is a median over rounds, and behind the slash is the least that it can be. Takes every option
of ``pretrain`` except those of data: tokens are random. One process: what links add,
bench_overlap.sh measures.

On a GPU everything is real: LLaMA-2 7B in bf16 with four microbatches of 4096 tokens unless options
name another model; the bus and the host's memory are measured first, for the bounds. On a CPU the
device is modelled: its compute, copies and the host's updates are timed waits (``--compute-ms``,
``--copy-ms``, ``--update-ms``), everything else is the engine at work on a small model.

*device idle*: the share of a step in which the computation waited for parameters, gradients, the
norm or the host, as the engine records it. *host*: the time of the worker, without its waiting.
*kept, redone*: buckets updated before the norm was known, by what came of it.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, and no other

import torch

from megatron_llama.config.help import help_text
from megatron_llama.config.megatron_names import MEGATRON
from megatron_llama.config.parse import Parsed, parse
from megatron_llama.config.schema import Config, ModelConfig, ParallelConfig, TrainingConfig
from megatron_llama.config.sections import config_sections
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.groups import close_mesh
from megatron_llama.engine.offload_options import NONE, ZENFLOW
from megatron_llama.engine.plan.zenflow import longest_window
from megatron_llama.errors import ConfigError, UserError, describe
from megatron_llama.train.setup.resolve import assemble, check
from tools.offload.catalogue import (
    BUCKET_ELEMENTS,
    MODES,
    SMALL,
    Mode,
    Numbers,
    configuration,
    elements,
    numbers_of,
)
from tools.offload.machine import bus_seconds, update_seconds
from tools.offload.modelled import Speeds
from tools.offload.others import PEERS, Other, Peer, obstacle
from tools.offload.ours import Ours, Sample
from tools.offload.report import Bound, Row, row_of, table
from tools.processor import processor

CONTENDERS = {entry.name: entry for entry in (*MODES, *PEERS)}


@dataclass(frozen=True)
class BenchOffloadConfig:
    """Who takes part, how long, and how fast a modelled machine is."""

    contenders: tuple[str, ...] = tuple(CONTENDERS)
    """By name."""
    rounds: int = 3
    """How often contenders take turns."""
    steps: int = 4
    """Timed steps of a turn; a multiple of ZenFlow's window counts its updates evenly."""
    warmup: int = 2
    """Steps that are not timed, before the first turn of a contender; on a GPU, where each is built
    anew, before every turn. ZenFlow's are a window more."""
    compute_ms: float = 100.0
    """Modelled: of a microbatch on the device."""
    copy_ms: float = 30.0
    """Modelled: of four bytes of every element, in one direction."""
    update_ms: float = 60.0
    """Modelled: of all elements on the host."""
    json: str | None = None
    """Also write the rows into this file."""


class Bench:
    """All contenders of one run."""

    def __init__(self, config: Config, options: BenchOffloadConfig, device: torch.device) -> None:
        self._config = config
        self._options = options
        self._device = device
        self._resident = devices.is_host(device)
        self._speeds = _speeds(options, config) if self._resident else None
        self._built: dict[str, Ours | Other] = {}
        self._machine: Numbers | None = None
        self.samples: dict[str, list[Sample]] = {}
        self.absent: dict[str, str] = {}
        """Who cannot take part, and why."""

    def run(self) -> None:
        """All rounds."""
        names = self._options.contenders
        for round_ in range(self._options.rounds):
            start = round_ % len(names)
            for name in (*names[start:], *names[:start]):
                if name not in self.absent:
                    self._turn(name)
        for name in list(self._built):
            self._built.pop(name).close()

    def _turn(self, name: str) -> None:
        print(name, file=sys.stderr, flush=True)
        entry = CONTENDERS[name]
        expected = (
            (UserError, torch.OutOfMemoryError) if isinstance(entry, Mode) else Exception
        )  # others fail in ways of their own
        try:
            if name not in self._built:
                self._built[name] = self._build(entry)
                self._built[name].steps(self._warmup(entry))
            self.samples.setdefault(name, []).append(self._built[name].steps(self._options.steps))
        except expected as error:
            self.absent[name] = str(error).partition("\n")[0] or type(error).__name__
            self.samples.pop(name, None)
            self._built.pop(name, None)
        if not self._resident:
            if name in self._built:
                self._built.pop(name).close()
            gc.collect()

    def _warmup(self, entry: Mode | Peer) -> int:
        if isinstance(entry, Mode) and entry.offload == ZENFLOW:
            return self._options.warmup + longest_window(configuration(entry, self._config).zenflow)
        return self._options.warmup

    def _build(self, entry: Mode | Peer) -> Ours | Other:
        if isinstance(entry, Mode):
            return Ours(entry, self._config, self._device, self._speeds)
        if why := obstacle(entry, self._device, elements(self._config)):
            raise UserError(why)
        return Other(entry, self._config, self._device)

    def whole_rounds(self) -> None:
        """Forget what some have had their turn in and others not."""
        fewest = min(map(len, self.samples.values()), default=0)
        self.samples = {name: found[:fewest] for name, found in self.samples.items()}

    def rows(self) -> list[Row]:
        """In the order in which contenders were named."""
        machine = self.machine()
        base = next((mode.name for mode in MODES if mode.offload == NONE), "")
        rows = []
        for name in self._options.contenders:
            if name in self.samples:
                found = self.samples[name]
                entry = CONTENDERS[name]
                rows.append(
                    row_of(
                        name,
                        found,
                        self.samples.get(base, []),
                        self._bound(entry, machine),
                        machine,
                    )
                )
        return rows

    def _bound(self, entry: Mode | Peer, machine: Numbers) -> Bound:
        if not isinstance(entry, Mode):
            return Bound(entry.bound(machine), machine.update, None)
        if entry.offload == NONE:
            return Bound(entry.bound(machine), 0.0, 0.0)
        n = numbers_of(entry, configuration(entry, self._config), machine)
        crossing = n.cold * (n.narrow + n.narrow / n.window) if n.window > 1 else n.wide + n.narrow
        return Bound(entry.bound(n), n.cold * n.update / n.window, float(crossing))

    def machine(self) -> Numbers:
        """What the bounds are made of. A GPU's computation is the shortest step of ours, less its
        waiting."""
        if self._machine is None:
            self._machine = self._measured()
        return self._machine

    def _measured(self) -> Numbers:
        training = self._config.training
        microbatches = training.global_batch_size // training.micro_batch_size
        if self._speeds is not None:
            third = self._speeds.compute / 3
            return Numbers(microbatches, third, 2 * third, self._speeds.copy, self._speeds.update)
        busy = [
            s.seconds - s.idle_seconds
            for samples in self.samples.values()
            for s in samples
            if s.idle_seconds is not None
        ]
        forward = (
            min(busy, default=0.0)
            / microbatches
            / (4 if self._config.parallel.recompute_granularity == "full" else 3)
        )
        backward = min(busy, default=0.0) / microbatches - forward
        total = elements(self._config)
        cores = self._config.offload.offload_cores
        return Numbers(
            microbatches,
            forward,
            backward,
            bus_seconds(self._device) * total,
            update_seconds(cores) * total,
        )


def _speeds(options: BenchOffloadConfig, config: Config) -> Speeds:
    return Speeds(
        options.compute_ms / 1e3, options.update_ms / 1e3, options.copy_ms / 1e3, elements(config)
    )


def resolved(parsed: Parsed, device: torch.device) -> Config:
    """The shape and the numbers of the optimizer. Raises ConfigError."""
    model = parsed.get(ModelConfig)
    training = parsed.get(TrainingConfig)
    parallel = parsed.get(ParallelConfig)
    small = None
    if not model.preset and not model.hidden_size:
        if devices.is_host(device):
            small = SMALL
            parallel = replace(parallel, reduce_bucket_size=BUCKET_ELEMENTS)
            training = replace(training, seq_length=16, micro_batch_size=1, global_batch_size=4)
        else:
            model = replace(model, preset="llama2-7b")
            training = replace(
                training, seq_length=4096, micro_batch_size=1, global_batch_size=4, bf16=True
            )
    chosen = {
        ModelConfig: model,
        TrainingConfig: replace(training, train_iters=1),
        ParallelConfig: parallel,
    }
    config = assemble(replace(parsed, instances={**parsed.instances, **chosen}), trained=small)
    vocabulary = config.model.vocab_size or 32000
    return check(replace(config, model=replace(config.model, vocab_size=vocabulary)), 1).config


def main(words: list[str]) -> None:
    """Run, print the table, write the JSON. Raises UserError."""
    sections = (*config_sections(), BenchOffloadConfig)
    if {"-h", "--help"} & set(words):
        usage = "python tools/bench_offload.py [--option value ...]"
        print(help_text(usage, __doc__ or "", sections), end="")
        return
    parsed = parse(words, sections, aliases=MEGATRON)
    options = parsed.get(BenchOffloadConfig)
    device = devices.accelerator(0)
    if unknown := [name for name in options.contenders if name not in CONTENDERS]:
        expected = f"of {', '.join(CONTENDERS)}"
        raise ConfigError(
            describe(
                "--contenders", got=", ".join(unknown), expected=expected, do="leave the others out"
            )
        )
    config = resolved(parsed, device)
    if devices.is_host(device):
        torch.set_num_threads(1)  # small products: more threads only get in each other's way
    bench = Bench(config, options, device)
    try:
        bench.run()
    except KeyboardInterrupt:
        print("stopped; until then:", file=sys.stderr)
        bench.whole_rounds()
    rows = bench.rows()
    print(title(config, bench.machine(), device), *table(rows, bench.absent), sep="\n")
    if options.json is not None:
        found = {
            "machine": asdict(bench.machine()),
            "rows": [asdict(row) for row in rows],
            "absent": bench.absent,
        }
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n")


def title(config: Config, n: Numbers, device: torch.device) -> str:
    """What was run, and the numbers that the bounds are made of."""
    kind = "modelled" if devices.is_host(device) else devices.name(device)
    parts = {
        "forward": n.forward,
        "backward": n.backward,
        "bus, 4 bytes of each": n.bus,
        "update": n.update,
    }
    times = ", ".join(f"{what} {seconds * 1e3:.1f} ms" for what, seconds in parts.items())
    return (
        f"{processor()}\n{kind} device, {elements(config) / 1e6:.2f} M elements, {n.microbatches} "
        f"microbatches; {times}"
    )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
    finally:
        close_mesh()
