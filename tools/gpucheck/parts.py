"""The parts of a check, as commands, with the time that each may take."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from megatron_llama.config.presets import PRESETS
from megatron_llama.config.schema import Config, TrainingConfig
from megatron_llama.plans.memory import MemoryPlan, sized
from megatron_llama.plans.resolve import check

ROOT = Path(__file__).parent.parent.parent
SHAPES = (("7b", "llama2-7b"), ("8b", "llama3-8b"))
MICROBATCHES = 8
"""In a step: what a large run accumulates, so that the update has the share of a step that it has
there."""
EMULATED = 8
"""Data-parallel ranks, of which the whole model is one."""
FULL = 0.85
"""Of the device's memory, by the plan: the rest is for the driver, the workspaces of libraries, and
gaps. A bench that runs out of memory shows nothing."""
OFFLOAD = (
    "--model llama2-7b --num-layers 12 --seq-length 4096 --global-batch-size 4 --bf16 --rounds 1"
)
"""Of this size everybody's state fits into 128 GiB of the host."""
TINY = (
    "--hidden-size 64 --intermediate-size 176 --num-layers 2 --num-attention-heads 4 "
    "--vocab-size 512 --seq-length 64"
)
TINY_OFFLOAD = (
    f"{TINY} --global-batch-size 2 --rounds 1 --steps 1 --warmup 1 --compute-ms 1 --copy-ms 1 "
    "--update-ms 1"
)
TINY_LINKS = "--layers 1 --seq-length 64 --ranks 2 --rounds 1 --gigabytes-per-second 370"
MARKED = re.compile(r"mark\.(gpu|kernels)\b")


@dataclass(frozen=True)
class Part:
    """One command. Those with ``json`` write rows there."""

    name: str
    title: str
    """For the table."""
    command: tuple[str, ...]
    seconds: float
    """The most that it may take."""
    json: str | None = None
    absent: tuple[str, ...] = ()
    """What takes no part in it, and why."""
    obstacle: str | None = None
    """Why it cannot run here."""


@dataclass(frozen=True)
class Setting:
    """What the parts depend on."""

    folder: Path
    """Where reports go."""
    memory: int
    """Of the device, bytes."""
    layers: int = 0
    """At most so many in the benches of a step, for a short check; 0: no limit."""
    rounds: int = 1
    steps: int = 4
    tiny: bool = False
    """Models of a few thousand parameters: shows that the check works, and nothing else."""
    gpu: bool = True
    """Whether there is one; without, a tiny check leaves out what needs it."""


def configuration(preset: str, seq_length: int, *, layers: int, dp: int) -> Config:
    """A step of the benches, resolved."""
    model = replace(PRESETS[preset], num_hidden_layers=layers or PRESETS[preset].num_hidden_layers)
    sizes = TrainingConfig(
        seq_length=seq_length,
        micro_batch_size=1,
        global_batch_size=MICROBATCHES * dp,
        train_iters=1,
        bf16=True,
    )
    return check(Config(model=model, training=sizes), dp).config


@cache
def planned_bytes(preset: str, seq_length: int, *, layers: int, dp: int) -> int:
    """Memory of a step, without recomputation."""
    return MemoryPlan(configuration(preset, seq_length, layers=layers, dp=dp), dp).needed("none", 0)


def layers_that_fit(preset: str, seq_length: int, memory: int) -> int:
    """The most blocks of a model that train on one device."""
    counts = range(PRESETS[preset].num_hidden_layers, 0, -1)
    return next(
        (
            layers
            for layers in counts
            if planned_bytes(preset, seq_length, layers=layers, dp=1) <= FULL * memory
        ),
        1,
    )


def all_parts(setting: Setting) -> list[Part]:
    """In the order in which they run: first what is short and decides whether the rest means
    anything, last what would be missed least where time runs out."""
    return [
        _tests(setting),
        _kernels(setting),
        *(_fitting(setting, *shape, 4096) for shape in SHAPES),
        *(_emulated(setting, *shape, 4096) for shape in SHAPES),
        _links(setting),
        _offload(setting),
        *(_fitting(setting, *shape, 8192) for shape in SHAPES),
        *(_emulated(setting, *shape, 8192) for shape in SHAPES),
    ]


def marked(folder: Path) -> list[str]:
    """Test files with something for a GPU. Others are not even read: they may need packages that a
    machine with a GPU lacks."""
    return [
        str(path.relative_to(folder))
        for path in sorted(folder.glob("tests/**/test_*.py"))
        if MARKED.search(path.read_text())
    ]


