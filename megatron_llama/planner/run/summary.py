"""The numbers of a run's page: for its tables, and for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megatron_llama.config.schema import Config
from megatron_llama.data.order import BlendedOrder
from megatron_llama.metrics.log import format_duration
from megatron_llama.planner.run.folder import Floats, RunFolder, time_of
from megatron_llama.planner.run.incidents import Incidents, differing, flat, text
from megatron_llama.planner.run.planned import Measured, Planned, planned

VERSION = 1
"""Of the JSON: it changes when a key changes its meaning or goes."""


@dataclass(frozen=True)
class Dataset:
    """What a run has read of one dataset."""

    name: str
    share: float
    """Of the samples of the run."""
    samples: int | None
    """Of the dataset; None for text that is read as it comes."""
    read: int
    """Samples until the newest line, those that were left out included."""
    tokens: int
    """In these."""

    @property
    def passes(self) -> float | None:
        """How often each of its samples was read, on average."""
        return self.read / self.samples if self.samples else None


@dataclass(frozen=True)
class Summary:
    """One run, with its plan."""

    run: RunFolder
    plan: Planned | str
    """Or why there is none."""

    @cached_property
    def incidents(self) -> Incidents:
        """What happened."""
        return Incidents(self.run)

    @property
    def name(self) -> str:
        """As the user called it."""
        return text(self.run.name)

    @cached_property
    def iteration(self) -> int:
        """Steps done."""
        last = [found[-1] for found in self._iterations if len(found)]
        return int(max(last, default=0))

    @property
    def _iterations(self) -> tuple[Floats, Floats]:
        return self.run.steps["iteration"], self.run.evaluations["iteration"]

    @property
    def train_iters(self) -> int | None:
        """Steps that were asked for."""
        return self._option("training", "train_iters")

    @property
    def seq_length(self) -> int | None:
        """Tokens of a sample."""
        return self._option("training", "seq_length")

    def _option(self, section: str, name: str) -> int | None:
        found = self.run.config.get(section, {}).get(name)
        return found if isinstance(found, int) else None

    @cached_property
    def consumed_samples(self) -> int:
        """Samples behind the run."""
        for lines in (self.run.steps, self.run.evaluations):
            found = lines.get("consumed_samples")
            if found is not None and len(found) and math.isfinite(found[-1]):
                return int(found[-1])
        return 0

    @property
    def tokens(self) -> int | None:
        """In these."""
        return None if self.seq_length is None else self.consumed_samples * self.seq_length

    @cached_property
    def last_loss(self) -> float | None:
        """The newest training loss that was finite."""
        found = self.run.column(self.run.loss)
        found = found[np.isfinite(found)]
        return float(found[-1]) if len(found) else None

    @cached_property
    def validation(self) -> tuple[tuple[int, float], tuple[int, float]] | None:
        """The newest and the lowest validation loss, each with its iteration."""
        lines = self.run.evaluations
        if not len(lines["iteration"]):
            return None
        losses = lines["validation_loss"]
        best = int(np.nanargmin(losses))
        iterations = lines["iteration"]
        return (
            (int(iterations[-1]), float(losses[-1])),
            (int(iterations[best]), float(losses[best])),
        )

    @cached_property
    def datasets(self) -> tuple[Dataset, ...]:
        """What was read of each dataset."""
        if not self.run.starts:
            return ()
        found = self.run.starts[-1].details.get("data")
        parts = [one for one in found or () if isinstance(one, Mapping) and one.get("weight")]
        weights = [one["weight"] for one in parts]
        sizes = [one.get("samples") for one in parts]
        if not parts:
            return ()
        total = sum(weights)
        megatron = self.run.config.get("data", {}).get("megatron_data_order")
        if all(isinstance(weight, int) for weight in weights) and not megatron:
            reads = BlendedOrder(weights, [size or 1 for size in sizes]).counts(
                self.consumed_samples
            )
        else:
            reads = [round(self.consumed_samples * weight / total) for weight in weights]
        length = self.seq_length or 0
        return tuple(
            Dataset(text(one.get("name")), one["weight"] / total, size, read, read * length)
            for one, size, read in zip(parts, sizes, reads, strict=True)
        )

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the lines of the first table: what, and the number in words."""
        done = f"{self.iteration:,}"
        yield "iterations", f"{done} of {self.train_iters:,}" if self.train_iters else done
        yield "tokens", "?" if self.tokens is None else f"{self.tokens:,}"
        yield "training loss", number(self.last_loss)
        if self.validation is not None:
            (_, newest), (at, best) = self.validation
            yield "validation loss", f"{newest:.4f}"
            yield "lowest validation loss", f"{best:.4f} at {at:,}"
        measured = Measured(self.run)
        yield "tokens/s", number(measured.median("tokens_per_second"), ",.0f")
        speed = measured.median("tokens_per_second_per_gpu")
        yield "tokens/s per process", number(speed, ",.0f")
        if measured.median("mfu") is not None:  # the peak of the device is known
            yield "MFU", number(measured.median("mfu"), ".1%")
        milliseconds = measured.median("elapsed_ms")
        yield "step", "?" if milliseconds is None else f"{milliseconds:,.1f} ms"
        incidents = self.incidents
        whole = incidents.wall_seconds
        if whole:
            yield "from the first line to the last", format_duration(whole)
            share = min(1.0, incidents.step_seconds / whole)
            yield "of that in steps that count", f"{share:.0%}"
        yield "restarts", f"{incidents.restarts:,}"
        yield "steps done again", f"{incidents.repeated:,}"
        yield "steps that changed nothing", f"{incidents.skipped:,}"
        yield "bad steps left out", f"{len(self.run.skipped):,}"

    def options(self) -> dict[str, str]:
        """Return all options of the newest start."""
        return {name: text(value) for name, value in flat(self.run.config).items()}

    def changed_options(self) -> dict[str, str]:
        """Return those that are not the default."""
        usual = flat(asdict(Config()))
        return {
            name: text(value)
            for name, value in flat(self.run.config).items()
            if name not in usual or text(usual[name]) != text(value)
        }

    def surroundings(self) -> dict[str, str]:
        """Return what a run is made of besides its options: processes, device, versions."""
        if not self.run.starts:
            torch = self.run.checkpoint.get("torch_version")
            return {} if torch is None else {"torch": str(torch)}
        details = self.run.starts[-1].details
        versions = details.get("versions")
        named = versions if isinstance(versions, Mapping) else {}
        found = {"processes": details["world_size"], "device": details.get("device"), **named}
        if isinstance(details.get("parameters"), int):
            found = {"parameters": f"{details['parameters']:,}", **found}
        return {name: text(value) for name, value in found.items()}

    def as_json(self) -> dict[str, Any]:
        """Return all of it as numbers: see ``summaries_as_json``."""
        measured = Measured(self.run)
        incidents = self.incidents
        validation = self.validation
        plan = self.plan
        return {
            "name": self.name,
            "iteration": self.iteration,
            "train_iters": self.train_iters,
            "consumed_samples": self.consumed_samples,
            "tokens": self.tokens,
            "loss": self.last_loss,
            "validation_loss": None if validation is None else validation[0][1],
            "best_validation_loss": None if validation is None else validation[1][1],
            "best_validation_iteration": None if validation is None else validation[1][0],
            "measured": {
                name: measured.median(name)
                for name in (
                    *("elapsed_ms", "tokens_per_second", "tokens_per_second_per_gpu", "mfu"),
                    "exposed_comm_ms",
                )
            }
            | {
                "peak_memory_bytes": measured.peak_memory,
                "data_parallel_bytes": measured.data_parallel_bytes,
            },
            "plan": (
                {"none_because": plan}
                if isinstance(plan, str)
                else {
                    "compared": [asdict(one) for one in plan.compared()],
                    "memory_bytes": dict(plan.memory),
                    "step_seconds": dict(plan.step_parts) if plan.known else None,
                    "notes": list(plan.notes()),
                }
            ),
            "wall_seconds": incidents.wall_seconds,
            "step_seconds": incidents.step_seconds,
            "down_seconds": incidents.down_seconds,
            "restarts": incidents.restarts,
            "repeated_steps": incidents.repeated,
            "skipped_steps": incidents.skipped,
            "overflows": incidents.overflows,
            "incidents": [
                {
                    "time": None if one.seconds is None else time_of(one.seconds),
                    "iteration": one.iteration,
                    "kind": one.kind,
                    "words": one.words,
                }
                for one in incidents.listed
            ],
            "data": [asdict(one) for one in self.datasets],
            "options": self.options(),
            "surroundings": self.surroundings(),
            "problems": list(self.run.problems),
        }


