"""The parts of a check, as commands, with the time that each may take."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from megatron_llama.config.schema import Config, TrainingConfig
from megatron_llama.engine.plan.memory import sized
from megatron_llama.model.presets import PRESETS
from megatron_llama.train.setup.memory import MemoryPlan
from megatron_llama.train.setup.resolve import check
from tools.gpucheck.use import NEED_FP8, NEED_GPU

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
TINY_STEP = (
    f"{TINY} --micro-batch-size 1 --global-batch-size 1 --bf16 --steps 1 --warmup 1 --rounds 2"
)
TINY_TILES = TINY_STEP.replace(
    TINY,
    "--hidden-size 128 --intermediate-size 128 --num-layers 3 --num-attention-heads 1 "
    "--vocab-size 512 --seq-length 64",
)
"""For --fp8: matrices of whole tiles, and a block between the first and the last."""
TINY_PATIENCE = 4
"""How many times as long a tiny part may take."""
AB_LAYERS = 8
"""Blocks in the comparisons of switches: what they change is in every block."""
MARKED = re.compile(r"mark\.(gpu|kernels)\b")
ORACLES = {
    "tests/kernels/test_liger.py": "liger_kernel",
    "tests/kernels/test_torchao.py": "torchao",
}
"""Test files that need a package of another project."""
IN_TILES = ("tests/kernels/test_fp8.py", "tests/model/nn/fp8/test_product.py")
"""Test files of products with a scale for each tile, which not every GPU has."""
WITH_SCALES = ("tests/model/nn/fp8/test_tensorwise.py",)
"""Of products with a scale for each tensor, which some more GPUs have."""
DECISIVE = (
    "tests/parallel/test_device.py",
    "tests/model/nn/test_attention.py",
    "tests/parallel/test_deterministic.py",
    "tests/engine/test_offload_device.py",
    "tests/data/test_upload.py",
    "tests/metrics/test_readback.py",
    "tests/engine/comm/test_streams.py",
)
"""Tests that say whether a step is right on a device. They compile no kernel that a step does not
need."""


SWITCHES_ALONE = (("attention", 1), ("deterministic", 1), ("grad-reduce-in-bf16", EMULATED))
"""Switches that one device can compare, and of how many ranks it has the state."""
SWITCHES_BETWEEN = (
    ("priority", "priority", "--tensor-model-parallel-size 2 --sequence-parallel"),
    ("tp-comm-overlap", "tp-comm-overlap", "--tensor-model-parallel-size 2 --sequence-parallel"),
    ("tp-symm-mem", "tp-symm-mem", "--tensor-model-parallel-size 2 --sequence-parallel"),
    ("pp-ctas", "pp-ctas", "--pipeline-model-parallel-size 2 --global-batch-size 8"),
    ("attention-cp", "attention", "--context-parallel-size 2"),
    ("grad-reduce-in-bf16-dp", "grad-reduce-in-bf16", ""),
)
"""Switches of what several devices send to each other: the part, the switch, and the layout in
which it matters."""


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
    gpus: int = 1
    """How many there are; without, a tiny check leaves out what needs one."""
    flash3_obstacle: str | None = None
    """Why FlashAttention 3 cannot run here."""
    fp8_obstacle: str | None = None
    """Why --fp8 blockwise cannot run here."""
    tensorwise_obstacle: str | None = None
    """Why --fp8 tensorwise cannot run here."""


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
    anything, then the step, then what each switch is worth, last what would be missed least where
    time runs out."""
    parts = [
        _correct(setting),
        _use(setting),
        *(_fitting(setting, *shape, 4096) for shape in SHAPES),
        _kernels(setting),
        *(_switch(setting, name, dp=dp) for name, dp in SWITCHES_ALONE),
        _graphs(setting),
        replace(_switch(setting, "flash-attention-3", dp=1), obstacle=setting.flash3_obstacle),
        replace(_switch(setting, "fp8", dp=1), obstacle=setting.fp8_obstacle),
        _fp8_peer(setting),
        *(_between(setting, *switch) for switch in SWITCHES_BETWEEN),
        *(_emulated(setting, *shape, 4096) for shape in SHAPES),
        _links(setting),
        _offload(setting),
        _tests(setting),
        *(_fitting(setting, *shape, 8192) for shape in SHAPES),
        *(_emulated(setting, *shape, 8192) for shape in SHAPES),
    ]
    if setting.tiny:
        # A host may be loaded by anything, and no figure is wanted: only what hangs is ended.
        parts = [replace(part, seconds=part.seconds * TINY_PATIENCE) for part in parts]
    return parts


