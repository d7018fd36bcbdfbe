"""One step of our own trainer as LLaMA and as models of other families with the same sizes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from megatron_llama.config.schema import Config, ModelConfig
from megatron_llama.metrics.flops import flops_per_token
from megatron_llama.model.families import FAMILIES
from tools.step.contenders import Entry
from tools.step.worker import Sample, Task

LLAMA = "llama"


def as_family(model: ModelConfig, family: str) -> ModelConfig:
    """Return a LLaMA with everything that a family's models always have, but for windows, which
    save work: ``plan`` and the FLOPs count them."""
    declared = FAMILIES[family].complete(replace(model, model_type=family), ())
    return replace(
        declared,
        sliding_window=0,
        layer_types=(),
        rope_local_base_freq=0.0,
        tie_word_embeddings=model.tie_word_embeddings,
    )


def tasks_of(
    config: Config, families: Sequence[str], dtypes: Sequence[str], *, threads: int, world_size: int
) -> list[Task]:
    """Return a task for each dtype and each model, LLaMA first."""
    return [
        Task(
            Entry(f"ours-{family}", dtype),
            replace(config, model=as_family(config.model, family)),
            threads,
            world_size,
        )
        for dtype in dtypes
        for family in dict.fromkeys((LLAMA, *families))
    ]


def ratios(
    tasks: Sequence[Task], samples: Mapping[Entry, Sequence[Sample]], clock: str = "seconds"
) -> dict[Entry, list[float]]:
    """Return, for each model and round, the time of its step over that of LLaMA's in the same
    dtype, as if both had the same FLOPs. ``clock``: ``seconds`` or ``processor_seconds``."""
    flops = {
        task.entry: flops_per_token(task.config.model, task.config.training.seq_length, causal=True)
        for task in tasks
    }
    found = {}
    for entry, own in samples.items():
        base = Entry(f"ours-{LLAMA}", entry.dtype)
        work = flops[base] / flops[entry]
        pairs = zip(own, samples.get(base, ()), strict=False)
        found[entry] = [
            work * getattr(mine, clock) / getattr(other, clock) for mine, other in pairs
        ]
    return found


def report(tasks: Sequence[Task], samples: Mapping[Entry, Sequence[Sample]]) -> Iterator[str]:
    """For people."""
    yield (
        "time of a step at equal FLOPs over LLaMA's: median over rounds (single rounds), and of "
        "processor time"
    )
    processor = ratios(tasks, samples, "processor_seconds")
    for entry, each in ratios(tasks, samples).items():
        if each:
            milliseconds = 1e3 * statistics.median(sample.seconds for sample in samples[entry])
            yield (
                f"{entry.label:<24}{statistics.median(each):>8.3f}   ({min(each):.3f} - "
                f"{max(each):.3f}){statistics.median(processor[entry]):>10.3f}"
                f"{milliseconds:>12.1f} ms"
            )
