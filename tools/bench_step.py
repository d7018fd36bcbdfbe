"""How fast is one whole training step? Ours, HuggingFace's LlamaForCausalLM, and plain torch, in
turns, on this device.

    python tools/bench_step.py [--json FILE]
    python tools/bench_step.py --model llama2-7b --num-layers 16 --seq-length 4096 --dtypes bf16
    --contenders ours-compile hf-compile
    python tools/bench_step.py --families qwen2 qwen3 gemma3_text

A step is forward, backward, clipping and AdamW. All contenders train the same model on the same
random tokens; their losses must agree. Without a shape: dim 512, 8 layers, 4 samples of 512 tokens,
vocabulary 32000. Takes every option of ``pretrain`` except those of data. Each contender is a
process; on a CPU all live at once and take turns, on a GPU each is built anew for its turn, so that
one at a time has the memory. On a CPU all of it ends within about --budget seconds; what is done,
and how long the rest takes, goes to stderr.

torch multiplies bf16 in loops of its own where a processor has no instructions for it, and a step
takes minutes then: contenders that leave their products to torch get --patience seconds for a step
there, and are left out with a line that says so.

Columns: *ratio* is the time of a step over that of the baseline, the first of hf fp32, hf-compile
bf16 and the first contender that takes part, median over rounds, so that below 1 is faster. *MFU*
counts as torchtitan does, *causal* as Megatron-LM does, over the data sheet's peak or, where there
is none (CPUs), over the matmul ceiling. *ceiling*: of the fastest matrix product measured in the
same run, with causal FLOPs.

With --families ours trains LLaMA and models of other families with the same sizes, in turns.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, and no other

import torch

from megatron_llama.config.help import help_text
from megatron_llama.config.megatron_names import MEGATRON
from megatron_llama.config.parse import Parsed, parse
from megatron_llama.config.schema import CheckpointConfig, Config, ModelConfig, TrainingConfig
from megatron_llama.config.sections import config_sections
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.plan.memory import sized
from megatron_llama.errors import ConfigError, UserError, describe
from megatron_llama.metrics.flops import flops_per_token, peak_flops, run_peak
from megatron_llama.model.families import FAMILIES
from megatron_llama.train.setup.resolve import assemble, check
from tools.processor import processor
from tools.step import families
from tools.step.ceiling import matmul_flops
from tools.step.contenders import DTYPES, NAMES, Entry, configured
from tools.step.worker import Failed, Sample, Task, TooSlow, Worker

BASELINES = (Entry("hf", "fp32"), Entry("hf-compile", "bf16"))
AGREEMENT = (("fp32", 2e-4), ("bf16", 2e-2))
"""Largest relative difference of a loss from the baseline's first."""
CEILINGS = 5.0
"""Seconds of a round in which the ceilings are measured."""
MANY = 24
"""Steps that there should be time for, if a second one is to be spent on warm-up."""
SMALL = (
    "--hidden-size 512 --intermediate-size 1376 --num-layers 8 --num-attention-heads 8 "
    "--vocab-size 32000 --seq-length 512 "
    "--micro-batch-size 4"
)


@dataclass(frozen=True)
class StepConfig:
    """Who takes part, and how long."""

    contenders: tuple[str, ...] = ("hf", "torch", "ours", "ours-compile")
    """Of ours, hf, torch, each also with `-compile`, liger (HuggingFace with Liger's kernels; a
    GPU), and hf-fp8, also with `-compile` (HuggingFace with torchao's FP8, whose MFU is of bf16's
    peak)."""
    dtypes: tuple[str, ...] = DTYPES
    """Of weights and activations. Ours keeps fp32 masters and gradients beside bf16, the others are
    bf16 throughout."""
    rounds: int = 6
    """How often contenders take turns."""
    steps: int = 2
    """Timed steps of a turn."""
    warmup: int = 2
    """Steps that are not timed, before the first turn; on a GPU before every turn."""
    threads: int = 0
    """Threads of a contender on a CPU. 0: torch's choice."""
    budget: float = 140.0
    """Seconds, from the start on, in which all of it ends on a CPU, where one round has time to:
    then come fewer rounds, steps of a turn and of warm-up, and fewer contenders. What was left out
    is said. 0: nothing is."""
    patience: float = 10.0
    """Seconds that a step may take, on a processor without instructions for bf16, of a contender
    whose bf16 products are torch's."""
    families: tuple[str, ...] = ()
    """Instead of the contenders: ours as models of these families (their model_type), with the
    sizes of the LLaMA and without windows."""
    emulate_dp: int = 1
    """Ours has the state of one of so many data-parallel ranks, whose messages go nowhere. Others
    have no such mode."""
    json: str | None = None
    """Also write the rows into this file."""


