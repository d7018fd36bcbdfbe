"""What ``plan calibrate`` has timed, and the coefficients that it comes to. Standard library only;
``calibrate/`` does the timing.

A point is the kind of what was timed, its sizes, and seconds:

| kind | sizes | seconds of |
|---|---|---|
| product | m, n, k | a product of [m, k] with [k, n] |
| attention | heads, tokens, head_dim | causal attention, forward |
| copy | bytes | a copy, read and written |
| norm, gate | elements | an RMS norm; an activation times another tensor |
| step | layers, hidden, inner, heads, vocabulary, tokens | a training step of one process |
| gather, reduce | ranks, nodes, bytes | an all-gather, an all-reduce of so many bytes over all
ranks |
| alone, beside | 0, 1 | a product and a message, each for itself; 2: both at once |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from statistics import fmean

from megatron_llama.config.schema import ModelConfig
from megatron_llama.planner.calibration import Calibration
from megatron_llama.planner.coefficients import Coefficients
from megatron_llama.planner.hardware import Gpu
from megatron_llama.planner.steps import estimate
from megatron_llama.planner.training_job import Machine, Matmul, TrainerTraits, TrainingJob

Point = tuple[str, tuple[int, ...]]
Points = Mapping[Point, float]
LEAST = 1e-7
LATEST = 1.0
"""Seconds that nothing takes less than, and that no block takes to start."""
FACTORS = (0.3, 5.0)
"""Within which the trainer's kernels take longer than those that were timed alone."""
ROUNDS = 3
HALVINGS = 30
"""Of the search for both."""


@dataclass(frozen=True)
class MeasuredDevice:
    """What was measured."""

    base: Gpu
    """As far as it is known without."""
    itemsize: int
    node: int
    """Ranks on a machine."""


def coefficients_of(points: Points, device: MeasuredDevice, shipped: Coefficients) -> Calibration:
    """The device with its own rates. What was not measured (links of one process) stays as it is
    known."""
    gpu = replace(
        device.base,
        family="own",
        single=1.0,
        power=1.0,
        fp8=1.0,
        fp4=1.0,
        node=device.node,
        domain=device.node,
    )
    gpu = replace(gpu, hbm=fmean(2 * size / seconds for (size,), seconds in _of(points, "copy")))
    products = [(Matmul(*sizes), seconds) for sizes, seconds in _of(points, "product")]
    inverse, bytes_factor = _fit(
        [
            (one.flops, device.itemsize * one.elements / gpu.hbm, seconds)
            for one, seconds in products
        ]
    )
    gpu = replace(gpu, peak=max(one.flops / seconds for one, seconds in products))
    scores = [
        (2.0 * heads * tokens * tokens * dim, 0.0, seconds)
        for (heads, tokens, dim), seconds in _of(points, "attention")
    ]
    fit = replace(
        shipped,
        matmul_own=min(1.0, 1 / inverse / gpu.peak),
        matmul_bytes=bytes_factor,
        attention_own=1 / _fit(scores)[0] / gpu.peak,
        memory=_memory(points, device.itemsize, gpu.hbm),
    )
    gpu, fit = _links(points, gpu, fit)
    fit = _steps(points, gpu, fit, device)
    return Calibration(gpu, fit, "bf16" if device.itemsize == 2 else "fp32")


def _of(points: Points, kind: str) -> list[tuple[tuple[int, ...], float]]:
    return [(sizes, max(LEAST, seconds)) for (one, sizes), seconds in points.items() if one == kind]


