"""The numbers of a run's page, for its tables and for programs."""

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
from megatron_llama.planner.run.incidents import Incidents, differing, flat, text, without_secrets
from megatron_llama.planner.run.planned import Measured, Planned, planned

VERSION = 1
"""Version of the JSON. It changes when a key changes its meaning or is removed."""


@dataclass(frozen=True)
class Dataset:
    """Samples and tokens that a run has read of one dataset."""

    name: str
    share: float
    """Share of the samples of the run."""
    samples: int | None
    """Size of the dataset; None for text that is read as it comes."""
    read: int
    """Samples up to the newest line, including those that were left out."""
    tokens: int
    """Tokens in these samples."""

    @property
    def passes(self) -> float | None:
        """Average number of times that each sample was read."""
        return self.read / self.samples if self.samples else None


@dataclass(frozen=True)
class Summary:
    """One run, with its plan."""

    run: RunFolder
    plan: Planned | str
    """The plan, or the reason why there is none."""

    @cached_property
    def incidents(self) -> Incidents:
        """Restarts, faults and gaps of the run."""
        return Incidents(self.run)

    @property
    def name(self) -> str:
        """Name that the user gave."""
        return text(self.run.name)

    @cached_property
    def iteration(self) -> int:
        """Steps done."""
        last = [column[-1] for column in self._iterations if len(column)]
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
        value = self.run.config.get(section, {}).get(name)
        return value if isinstance(value, int) else None

    @cached_property
    def consumed_samples(self) -> int:
        """Samples consumed so far."""
        for lines in (self.run.steps, self.run.evaluations):
            samples = lines.get("consumed_samples")
            if samples is not None and len(samples) and math.isfinite(samples[-1]):
                return int(samples[-1])
        return 0

    @property
    def tokens(self) -> int | None:
        """Tokens in these samples; None if the sequence length is not known."""
        return None if self.seq_length is None else self.consumed_samples * self.seq_length

    @cached_property
    def last_loss(self) -> float | None:
        """The newest training loss that was finite."""
        losses = self.run.column(self.run.loss)
        losses = losses[np.isfinite(losses)]
        return float(losses[-1]) if len(losses) else None

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
        """Samples and tokens read of each dataset; empty if the weights are not known."""
        if not self.run.starts:
            return ()
        data = self.run.starts[-1].details.get("data")
        parts = [
            entry for entry in data or () if isinstance(entry, Mapping) and entry.get("weight")
        ]
        weights = [entry["weight"] for entry in parts]
        sizes = [entry.get("samples") for entry in parts]
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
            Dataset(text(entry.get("name")), entry["weight"] / total, size, read, read * length)
            for entry, size, read in zip(parts, sizes, reads, strict=True)
        )

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield the rows of the first table: a label and its value in words."""
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
        """Return the options that are not the default."""
        usual = flat(asdict(Config()))
        return {
            name: text(value)
            for name, value in flat(self.run.config).items()
            if name not in usual or text(usual[name]) != text(value)
        }

    def described(self) -> dict[str, str]:
        """Return the description of the newest start by subject; empty without a plan."""
        words = {} if isinstance(self.plan, str) else self.plan.described
        return {subject: without_secrets(said) for subject, said in words.items()}

    def surroundings(self) -> dict[str, str]:
        """Return the processes, device and versions of the newest start."""
        if not self.run.starts:
            torch = self.run.checkpoint.get("torch_version")
            return {} if torch is None else {"torch": str(torch)}
        details = self.run.starts[-1].details
        versions = details.get("versions")
        named = versions if isinstance(versions, Mapping) else {}
        facts = {"processes": details["world_size"], "device": details.get("device"), **named}
        if isinstance(details.get("parameters"), int):
            facts = {"parameters": f"{details['parameters']:,}", **facts}
        return {name: text(value) for name, value in facts.items()}

    def as_json(self) -> dict[str, Any]:
        """Return the whole summary for programs; ``summaries_as_json`` lists the keys."""
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
                    "compared": [asdict(row) for row in plan.compared()],
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
                    "time": None if incident.seconds is None else time_of(incident.seconds),
                    "iteration": incident.iteration,
                    "kind": incident.kind,
                    "words": incident.words,
                }
                for incident in incidents.listed
            ],
            "data": [asdict(dataset) for dataset in self.datasets],
            "options": self.options(),
            "surroundings": self.surroundings(),
            "problems": list(self.run.problems),
        }


def number(value: float | None, form: str = ".4f") -> str:
    """Return a number as text; ``?`` if it is not known."""
    return "?" if value is None else f"{value:{form}}"


def summary_of(run: RunFolder, coefficients: str | None) -> Summary:
    """Return a run with its plan. Raises ConfigError for a file that has no coefficients."""
    return Summary(run, planned(run, coefficients))


def differences(summaries: Sequence[Summary]) -> dict[str, list[str]]:
    """Return the options and surroundings that differ between runs, one text for each run."""
    around = [summary.surroundings() for summary in summaries]
    differing_facts = {
        name: [facts.get(name, "?") for facts in around]
        for name in dict.fromkeys(name for facts in around for name in facts)
    }
    options = differing([{"config": summary.run.config} for summary in summaries])
    same = {name for name, values in differing_facts.items() if len(set(values)) == 1}
    return options | {name: values for name, values in differing_facts.items() if name not in same}


def summaries_as_json(summaries: Sequence[Summary]) -> dict[str, Any]:
    """Return the contents of the page for programs.

    Keys: ``version``; ``runs``, each with its position (``iteration``, ``train_iters``,
    ``consumed_samples``, ``tokens``), losses, medians under ``measured`` by the names of
    ``log.jsonl`` (the peak of memory, the mean of bytes), ``plan`` (``compared`` with ``what``,
    ``planned``, ``measured`` and ``unit``; ``memory_bytes`` and ``step_seconds`` by part; or
    ``none_because``), sums and ``incidents`` (``time``, ``iteration``, ``kind``, ``words``),
    ``data``, ``options``, ``surroundings`` and ``problems``; ``differences`` with one value for
    each run by option. null means not known.
    """
    return {
        "version": VERSION,
        "runs": [summary.as_json() for summary in summaries],
        "differences": differences(summaries) if len(summaries) > 1 else {},
    }