def number(value: float | None, form: str = ".4f") -> str:
    """A number in words; ``?`` where it is not known."""
    return "?" if value is None else f"{value:{form}}"


def summary_of(run: RunFolder, coefficients: str | None) -> Summary:
    """Return a run with its plan. Raises ConfigError for a file that has no coefficients."""
    return Summary(run, planned(run, coefficients))


def differences(summaries: Sequence[Summary]) -> dict[str, list[str]]:
    """Return what differs between runs, options and surroundings: one text for each run."""
    around = [one.surroundings() for one in summaries]
    found = {
        name: [each.get(name, "?") for each in around]
        for name in dict.fromkeys(name for each in around for name in each)
    }
    options = differing([{"config": one.run.config} for one in summaries])
    same = {name for name, values in found.items() if len(set(values)) == 1}
    return options | {name: values for name, values in found.items() if name not in same}


def summaries_as_json(summaries: Sequence[Summary]) -> dict[str, Any]:
    """Return what the page says, for programs.

    Keys: ``version``; ``runs``, each with its position (``iteration``, ``train_iters``,
    ``consumed_samples``, ``tokens``), losses, medians under ``measured`` by the names of
    ``log.jsonl`` (of memory the peak, of bytes the mean), ``plan`` (``compared`` with ``what``,
    ``planned``, ``measured`` and ``unit``; ``memory_bytes`` and ``step_seconds`` by part; or
    ``none_because``), sums and ``incidents`` (``time``, ``iteration``, ``kind``, ``words``),
    ``data``, ``options``, ``surroundings`` and ``problems``; ``differences``, by option one value
    for each run. null: not known.
    """
    return {
        "version": VERSION,
        "runs": [one.as_json() for one in summaries],
        "differences": differences(summaries) if len(summaries) > 1 else {},
    }
