"""What came out: a table, paired comparisons, and JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.overlap.against import PREFIX
from tools.overlap.bound import FRAME_FACTOR, link_seconds, plan_of, step_seconds
from tools.overlap.catalogue import (
    COMPUTE,
    EXPERT_MODES,
    HF,
    HF_MODES,
    HF_PEERS,
    MODES,
    PEERS,
    STEPS,
    baseline,
    compute_seconds,
    configuration,
    half_block_seconds,
    minimum_bytes,
    mode_named,
    parameters,
    strategy_minimum,
)
from tools.overlap.job import Job, Sample, bits_per_second
from tools.processor import processor

Samples = dict[str, list[Sample]]


def write(job: Job, samples: Samples) -> None:
    """Print, and write the JSON if one is wanted."""
    rows = [row(job, name, samples) for name in job.names]
    print("\n".join((*title(job), *table(rows), *pairs(samples))), flush=True)
    if job.json is not None:
        Path(job.json).write_text(json.dumps(rows, indent=2) + "\n")


def row(job: Job, name: str, samples: Samples) -> dict[str, Any]:
    """One contender. Times are ratios to ``compute`` within a round, to that with the same model;
    bytes are those of a step over the minimum in fp32."""
    own = samples[name]
    base = samples[baseline(name)]
    least = minimum_bytes(job.hosts)
    ratios = [one.seconds / other.seconds for one, other in zip(own, base, strict=True)]
    ratio = statistics.median(ratios)
    quartiles = quartiles_of(ratios)
    payloads = [one.payload_bytes for one in own if one.payload_bytes is not None]
    mode = mode_named(name)
    bound, planned = bound_of(job, name, statistics.median(one.seconds for one in base))
    return {
        "name": name,
        "ratio": ratio,
        "spread": (quartiles[1] - quartiles[0]) / ratio,
        "quartiles": quartiles,
        "bytes_ratio": statistics.median(one.nic_bytes for one in own) / least,
        "payload_ratio": statistics.median(payloads) / least if payloads else None,
        "planned_ratio": planned,
        "strategy_ratio": None
        if mode is None or mode.divides
        else strategy_minimum(mode, job.hosts) / least,
        "bound": bound,
        "milliseconds": statistics.median(one.seconds for one in own) * 1e3,
        "cpu_milliseconds": statistics.median(one.cpu_seconds for one in own) * 1e3,
        "loss": own[-1].loss,
        "growth": statistics.median(one.growth for one in own),
        "peak_growth": statistics.median(one.peak_growth for one in own),
    }


def quartiles_of(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third."""
    if len(values) < 2:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def bound_of(job: Job, name: str, compute: float) -> tuple[float | None, float | None]:
    """(bound, planned bytes over the minimum) of a mode of our own dense model; None for others: a
    user's module is waited for unit by unit, not half a block at a time. ``compute``:
    measured seconds of a step without communication; beside the waits it holds some real work of
    the host, which the bound spreads over the half blocks."""
    mode = mode_named(name)
    if mode is None or name.startswith(HF) or job.experts:
        return None, None
    plan = plan_of(
        configuration(mode, job.hosts),
        job.hosts,
        half_block=compute / (compute_seconds(job.hosts) / half_block_seconds(job.hosts)),
        bits_per_second=bits_per_second(job.rate),
    )
    payload = link_seconds(plan, STEPS) * bits_per_second(job.rate) / 8 / FRAME_FACTOR
    return step_seconds(plan, STEPS) / compute, payload / minimum_bytes(job.hosts)


def title(job: Job) -> list[str]:
    """What was run."""
    compute = compute_seconds(job.hosts)
    least = minimum_bytes(job.hosts) * 8 / bits_per_second(job.rate)
    return [
        "",
        processor(),
        f"{job.hosts} hosts, {job.rate}, {parameters() / 1e6:.2f} M parameters, "
        f"{job.rounds} rounds of {STEPS} steps"
        + "".join(f", {condition}" for condition in job.conditions),
        f"timed waits {compute * 1e3:.0f} ms a step; the minimum of bytes takes "
        f"{least * 1e3:.0f} ms, {least / compute:.2f} of that",
    ]


