"""The parts of a check, as commands."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from megatron_llama.config import Config, TrainingConfig
from megatron_llama.memory import USABLE, MemoryPlan
from megatron_llama.presets import PRESETS
from megatron_llama.validate import check

SHAPES = (("7b", "llama2-7b"), ("8b", "llama3-8b"))
LENGTHS = (4096, 8192)
MICROBATCHES = 8
"""In a step: what a large run accumulates, so that the update has the share of a step that it has there."""
EMULATED = 8
"""Data-parallel ranks, of which the whole model is one."""


@dataclass(frozen=True)
class Part:
    """One command. Those with ``json`` write rows there."""

    name: str
    title: str
    """For the table."""
    command: tuple[str, ...]
    json: str | None = None


@dataclass(frozen=True)
class Setting:
    """What the parts depend on."""

    folder: Path
    """Where reports go."""
    memory: int
    """Of the device, bytes."""
    layers: int = 0
    """At most so many in the benches of a step, for a short check; 0: no limit."""
    rounds: int = 2
    steps: int = 4


def configuration(preset: str, seq_length: int, *, layers: int, dp: int) -> Config:
    """A step of the benches, resolved."""
    model = replace(PRESETS[preset], num_hidden_layers=layers or PRESETS[preset].num_hidden_layers)
    sizes = TrainingConfig(seq_length=seq_length, micro_batch_size=1, global_batch_size=MICROBATCHES * dp, train_iters=1, bf16=True)
    return check(Config(model=model, training=sizes), dp).config


def layers_that_fit(preset: str, seq_length: int, memory: int) -> int:
    """The most blocks of a model that train on one device without recomputation, by the plan of memory."""
    for layers in range(PRESETS[preset].num_hidden_layers, 0, -1):
        if MemoryPlan(configuration(preset, seq_length, layers=layers, dp=1), 1).needed("none", 0) <= USABLE * memory:
            return layers
    return 1


def all_parts(setting: Setting) -> list[Part]:
    """In the order in which they run: what is short and decides whether the rest means anything comes first."""
    liger = () if find_spec("liger_kernel") is not None else ("--ignore", "tests/kernels/test_liger.py")
    tests = (sys.executable, "-m", "pytest", *liger, "-m", "gpu or kernels")
    return [
        Part("tests", "tests that need a GPU", tests),
        _with_json(setting, Part("kernels", "kernels by themselves", _module("bench_kernels"))),
        *_steps(setting),
        _with_json(setting, Part("links", "communication hidden, modelled links", _module("bench_links"))),
        _with_json(setting, Part("offload", "optimizer state on the host", _module("bench_offload"))),
    ]


def _steps(setting: Setting) -> Iterator[Part]:
    """Each shape alone against HuggingFace with as many blocks as fit, and whole as one of several ranks."""
    for short, preset in SHAPES:
        for length in LENGTHS:
            fit = layers_that_fit(preset, length, setting.memory)
            layers = min(fit, setting.layers or fit)
            yield _step(setting, f"step-{short}-{length}", short, preset, length, layers=layers, dp=1)
            yield _step(setting, f"step-{short}-{length}-dp{EMULATED}", short, preset, length, layers=setting.layers, dp=EMULATED)


def _step(setting: Setting, name: str, short: str, preset: str, length: int, *, layers: int, dp: int) -> Part:
    whole = PRESETS[preset].num_hidden_layers
    title = f"{short.upper()}, {layers or whole} of {whole} layers, seq {length}" + (f", state of one of {dp} ranks" if dp > 1 else "")
    words = ["--model", preset, "--seq-length", str(length), "--micro-batch-size", "1", "--global-batch-size", str(MICROBATCHES * dp)]
    words += ["--num-layers", str(layers)] if layers else []
    words += ["--dtypes", "bf16", "--rounds", str(setting.rounds), "--steps", str(setting.steps)]
    words += ["--emulate-dp", str(dp), "--contenders", "ours"] if dp > 1 else ["--contenders", "ours", "hf-compile"]
    return _with_json(setting, Part(name, title, (*_module("bench_step"), *words)))


def _module(name: str) -> tuple[str, ...]:
    return sys.executable, "-m", f"tools.{name}"


def _with_json(setting: Setting, part: Part) -> Part:
    path = str(setting.folder / f"{part.name}.json")
    return replace(part, command=(*part.command, "--json", path), json=path)