@dataclass(frozen=True)
class Row:
    """One contender, medians over rounds. ``mfu`` and what follows are fractions."""

    name: str
    dtype: str
    tokens_per_second: float
    step_ms: float
    ratio: float
    processor_ratio: float
    """The same of processor time, all threads together: what the clock would say on an idle machine
    with one thread."""
    peak_memory_bytes: int
    mfu: float
    mfu_causal: float
    of_ceiling: float


@dataclass
class Found:
    """What was measured of everybody."""

    samples: dict[Entry, list[Sample]] = field(default_factory=dict)
    failures: dict[Entry, str] = field(default_factory=dict)
    ceilings: dict[str, float] = field(default_factory=dict)
    left_out: dict[Entry, str] = field(default_factory=dict)
    """Why, of contenders that this processor is too slow for."""
    rounds: int = 0


@dataclass(frozen=True)
class Clock:
    """How much of the budget is left."""

    budget: float
    """Seconds; infinite where there is none."""
    begun: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.begun + self.budget - time.monotonic()


def run(
    tasks: Sequence[Task],
    options: StepConfig,
    clock: Clock,
    *,
    resident: bool,
    noted: Callable[[Found], None],
) -> Found:
    """All rounds that there is time for. ``resident``: processes live from the first round to the
    last, and the clock counts. ``noted`` is called after each turn."""
    # Whoever is least likely to get through comes last.
    tasks = sorted(tasks, key=lambda task: task.entry.leaves_bf16_to_torch)
    clock = clock if resident else Clock(math.inf)
    contest = _Contest(options, clock)
    found = contest.found
    if resident:
        for number, task in enumerate(tasks, 1):
            _tell(f"{task.entry.label}, contender {number} of {len(tasks)}")
            contest.attempt(contest.build, task)
    for round_ in range(options.rounds):
        begun = time.monotonic()
        steps = steps_in_time(contest.a_step, options, clock)
        if not steps and found.samples:
            break
        # One round is always run.
        steps = max(1, steps)
        for dtype in options.dtypes:
            rate = matmul_flops(torch.bfloat16 if dtype == "bf16" else torch.float32)
            found.ceilings[dtype] = max(rate, found.ceilings.get(dtype, 0.0))
        start = round_ % len(tasks)
        for task in (*tasks[start:], *tasks[:start]):
            if not resident:
                _tell(f"building {task.entry.label}")
                contest.attempt(contest.build, task)
            contest.attempt(partial(contest.turn, steps=steps), task)
            if not resident and task.entry in contest.workers:
                contest.workers.pop(task.entry).close()
            noted(found)
        found.rounds = round_ + 1
        seconds = time.monotonic() - begun
        rest = min((options.rounds - found.rounds) * seconds, max(0.0, clock.left))
        _tell(
            f"round {found.rounds} of {options.rounds}: {seconds:.0f} s for {steps} steps of each; "
            f"at most {rest:.0f} s to go"
        )
    for worker in contest.workers.values():
        worker.close()
    return found


def _tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


class _Contest:
    """The contenders' processes, and what they have done."""

    def __init__(self, options: StepConfig, clock: Clock) -> None:
        self.found = Found()
        self._clock = clock
        self.workers = dict[Entry, Worker]()
        self._options = options
        self._losses = dict[Entry, tuple[float, ...]]()
        """Of warm-up."""
        self.a_step = dict[Entry, float]()
        """Seconds of the last step."""
        self._longest_build = 0.0

    def attempt(self, work: Callable[[Task], None], task: Task) -> None:
        """Do something with a contender that is not out; it is from now on if that fails."""
        found = self.found
        entry = task.entry
        if entry in found.failures or entry in found.left_out:
            return
        try:
            work(task)
        except TooSlow as slow:
            found.left_out[entry] = str(slow)
            _tell(f"  left out: {slow}")
            if entry in self.workers:
                self.workers.pop(entry).kill()
        except Failed as failure:
            found.failures[entry] = str(failure)

    def build(self, task: Task) -> None:
        """Start a contender, and take its steps of warm-up: at least one, and no more than there is
        time for. Raises TooSlow if there is none for a contender like the slowest so far."""
        begun = time.monotonic()
        longest = max(self.a_step.values(), default=0.0)
        needed = self._longest_build + longest + sum(self.a_step.values()) + CEILINGS
        if self.a_step and self._clock.left < needed:
            raise TooSlow("there is no time for it (--budget)")
        worker = self.workers[task.entry] = Worker(task)
        worker.wait_built()
        patience = self._options.patience if task.entry.leaves_bf16_to_torch else None
        losses: tuple[float, ...] = ()
        while len(losses) < self._options.warmup:
            sample = worker.steps(1, patience)
            losses += sample.losses
            self.a_step[task.entry] = sample.seconds
            _tell(f"  step {len(losses)} of warm-up: {sample.seconds:.1f} s")
            if sample.seconds > self._clock.left / MANY:
                break
        self._losses[task.entry] = losses
        self._longest_build = max(self._longest_build, time.monotonic() - begun)

    def turn(self, task: Task, *, steps: int) -> None:
        """Time some steps. What a contender loses is compared from its first step on."""
        sample = self.workers[task.entry].steps(steps)
        self.a_step[task.entry] = sample.seconds
        samples = self.found.samples.setdefault(task.entry, [])
        before = () if samples else self._losses.get(task.entry, ())
        samples.append(replace(sample, losses=before + sample.losses))


