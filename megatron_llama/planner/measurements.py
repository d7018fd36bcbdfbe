"""Coefficients fitted to the times of ``plan calibrate``. Standard library only; ``calibrate/``
does the timing.

A point has a kind, sizes and seconds:

| kind | sizes | seconds of |
|---|---|---|
| product | m, n, k | a product of [m, k] with [k, n] |
| attention | heads, tokens, head_dim | causal attention, forward |
| copy | bytes | a copy, read and written |
| norm, gate | elements | an RMS norm; an activation times another tensor |
| step | layers, hidden, inner, heads, vocabulary, tokens | a training step of one process |
| gather, reduce | ranks, nodes, bytes | an all-gather, an all-reduce of so many bytes in total |
| beside | 0 | a product alone |
| beside | 1 | a message alone |
| beside | 2 | both at once |
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
"""Lower bound of all measured seconds."""
LATEST = 1.0
"""Upper bound of the seconds to start a block."""
FACTORS = (0.3, 5.0)
"""Range of the factor by which the trainer's kernels take longer than kernels timed alone."""
ROUNDS = 3
HALVINGS = 30
"""Rounds of the search for start time and factor, and bisections of each range in a round."""


@dataclass(frozen=True)
class MeasuredDevice:
    """The device that was measured."""

    base: Gpu
    """Properties that are known without a measurement."""
    itemsize: int
    """Bytes of an element in the measured precision."""
    node: int
    """Ranks on a machine."""


def coefficients_of(points: Points, device: MeasuredDevice, shipped: Coefficients) -> Calibration:
    """Return the device with its own rates. Values that were not measured (links, if there is one
    process) stay as in ``shipped``."""
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
            (matmul.flops, device.itemsize * matmul.elements / gpu.hbm, seconds)
            for matmul, seconds in products
        ]
    )
    gpu = replace(gpu, peak=max(matmul.flops / seconds for matmul, seconds in products))
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
    return [(sizes, max(LEAST, time)) for (name, sizes), time in points.items() if name == kind]


def _fit(rows: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """Return the non-negative (a, b) that minimize the sum of ((a x + b y) / seconds - 1)^2 over
    the rows (x, y, seconds)."""
    scaled = [(x / seconds, y / seconds) for x, y, seconds in rows]
    xx, xy, yy = (sum(row[i] * row[j] for row in scaled) for i, j in ((0, 0), (0, 1), (1, 1)))
    x, y = (sum(row[i] for row in scaled) for i in (0, 1))
    determinant = xx * yy - xy * xy
    if determinant > 1e-12 * xx * yy:
        a = (x * yy - y * xy) / determinant
        b = (y * xx - x * xy) / determinant
        if a > 0 and b > 0:
            return a, b
    # Only one of the two is positive: take the one with the smaller error.
    alone = [(x / xx if xx else 0.0, 0.0), (0.0, y / yy if yy else 0.0)]
    usable = alone[:1] if xx else alone[1:]
    return min(
        usable,
        key=lambda pair: sum((pair[0] * row[0] + pair[1] * row[1] - 1) ** 2 for row in scaled),
    )


def _memory(points: Points, itemsize: int, hbm: float) -> float:
    """Return the bytes that operators between products take, relative to the ideal bytes."""
    moved = {"norm": 2, "gate": 3}
    return fmean(
        seconds * hbm / (moved[kind] * itemsize * elements)
        for kind in moved
        for (elements,), seconds in _of(points, kind)
    )


def _links(points: Points, gpu: Gpu, fit: Coefficients) -> tuple[Gpu, Coefficients]:
    """Return the device and the coefficients with the measured links: the start time and rate of
    messages within a machine and between machines, and the share that products do not hide."""
    for inside in (True, False):
        rows = []
        for kind, times in (("gather", 1), ("reduce", 2)):
            timed = [
                (sizes, seconds)
                for sizes, seconds in _of(points, kind)
                if (sizes[1] == 1) is inside
            ]
            rows += [
                (times, times * (ranks - 1) / ranks * size, seconds)
                for (ranks, _, size), seconds in timed
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
    """Return the coefficients with the overhead of the trainer: the host's time to start a block,
    the time of a step without blocks, and a factor on kernels that were timed alone. The small
    model consists of overhead only, so two depths of it differ by the overhead of blocks."""
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
    """Return the argument at which a growing function is ``wanted``, by bisection in bounds."""
    for _ in range(HALVINGS):
        middle = sqrt(low * high)
        low, high = (middle, high) if function(middle) < wanted else (low, middle)
    return sqrt(low * high)


def job_of_step(sizes: Sequence[int], gpu: Gpu, device: MeasuredDevice) -> TrainingJob:
    """Return the work of a measured training step."""
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
    traits = TrainerTraits(gradient_bytes=max(4, device.itemsize))
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
    """Return the fitted rates as lines for people."""
    gpu = calibration.gpu
    fit = calibration.fit
    worst = max(points, key=lambda point: points[point])
    longest = f"{worst[0]} {' '.join(map(str, worst[1]))}: {points[worst]:.4g} s"
    return [
        f"products      {gpu.peak / 1e9:,.0f} GFLOP/s at most, "
        f"{gpu.peak * fit.matmul_own / 1e9:,.0f} beside {fit.matmul_bytes:.2f} x their bytes",
        f"attention     {gpu.peak * fit.attention_own / 1e9:,.0f} GFLOP/s",
        f"memory        {gpu.hbm / 1e9:,.1f} GB/s, "
        f"{fit.memory:.2f} x the bytes of norms and activations",
        f"in a machine  {gpu.nvlink / 1e9:,.2f} GB/s of a process, "
        f"{fit.latency * 1e6:,.0f} us to start",
        f"between them  {gpu.nic / 1e9:,.2f} GB/s, {fit.latency_across * 1e6:,.0f} us",
        f"beside        {fit.data_exposed:.0%} of messages show beside products",
        f"the trainer   {fit.family_torchtitan:.2f} x these kernels, "
        f"{fit.launch * 1e6:,.0f} us to start a block, {fit.step * 1e3:,.1f} ms a step",
        f"points        {len(points)}, the longest {longest}",
    ]