def _fit(rows: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """(a, b), neither below 0, for which a x + b y is nearest to the seconds of (x, y, seconds), in
    relative terms."""
    scaled = [(x / seconds, y / seconds) for x, y, seconds in rows]
    xx, xy, yy = (sum(row[i] * row[j] for row in scaled) for i, j in ((0, 0), (0, 1), (1, 1)))
    x, y = (sum(row[i] for row in scaled) for i in (0, 1))
    determinant = xx * yy - xy * xy
    if determinant > 1e-12 * xx * yy:
        a = (x * yy - y * xy) / determinant
        b = (y * xx - x * xy) / determinant
        if a > 0 and b > 0:
            return a, b
    # One of them alone; which one leaves less.
    alone = [(x / xx if xx else 0.0, 0.0), (0.0, y / yy if yy else 0.0)]
    usable = alone[:1] if xx else alone[1:]
    return min(
        usable,
        key=lambda pair: sum((pair[0] * row[0] + pair[1] * row[1] - 1) ** 2 for row in scaled),
    )


def _memory(points: Points, itemsize: int, hbm: float) -> float:
    """Times the ideal bytes that operators between products move."""
    moved = {"norm": 2, "gate": 3}
    return fmean(
        seconds * hbm / (moved[kind] * itemsize * elements)
        for kind in moved
        for (elements,), seconds in _of(points, kind)
    )


def _links(points: Points, gpu: Gpu, fit: Coefficients) -> tuple[Gpu, Coefficients]:
    """Start and rate of messages within a machine and between machines; how much of them shows
    beside products."""
    for inside in (True, False):
        rows = []
        for kind, times in (("gather", 1), ("reduce", 2)):
            found = [
                (sizes, seconds)
                for sizes, seconds in _of(points, kind)
                if (sizes[1] == 1) is inside
            ]
            rows += [
                (times, times * (ranks - 1) / ranks * size, seconds)
                for (ranks, _, size), seconds in found
            ]
        if rows:
            start, inverse = _fit(rows)
            rate = 1 / max(inverse, 1e-13)
            if inside:
                gpu = replace(gpu, nvlink=rate)
                fit = replace(fit, nvlink=1.0, latency=start, hop_inside=0.0)
            else:
                gpu = replace(gpu, nic=rate)
                fit = replace(fit, nic=1.0, latency_across=start, hop=0.0)
    both = dict(_of(points, "beside"))
    if both:
        product, message, together = (both[(which,)] for which in (0, 1, 2))
        shown = min(1.0, max(0.05, (together - product) / message))
        fit = replace(fit, data_exposed=shown, parameters_exposed=shown)
    return gpu, fit


def _steps(points: Points, gpu: Gpu, fit: Coefficients, device: MeasuredDevice) -> Coefficients:
    """What the trainer itself adds: the host's time to start a block, of a step, and its kernels
    beside those that were timed. Of the small model, which is nothing but overhead, the difference
    of two depths is blocks."""
    steps = sorted(_of(points, "step"), key=lambda point: (point[0][1], point[0][0]))
    (small, first), (deep, second), (wide, third), (widest, fourth) = steps
    fit = replace(fit, step=0.0, straggle=0.0)

    def seconds(sizes: Sequence[int], factor: float, launch: float) -> float:
        return estimate(
            job_of_step(sizes, gpu, device), replace(fit, family_torchtitan=factor, launch=launch)
        ).seconds

    def kernels(launch: float, factor: float) -> float:
        return seconds(wide, factor, launch) + seconds(widest, factor, launch)

    def blocks(factor: float, launch: float) -> float:
        return seconds(deep, factor, launch) - seconds(small, factor, launch)

    factor = 1.0
    launch = LEAST
    step = 0.0
    for _ in range(ROUNDS):
        factor = _solved(partial(kernels, launch), third + fourth - 2 * step, *FACTORS)
        launch = _solved(partial(blocks, factor), second - first, LEAST, LATEST)
        step = max(0.0, first - seconds(small, factor, launch))
    return replace(fit, family_torchtitan=factor, launch=launch, step=step)


def _solved(function: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Where a growing function is ``wanted``, within bounds."""
    for _ in range(HALVINGS):
        middle = sqrt(low * high)
        low, high = (middle, high) if function(middle) < wanted else (low, middle)
    return sqrt(low * high)


def job_of_step(sizes: Sequence[int], gpu: Gpu, device: MeasuredDevice) -> TrainingJob:
    """The work of a measured training step."""
    layers, hidden, inner, heads, vocabulary, tokens = sizes
    model = ModelConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        max_position_embeddings=tokens,
    )
    machine = Machine(gpu, 1, device.node, device.node, gpu.nic)
    traits = TrainerTraits(family="torchtitan", gradient_bytes=max(4, device.itemsize))
    return TrainingJob(
        model,
        machine,
        traits,
        seq=tokens,
        micro_batch=1,
        microbatches=1,
        sharding="none",
        itemsize=device.itemsize,
    )


def lines(points: Points, calibration: Calibration) -> list[str]:
    """What was found, for people."""
    gpu = calibration.gpu
    fit = calibration.fit
    worst = max(points, key=lambda point: points[point])
    rate = gpu.peak * fit.matmul_own
    trainer = (
        f"{fit.family_torchtitan:.2f} x these kernels, {fit.launch * 1e6:,.0f} us to start a block"
    )
    return [
        f"products      {gpu.peak / 1e9:,.0f} GFLOP/s at most, {rate / 1e9:,.0f} beside {fit.matmul_bytes:.2f} x their bytes",
        f"attention     {gpu.peak * fit.attention_own / 1e9:,.0f} GFLOP/s",
        f"memory        {gpu.hbm / 1e9:,.1f} GB/s, {fit.memory:.2f} x the bytes of norms and activations",
        f"in a machine  {gpu.nvlink / 1e9:,.2f} GB/s of a process, {fit.latency * 1e6:,.0f} us to start",
        f"between them  {gpu.nic / 1e9:,.2f} GB/s, {fit.latency_across * 1e6:,.0f} us",
        f"beside        {fit.data_exposed:.0%} of messages show beside products",
        f"the trainer   {trainer}, {fit.step * 1e3:,.1f} ms a step",
        f"points        {len(points)}, the longest {worst[0]} {' '.join(map(str, worst[1]))}: {points[worst]:.4g} s",
    ]