def steps_in_time(seconds: Mapping[Entry, float], options: StepConfig, clock: Clock) -> int:
    """How many steps of a turn there is time for in another round, by the seconds of the last step
    of each contender; 0: for none."""
    known = range(options.steps, 0, -1)
    needed = sum(seconds.values())
    return next((steps for steps in known if steps * needed + CEILINGS < clock.left), 0)


def baseline_of(samples: Mapping[Entry, Sequence[Sample]]) -> Entry:
    """Whose step time is 1."""
    return next((entry for entry in BASELINES if entry in samples), next(iter(samples)))


def rows_of(found: Found, config: Config, peak: float | None) -> list[Row]:
    """One for each contender that got through, in the order in which they were named. ``peak``: of
    the device in bf16."""
    training = config.training
    tokens = training.global_batch_size * training.seq_length
    full, causal = (
        flops_per_token(config.model, training.seq_length, causal=only) for only in (False, True)
    )
    base = found.samples[baseline_of(found.samples)]
    rows = []
    for entry, samples in found.samples.items():
        if entry in found.failures:
            continue
        seconds = statistics.median(sample.seconds for sample in samples)
        ratio = statistics.median(
            own.seconds / other.seconds for own, other in zip(samples, base, strict=False)
        )
        processor = statistics.median(
            own.processor_seconds / other.processor_seconds
            for own, other in zip(samples, base, strict=False)
        )
        rate = tokens / seconds
        ceiling = found.ceilings[entry.dtype]
        memory = max(sample.peak_memory_bytes for sample in samples)
        own = configured(entry, config)
        mfu = rate * full / (run_peak(own, peak) or ceiling)
        mfu_causal = rate * causal / (run_peak(own, peak, causal=True) or ceiling)
        of_ceiling = rate * causal / ceiling
        rows.append(
            Row(
                entry.name,
                entry.dtype,
                rate,
                seconds * 1e3,
                ratio,
                processor,
                memory,
                mfu,
                mfu_causal,
                of_ceiling,
            )
        )
    return rows


def disagreements(samples: Mapping[Entry, Sequence[Sample]]) -> list[str]:
    """Contenders whose first losses are not those of the baseline: they do not compute the same."""
    base = baseline_of(samples)
    bounds = dict(AGREEMENT)
    wrong = []
    expected = samples[base][0].losses
    for entry, own in samples.items():
        bound = max(bounds[entry.dtype], bounds[base.dtype])
        # Where time was short some have taken fewer steps of warm-up.
        worst = max(abs(a - b) / abs(b) for a, b in zip(own[0].losses, expected, strict=False))
        if not worst <= bound:
            got = ", ".join(f"{loss:.5f}" for loss in own[0].losses)
            wrong.append(
                f"{entry.label}: losses {got} are {worst:.1e} away from those of "
                f"{base.label}, at most {bound:.0e}"
            )
    return wrong


def report(rows: Sequence[Row], found: Found, base: Entry) -> Iterator[str]:
    """For people; the ratios come last."""
    for dtype, rate in found.ceilings.items():
        yield f"matmul ceiling {dtype}: {rate / 1e12:.3f} TFLOP/s"
    yield ""
    yield (
        f"{'contender':<20}{'step ms':>10}{'tokens/s':>10}"
        f"{'MFU':>8}{'causal':>8}{'ceiling':>9}{'peak memory':>13}"
    )
    for row in rows:
        shares = f"{row.mfu:>8.1%}{row.mfu_causal:>8.1%}{row.of_ceiling:>9.1%}"
        label = Entry(row.name, row.dtype).label
        speed = f"{row.step_ms:>10.1f}{row.tokens_per_second:>10.0f}"
        yield f"{label:<20}{speed}{shares}{sized(row.peak_memory_bytes):>13}"
    yield from (f"{entry.label:<20}failed: {why}" for entry, why in found.failures.items())
    yield from (f"{entry.label:<20}left out: {why}" for entry, why in found.left_out.items())
    yield (
        f"\nratio of step times to {base.label}: median over rounds (single rounds), and of "
        "processor times"
    )
    for row in rows:
        entry = Entry(row.name, row.dtype)
        pairs = zip(found.samples[entry], found.samples[base], strict=False)
        single = sorted(own.seconds / other.seconds for own, other in pairs)
        yield (
            f"{entry.label:<20}{row.ratio:>8.3f}   ({single[0]:.3f} - "
            f"{single[-1]:.3f}){row.processor_ratio:>10.3f}"
        )


