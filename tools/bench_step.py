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
one at a time has the memory.

Columns: *ratio* is the time of a step over that of the baseline, the first of hf fp32, hf-compile
bf16 and the first contender that takes part, median over rounds, so that below 1 is faster. *MFU*
counts as torchtitan does, *causal* as Megatron-LM does, over the data sheet's peak or, where there
is none (CPUs), over the matmul ceiling. *ceiling*: of the fastest matrix product measured in the
same run, with causal FLOPs.

With --families ours trains LLaMA and models of other families with the same sizes, in turns.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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
from megatron_llama.metrics.flops import flops_per_token, peak_flops
from megatron_llama.model.families import FAMILIES
from megatron_llama.train.setup.resolve import assemble, check
from tools.step import families
from tools.step.ceiling import matmul_flops
from tools.step.contenders import DTYPES, NAMES, Entry
from tools.step.worker import Failed, Sample, Task, Worker

BASELINES = (Entry("hf", "fp32"), Entry("hf-compile", "bf16"))
AGREEMENT = (("fp32", 2e-4), ("bf16", 2e-2))
"""Largest relative difference of a loss from the baseline's first."""
SMALL = (
    "--hidden-size 512 --intermediate-size 1376 --num-layers 8 --num-attention-heads 8 "
    "--vocab-size 32000 --seq-length 512 "
    "--micro-batch-size 4"
)


@dataclass(frozen=True)
class StepConfig:
    """Who takes part, and how long."""

    contenders: tuple[str, ...] = ("hf", "torch", "ours", "ours-compile")
    """Of ours, hf, torch, each also with `-compile`, and liger (HuggingFace with Liger's kernels; a
    GPU)."""
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


def run(
    tasks: Sequence[Task], options: StepConfig, *, resident: bool, noted: Callable[[Found], None]
) -> Found:
    """All rounds. ``resident``: processes live from the first round to the last. ``noted`` is
    called after each turn."""
    found = Found()
    workers = dict[Entry, Worker]()
    for round_ in range(options.rounds):
        for dtype in options.dtypes:
            rate = matmul_flops(torch.bfloat16 if dtype == "bf16" else torch.float32)
            found.ceilings[dtype] = max(rate, found.ceilings.get(dtype, 0.0))
        start = round_ % len(tasks)
        for task in (*tasks[start:], *tasks[:start]):
            if task.entry in found.failures:
                continue
            try:
                _turn(task, workers, found, options)
            except Failed as failure:
                found.failures[task.entry] = str(failure)
            if not resident and task.entry in workers:
                workers.pop(task.entry).close()
            noted(found)
    for worker in workers.values():
        worker.close()
    return found


def _turn(task: Task, workers: dict[Entry, Worker], found: Found, options: StepConfig) -> None:
    losses: tuple[float, ...] = ()
    if task.entry not in workers:
        print(f"building {task.entry.label}", file=sys.stderr, flush=True)
        workers[task.entry] = Worker(task)
        losses = workers[task.entry].steps(options.warmup).losses
    sample = workers[task.entry].steps(options.steps)
    found.samples.setdefault(task.entry, []).append(replace(sample, losses=losses + sample.losses))


def baseline_of(samples: Mapping[Entry, Sequence[Sample]]) -> Entry:
    """Whose step time is 1."""
    return next((entry for entry in BASELINES if entry in samples), next(iter(samples)))


def rows_of(found: Found, config: Config, peak: float | None) -> list[Row]:
    """One for each contender that got through, in the order in which they were named."""
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
        mfu = rate * full / (peak or ceiling)
        mfu_causal = rate * causal / (peak or ceiling)
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
        worst = max(abs(a - b) / abs(b) for a, b in zip(own[0].losses, expected, strict=True))
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


def processor() -> str:
    """What this machine computes with, and whether it has instructions for bf16 products."""
    device = devices.accelerator(0)
    if not devices.is_host(device):
        return devices.name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = {word for line in lines if line.startswith("flags") for word in line.split()}
    has = ", ".join(
        f"{name} {'yes' if name in flags else 'no'}"
        for name in ("avx512f", "avx512_bf16", "amx_bf16")
    )
    return f"{devices.name(device)}, {torch.get_num_threads()} threads; {has}"


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
    found = run(tasks, options, resident=resident, noted=write)
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

    found = run(tasks, options, resident=devices.is_host(device), noted=write)
    wrong = disagreements(found.samples) if found.samples else []
    rows = rows_of(found, config, peak) if found.samples else []
    if rows:
        print("\n".join(report(rows, found, baseline_of(found.samples))))
    for line in (*wrong, *(f"{entry.label}: {why}" for entry, why in found.failures.items())):
        print(f"error: {line}", file=sys.stderr)
    return 1 if wrong or found.failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"error: {error}")