def _tests(setting: Setting) -> Part:
    files = marked(ROOT)
    absent = []
    if find_spec("liger_kernel") is None:
        files.remove("tests/kernels/test_liger.py")
        absent.append("tests/kernels/test_liger.py: liger_kernel is not installed")
    command = (
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu or kernels",
        *(("--collect-only",) if setting.tiny else ()),
        *files,
    )
    obstacle = None if find_spec("pytest") is not None else "pytest is not installed"
    return Part(
        "tests", "tests that need a GPU", command, 360, absent=tuple(absent), obstacle=obstacle
    )


def _kernels(setting: Setting) -> Part:
    words = "--tokens 8 --scale 64 --rounds 1" if setting.tiny else "--rounds 3"
    return _with_json(
        setting, Part("kernels", "kernels by themselves", _module("bench_kernels", words), 180)
    )


def _links(setting: Setting) -> Part:
    part = Part(
        "links",
        "communication hidden, modelled links",
        _module("bench_links", TINY_LINKS if setting.tiny else ""),
        240,
    )
    return _with_json(setting, replace(part, obstacle=None if setting.gpu else "needs a GPU"))


def _offload(setting: Setting) -> Part:
    title = "optimizer state on the host" + ("" if setting.tiny else ", 7B, 12 of 32 layers")
    return _with_json(
        setting,
        Part(
            "offload",
            title,
            _module("bench_offload", TINY_OFFLOAD if setting.tiny else OFFLOAD),
            420,
        ),
    )


def _fitting(setting: Setting, short: str, preset: str, length: int) -> Part:
    """Against HuggingFace, with as many blocks as fit."""
    fit = layers_that_fit(preset, length, setting.memory)
    contenders, absent = _others(tiny=setting.tiny)
    part = _step(
        setting,
        f"step-{short}-{length}",
        short,
        preset,
        length,
        layers=min(fit, setting.layers or fit),
        dp=1,
    )
    return _with_json(
        setting,
        replace(part, command=(*part.command, "--contenders", "ours", *contenders), absent=absent),
    )


def _others(*, tiny: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """With whom the project is compared, and who is missing. What is tiny is not compiled: that
    takes minutes."""
    compiled = "" if tiny else "-compile"
    if find_spec("transformers") is not None:
        return (f"hf{compiled}",), ()
    return (f"torch{compiled}",), (f"hf{compiled}: transformers is not installed",)


def _emulated(setting: Setting, short: str, preset: str, length: int) -> Part:
    """Whole, as one of several ranks."""
    part = _step(
        setting,
        f"step-{short}-{length}-dp{EMULATED}",
        short,
        preset,
        length,
        layers=setting.layers,
        dp=EMULATED,
    )
    words = ("--emulate-dp", str(EMULATED), "--contenders", "ours")
    return _with_json(setting, replace(part, command=(*part.command, *words), seconds=180))


def _step(
    setting: Setting, name: str, short: str, preset: str, length: int, *, layers: int, dp: int
) -> Part:
    whole = PRESETS[preset].num_hidden_layers
    title = f"{short.upper()}, {layers or whole} of {whole} layers, seq {length}" + (
        f", state of one of {dp} ranks" if dp > 1 else ""
    )
    title += f", {sized(planned_bytes(preset, length, layers=layers, dp=dp))} planned"
    words = [
        "--model",
        preset,
        "--seq-length",
        str(length),
        *(("--num-layers", str(layers)) if layers else ()),
    ]
    if setting.tiny:
        title = f"{name}, tiny"
        words = TINY.split()
    words += [
        "--micro-batch-size",
        "1",
        "--global-batch-size",
        str((1 if setting.tiny else MICROBATCHES) * dp),
    ]
    words += ["--dtypes", "bf16", "--rounds", str(setting.rounds), "--steps", str(setting.steps)]
    return Part(name, title, _module("bench_step", words), 300)


def _module(name: str, words: str | Sequence[str]) -> tuple[str, ...]:
    return (
        sys.executable,
        "-m",
        f"tools.{name}",
        *(words.split() if isinstance(words, str) else words),
    )


def _with_json(setting: Setting, part: Part) -> Part:
    path = str(setting.folder / f"{part.name}.json")
    return replace(part, command=(*part.command, "--json", path), json=path)