def configuration(parsed: Parsed) -> Config:
    """The shape and the numbers of the optimizer. Raises ConfigError."""
    training = replace(parsed.get(TrainingConfig), train_iters=1)
    config = assemble(replace(parsed, instances={**parsed.instances, TrainingConfig: training}))
    return (
        config
        if config.model.vocab_size
        else replace(config, model=replace(config.model, vocab_size=32000))
    )


def compare_families(config: Config, options: StepConfig) -> int:
    """Run and print how long steps of other families last. Returns 1 if one fails."""
    tasks = families.tasks_of(
        config,
        options.families,
        options.dtypes,
        threads=options.threads,
        world_size=options.emulate_dp,
    )

    def write(found: Found) -> None:
        if options.json is not None:
            table = families.ratios(tasks, found.samples)
            lines = {entry.label: each for entry, each in table.items()}
            Path(options.json).write_text(json.dumps(lines, indent=2) + "\n")

    resident = devices.is_host(devices.accelerator(0))
    clock = Clock(options.budget or math.inf)
    found = run(tasks, options, clock, resident=resident, noted=write)
    print("\n".join(families.report(tasks, found.samples)))
    for entry, why in found.failures.items():
        print(f"error: {entry.label}: {why}", file=sys.stderr)
    return 1 if found.failures else 0


def main(words: list[str]) -> int:
    """Run and print. Returns 1 if contenders fail or do not agree. Raises UserError."""
    sections = (*config_sections(), StepConfig)
    if {"-h", "--help"} & set(words):
        usage = "python tools/bench_step.py [--option value ...]"
        print(help_text(usage, __doc__ or "", sections), end="")
        return 0
    parsed = parse(words, sections, aliases=MEGATRON)
    model = parsed.get(ModelConfig)
    data = parsed.get(CheckpointConfig)
    if not (model.preset or model.hidden_size or data.init_from_hf):
        parsed = parse([*SMALL.split(), *words], sections, aliases=MEGATRON)
    options = parsed.get(StepConfig)
    for flag, given, known in (
        ("--contenders", options.contenders, NAMES),
        ("--dtypes", options.dtypes, DTYPES),
        ("--families", options.families, tuple(FAMILIES)),
    ):
        if unknown := [name for name in given if name not in known]:
            raise ConfigError(
                describe(
                    flag,
                    got=", ".join(unknown),
                    expected=f"of {', '.join(known)}",
                    do="leave the others out",
                )
            )
    config = check(configuration(parsed), options.emulate_dp).config
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.families:
        return compare_families(config, options)
    entries = [Entry(name, dtype) for dtype in options.dtypes for name in options.contenders]
    tasks = [Task(entry, config, options.threads, options.emulate_dp) for entry in entries]
    print(
        f"{processor()}; torch {torch.__version__}, Python {platform.python_version()}", flush=True
    )
    device = devices.accelerator(0)
    peak = peak_flops(devices.name(device))

    def write(found: Found) -> None:
        if options.json is not None:
            rows = rows_of(found, config, peak) if found.samples else []
            Path(options.json).write_text(
                json.dumps([asdict(row) for row in rows], indent=2) + "\n"
            )

    clock = Clock(options.budget or math.inf)
    found = run(tasks, options, clock, resident=devices.is_host(device), noted=write)
    wrong = disagreements(found.samples) if found.samples else []
    rows = rows_of(found, config, peak) if found.samples else []
    if rows:
        print("\n".join(report(rows, found, baseline_of(found.samples))))
        if found.rounds < options.rounds:
            print(f"{found.rounds} of {options.rounds} rounds, by --budget {options.budget:g}")
    for line in (*wrong, *(f"{entry.label}: {why}" for entry, why in found.failures.items())):
        print(f"error: {line}", file=sys.stderr)
    return 1 if wrong or found.failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"error: {error}")