def marked(folder: Path) -> list[str]:
    """Test files with something for a GPU. Others are not even read: they may need packages that a
    machine with a GPU lacks."""
    return [
        str(path.relative_to(folder))
        for path in sorted(folder.glob("tests/**/test_*.py"))
        if MARKED.search(path.read_text())
    ]


def _correct(setting: Setting) -> Part:
    """What decides whether anything else means something."""
    return _pytest(setting, Part("correct", "a step is right on the device", DECISIVE, 150))


def _use(setting: Setting) -> Part:
    """What users type."""
    words = ["--tiny", "--jobs", "2", "--seconds", "480"] if setting.tiny else []
    without: tuple[str, ...] = () if setting.gpus else NEED_GPU
    without += NEED_FP8 if setting.tiny or setting.fp8_obstacle is not None else ()
    words += ["--without", ",".join(without)] if without else []
    command = _module("gpucheck.use", words)
    seconds = 125.0 if setting.tiny else 150.0
    return _with_json(setting, Part("use", "small runs of every kind", command, seconds))


def _tests(setting: Setting) -> Part:
    """The other tests that need a GPU."""
    files = [file for file in marked(ROOT) if file not in DECISIVE]
    absent = [file for file, package in ORACLES.items() if find_spec(package) is None]
    reasons = [f"{file}: {ORACLES[file]} is not installed" for file in absent]
    for needing, why in (
        (IN_TILES, setting.fp8_obstacle),
        (WITH_SCALES, setting.tensorwise_obstacle),
    ):
        if why is not None:
            absent += needing
            reasons += [f"{file}: {why}" for file in needing]
    files = [file for file in files if file not in absent]
    title = "all other tests that need a GPU"
    return _pytest(setting, Part("tests", title, tuple(files), 300, absent=tuple(reasons)))


def _pytest(setting: Setting, part: Part) -> Part:
    """A part whose command is still its test files."""
    words = (sys.executable, "-m", "pytest", "-m", "gpu or kernels")
    tiny = ("--collect-only",) if setting.tiny and not setting.gpus else ()
    obstacle = None if find_spec("pytest") is not None else "pytest is not installed"
    return replace(part, command=(*words, *tiny, *part.command), obstacle=obstacle)


def _switch(setting: Setting, name: str, *, dp: int) -> Part:
    """A switch on one device."""
    model = f"--model llama3-8b --num-layers {min(AB_LAYERS, setting.layers or AB_LAYERS)}"
    size = f"{model} --seq-length 8192 --micro-batch-size 1 --global-batch-size {2 * dp} --bf16"
    tiny = TINY_TILES if name == "fp8" else TINY_STEP
    words = tiny.replace("size 1 --bf16", f"size {dp} --bf16") if setting.tiny else size
    if dp > 1:
        words += f" --emulate-dp {dp}"
    title = f"{name}: off and on, 8B, {AB_LAYERS} layers, seq 8192" if not setting.tiny else name
    part = Part(f"ab-{name}", title, _module("gpucheck.ab", [name, *words.split()]), 150)
    return _with_json(setting, part)