COLUMNS = (
    f"{'':<22}{'ratio':>7}{'quartiles':>16}{'bound':>8}{'over it':>9}{'ms':>9}{'CPU ms':>8}"
    f"{'NIC bytes':>11}{'payload':>9}{'planned':>9}{'least':>8}{'grows KiB':>11}{'peak':>7}"
)


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One line for each contender."""
    lines = [
        "ratio: time of a step over that of compute; bytes: over the fp32 minimum; least: the "
        "minimum of the strategy",
        "grows: bytes in use after the last step beyond those after the second; peak: resident "
        "memory of later steps beyond that of the first two",
        COLUMNS,
    ]
    for r in rows:
        low, high = r["quartiles"]
        over = f"{r['ratio'] / r['bound'] - 1:+.1%}" if r["bound"] else ""
        payload = _number(r["payload_ratio"])
        bytes_ = f"{r['bytes_ratio']:>11.3f}{payload:>9}{_number(r['planned_ratio']):>9}"
        least = _number(r["strategy_ratio"])
        memory = f"{r['growth'] / 1024:>11.0f}{r['peak_growth'] / 1024:>7.0f}"
        times = f"{r['milliseconds']:>9.1f}{r['cpu_milliseconds']:>8.0f}"
        lines.append(
            f"{r['name']:<22}{r['ratio']:>7.3f}{f'{low:.3f}..{high:.3f}':>16}{_number(r['bound']):>8}{over:>9}{times}{bytes_}{least:>8}{memory}"
        )
    return lines


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def pairs(samples: Samples) -> list[str]:
    """Ours over each peer with the same model, the user's model over our own, and ours over itself
    at another checkout: medians of the ratios within rounds, with quartiles."""
    ours = [mode.name for mode in MODES + EXPERT_MODES if mode.name in samples]
    users = [name for name in HF_MODES if name in samples]
    lines = _against_peers(ours, [name for name in PEERS if name in samples], samples)
    lines += _against_peers(users, [name for name in HF_PEERS if name in samples], samples)
    if any(mode.name in samples for mode in EXPERT_MODES):
        lines += _against_peers(ours, [name for name in HF_PEERS if name in samples], samples)
    both = [name for name in users if name.removeprefix(HF) in samples]
    if both:
        lines += [
            "",
            "the user's model over our own: quotient of their ratios to compute",
            *(f"{name:<22}{_quotient(name, samples):>22}" for name in both),
        ]
    before = [
        f"{name:<22}{_pair(samples[name], samples[PREFIX + name]):>22}"
        for name in ours
        if PREFIX + name in samples
    ]
    if before:
        lines += ["", "this checkout over the other, paired within rounds", *before]
    return lines


def _against_peers(ours: Sequence[str], peers: Sequence[str], samples: Samples) -> list[str]:
    if not peers or not ours:
        return []
    lines = [
        "",
        "ours over a peer, paired within rounds: median (quartiles)",
        f"{'':<22}" + "".join(f"{peer:>22}" for peer in peers),
    ]
    return lines + [
        f"{name:<22}" + "".join(f"{_pair(samples[name], samples[peer]):>22}" for peer in peers)
        for name in ours
    ]


def _quotient(name: str, samples: Samples) -> str:
    own = name.removeprefix(HF)
    ratios = [
        (user.seconds / user_compute.seconds) / (one.seconds / compute.seconds)
        for user, user_compute, one, compute in zip(
            samples[name], samples[HF + COMPUTE], samples[own], samples[COMPUTE], strict=True
        )
    ]
    return _spread(ratios)


def _pair(one: Sequence[Sample], other: Sequence[Sample]) -> str:
    return _spread([a.seconds / b.seconds for a, b in zip(one, other, strict=True)])


def _spread(ratios: Sequence[float]) -> str:
    low, high = quartiles_of(ratios)
    return f"{statistics.median(ratios):.3f} ({low:.3f}..{high:.3f})"