def _fp8_peer(setting: Setting) -> Part:
    """Ours in FP8 against HuggingFace with torchao's layers, which have the same recipe."""
    layers = min(AB_LAYERS, setting.layers or AB_LAYERS)
    size = (
        f"--model llama3-8b --num-layers {layers} --seq-length 8192 --micro-batch-size 1 "
        f"--global-batch-size 2 --rounds {setting.rounds} --steps {setting.steps}"
    )
    peer = "hf-fp8" if setting.tiny else "hf-fp8-compile"
    lacking = [name for name in ("transformers", "torchao") if find_spec(name) is None]
    contenders = "ours" if lacking else f"ours {peer}"
    words = TINY_TILES if setting.tiny else f"{size} --bf16"
    words += f" --dtypes bf16 --fp8 tensorwise --fp8-bf16-layers 0 --contenders {contenders}"
    part = Part(
        "step-fp8",
        f"8B in FP8, {layers} layers, seq 8192" if not setting.tiny else "step-fp8, tiny",
        _module("bench_step", words),
        240,
        absent=tuple(f"{peer}: {name} is not installed" for name in lacking),
        obstacle=setting.tensorwise_obstacle,
    )
    return _with_json(setting, part)


def _graphs(setting: Setting) -> Part:
    """Graphs of blocks, with the shapes of one of eight tensor-parallel ranks: its layers take the
    device less time than the host needs to start their kernels."""
    ranks = "2" if setting.tiny else "8"
    model = f"--model llama3-8b --num-layers {min(AB_LAYERS, setting.layers or AB_LAYERS)}"
    size = f"{model} --seq-length 4096 --micro-batch-size 1 --global-batch-size 2 --bf16"
    words = TINY_STEP if setting.tiny else size
    words += f" --tensor-model-parallel-size {ranks} --emulate-dp {ranks}"
    part = Part(
        "ab-graphs",
        f"graphs: off and on, 8B, {AB_LAYERS} layers, seq 4096, one of {ranks} tp ranks",
        _module("gpucheck.ab", ["graphs", *words.split()]),
        150,
        obstacle=None if setting.gpus else "needs a GPU",
    )
    return _with_json(setting, part)


def _between(setting: Setting, name: str, switch: str, words: str) -> Part:
    """A switch of what GPUs send to each other, all of them."""
    launch = f"-m torch.distributed.run --standalone --nproc-per-node {max(2, setting.gpus)}"
    size = (
        f"--model llama3-8b --num-layers {AB_LAYERS} --seq-length 4096 --micro-batch-size 1 --bf16"
    )
    options = (TINY_STEP.replace("--global-batch-size 1 ", "") if setting.tiny else size).split()
    command = (
        sys.executable,
        *launch.split(),
        "-m",
        "tools.gpucheck.ab",
        switch,
        *options,
        *words.split(),
    )
    lacking = f"needs 2 GPUs or more, and {setting.gpus or 'none'} is here"
    obstacle = None if setting.gpus > 1 else lacking
    part = Part(f"ab-{name}", f"{name}: off and on, between GPUs", command, 180, obstacle=obstacle)
    return _with_json(setting, part)


def _kernels(setting: Setting) -> Part:
    words = "--tokens 8 --scale 64 --rounds 1" if setting.tiny else "--rounds 3"
    return _with_json(
        setting, Part("kernels", "kernels by themselves", _module("bench_kernels", words), 150)
    )


def _links(setting: Setting) -> Part:
    part = Part(
        "links",
        "communication hidden, modelled links",
        _module("bench_links", TINY_LINKS if setting.tiny else ""),
        180,
    )
    return _with_json(setting, replace(part, obstacle=None if setting.gpus else "needs a GPU"))


def _offload(setting: Setting) -> Part:
    title = "optimizer state on the host" + ("" if setting.tiny else ", 7B, 12 of 32 layers")
    return _with_json(
        setting,
        Part(
            "offload",
            title,
            _module("bench_offload", TINY_OFFLOAD if setting.tiny else OFFLOAD),
            300,
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
    return _with_json(setting, replace(part, command=(*part.command, *words), seconds=150))


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
    return Part(name, title, _module("bench_step", words), 240)


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
