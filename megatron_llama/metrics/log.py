"""The log of a run: a line on the terminal, and one JSON object per line in ``log.jsonl``."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Protocol, Self, TextIO

from megatron_llama.config.lines import parse_json
from megatron_llama.errors import CheckpointError, TrainingError
from megatron_llama.files import replacing
from megatron_llama.metrics.events import END, FAULT, REWIND, EventFile
from megatron_llama.metrics.window import Spread

FILE_NAME = "log.jsonl"
TAIL_BYTES = 1 << 16
"""Bytes at the end of a file that hold its last whole line."""
NOTHING = -1
"""The iteration for which ``truncate`` keeps no line."""


@dataclass(frozen=True)
class LossNames:
    """The name of a run's loss in its log, and the unit over which a validation loss is the
    mean."""

    loss: str
    """In lines; in ``log.jsonl`` with underscores."""
    unit: str
    perplexity: bool
    """Whether the exponential of the loss means anything."""


LANGUAGE_MODEL = LossNames("lm loss", "tokens", perplexity=True)


@dataclass(frozen=True)
class StepRecord:
    """The numbers of one log line of training. Times and rates are averages since the last line."""

    iteration: int
    """Optimizer steps done, so 1-based."""
    train_iters: int
    consumed_samples: int
    learning_rate: float
    global_batch_size: int
    lm_loss: float | None
    """None if it was not finite and the step was skipped."""
    mean_lm_loss: float | None
    """The mean over the good steps since the last line, or since the run was resumed or went back;
    None if all of them were skipped."""
    grad_norm: float | None
    """Before clipping. None if it was not finite and the step was skipped."""
    elapsed_ms: float
    """Per iteration."""
    tokens_per_second: float
    tokens_per_second_per_gpu: float
    tflops_per_gpu: float
    mfu: float | None
    """Fraction of the device's peak; None if the peak is unknown."""
    exposed_comm_ms: float | None
    """Per iteration, communication that no computation hid; None if not measured."""
    peak_memory_bytes: int | None
    """None if the device does not count."""
    eta_seconds: float | None
    loss_scale: float = 1.0
    skipped_iterations: int = 0
    """Since the last line."""
    nan_iterations: int = 0
    compute: Spread | None = None
    """Time for which the ranks compute in a step; with --log-straggler."""
    numbers: Mapping[str, float | None] = field(default_factory=dict)
    """Numbers of the run's objective beside its loss, by name; None as for ``lm_loss``."""
    names: LossNames = LANGUAGE_MODEL
    data_parallel_bytes: float | None = None
    """Per iteration, bytes that this rank has issued over the data-parallel axes. A collective
    counts as the bytes of its whole bucket, as in plans. Evaluations do not count."""


@dataclass(frozen=True)
class ValidationRecord:
    """One evaluation."""

    iteration: int
    """Optimizer steps done."""
    consumed_samples: int
    loss: float
    """The mean over ``count`` of ``names.unit``."""
    count: int
    numbers: Mapping[str, float] = field(default_factory=dict)
    """As in a ``StepRecord``, over the whole evaluation."""
    names: LossNames = LANGUAGE_MODEL


_JSON_KEYS = (
    "grad_norm",
    "loss_scale",
    "skipped_iterations",
    "learning_rate",
    "consumed_samples",
    "tokens_per_second",
    "tokens_per_second_per_gpu",
    "tflops_per_gpu",
    "mfu",
    "exposed_comm_ms",
    "data_parallel_bytes",
    "elapsed_ms",
    "peak_memory_bytes",
    "global_batch_size",
    "eta_seconds",
)


SHOWN = ("rewards/margins", "rewards/accuracies", "kl", "nll_loss", "load_balancing_loss")
"""The numbers of an objective for which the compact line has room."""


def compact_line(record: StepRecord, now: datetime) -> str:
    """Return a line of at most 260 columns: the fields of Megatron's line that people and scripts
    look for, under its names, and the speed. The other fields are in ``log.jsonl``."""
    r = record
    fields = [
        f" iteration {r.iteration:{len(str(r.train_iters))}d}/{r.train_iters}",
        f"{r.names.loss}: " + _or_na(r.lm_loss, ".5E"),
        *(f"{name}: " + _or_na(r.numbers[name], ".4g") for name in SHOWN if name in r.numbers),
        "grad norm: " + _or_na(r.grad_norm, ".3f"),
        f"learning rate: {r.learning_rate:.2E}",
        f"global batch size: {r.global_batch_size}",
        f"consumed samples: {r.consumed_samples}",
        f"elapsed time per iteration (ms): {r.elapsed_ms:.{1 if r.elapsed_ms < 1000 else 0}f}",
        f"tokens/s/GPU: {r.tokens_per_second_per_gpu:.0f}",
        *([] if r.mfu is None else [f"MFU: {r.mfu:.1%}"]),
        *(
            []
            if r.peak_memory_bytes is None
            else [f"memory: {r.peak_memory_bytes / 2**30:.1f} GiB"]
        ),
        "ETA: " + ("n/a" if r.eta_seconds is None else format_duration(r.eta_seconds)),
    ]
    if r.loss_scale != 1.0:
        fields.append(f"loss scale: {r.loss_scale:.1f}")
    if r.skipped_iterations:
        fields.append(f"number of skipped iterations: {r.skipped_iterations}")
    return " | ".join(fields + _compute_field(r))


def megatron_line(record: StepRecord, now: datetime) -> str:
    """Return the line of Megatron's ``training_log``, which log readers parse, with our own fields
    at the end. As there, the loss is the mean over the interval without skipped steps."""
    r = record
    # Megatron writes one digit behind the point, which is 0 on a CPU.
    digits = 1 if r.tflops_per_gpu >= 1 else 4
    megatron = [
        f" [{now:%Y-%m-%d %H:%M:%S}] iteration {r.iteration:8d}/{r.train_iters:8d}",
        f"consumed samples: {r.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {r.elapsed_ms:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {r.tflops_per_gpu:.{digits}f}",
        f"learning rate: {r.learning_rate:.6E}",
        f"global batch size: {r.global_batch_size:5d}",
        f"{r.names.loss}: " + _or_na(r.mean_lm_loss, ".6E"),
        f"loss scale: {r.loss_scale:.1f}",
        "grad norm: " + _or_na(r.grad_norm, ".3f"),
        f"number of skipped iterations: {r.skipped_iterations:3d}",
        f"number of nan iterations: {r.nan_iterations:3d}",
    ]
    ours = [
        *(f"{name}: " + _or_na(value, ".6g") for name, value in r.numbers.items()),
        f"tokens/s/GPU: {r.tokens_per_second_per_gpu:.1f}",
        "exposed comm (ms): " + _or_na(r.exposed_comm_ms, ".1f"),
        "MFU: " + _or_na(r.mfu, ".1%"),
        "peak memory (GiB): "
        + ("n/a" if r.peak_memory_bytes is None else f"{r.peak_memory_bytes / 2**30:.2f}"),
        "ETA: " + ("n/a" if r.eta_seconds is None else format_duration(r.eta_seconds)),
    ]
    return " | ".join(megatron + ours + _compute_field(r)) + " |"


def _or_na(number: float | None, format: str) -> str:
    return "n/a" if number is None else f"{number:{format}}"


def _compute_field(record: StepRecord) -> list[str]:
    """Return the field that --log-straggler adds to a line."""
    c = record.compute
    if c is None:
        return []
    return [
        f"compute per rank (ms): min {c.least:.1f}, median {c.median:.1f}, "
        f"max {c.most:.1f} (rank {c.slowest})"
    ]


LINES: Mapping[str, Callable[[StepRecord, datetime], str]] = MappingProxyType(
    {"compact": compact_line, "megatron": megatron_line}
)
"""The makers of the lines of --log-format."""


def format_validation(record: ValidationRecord) -> str:
    """Return the line of an evaluation; perplexity is capped at e^20 as in Megatron."""
    r = record
    fields = [
        f" validation loss at iteration {r.iteration}",
        f"consumed samples: {r.consumed_samples:12d}",
        f"{r.names.loss} value: {r.loss:.6E}",
    ]
    if r.names.perplexity:
        fields.append(f"{r.names.loss} PPL: {math.exp(min(20.0, r.loss)):.6E}")
    fields += [f"{name}: {value:.6g}" for name, value in r.numbers.items()]
    fields.append(f"validation {r.names.unit}: {r.count}")
    return " | ".join(fields) + " |"


def format_duration(seconds: float) -> str:
    """Format seconds as ``1:02:03``. There are no days: hours go on beyond 24."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def scalars(record: StepRecord) -> dict[str, float]:
    """Return the known numbers of an interval, under the names of ``log.jsonl``."""
    usual = LANGUAGE_MODEL.loss.replace(" ", "_")
    ours = record.names.loss.replace(" ", "_")
    values = {name.replace(usual, ours): value for name, value in asdict(record).items()}
    values |= record.numbers
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def validation_scalars(record: ValidationRecord) -> dict[str, float]:
    """Return the numbers of an evaluation, under the names of ``log.jsonl``."""
    numbers = {f"validation_{name}": value for name, value in record.numbers.items()}
    return {"iteration": record.iteration, "validation_loss": record.loss, **numbers}


class MetricLogger(Protocol):
    """Another receiver of log lines, for example TensorBoard."""

    def step(self, record: StepRecord) -> None:
        """Log an interval of training."""
        ...

    def validation(self, record: ValidationRecord) -> None:
        """Log an evaluation."""
        ...

    def rewind(self, iteration: int) -> None:
        """Go back: the run has returned to ``iteration`` and repeats later steps."""
        ...

    def close(self) -> None:
        """End the log."""
        ...


class FedLogger(MetricLogger, Protocol):
    """A MetricLogger that may fail while the run goes on, and reports its problems."""

    @property
    def name(self) -> str:
        """The service, and its project or experiment."""
        ...

    @property
    def run(self) -> str | None:
        """The key that finds its run again; None where there is no run to find."""
        ...

    def problems(self) -> Iterator[str]:
        """Yield what has gone wrong since the last call."""
        ...


class MetricLog:
    """Prints log lines and appends them to ``log.jsonl``, only on the rank that prints.

    The file is always one consistent curve. Opening it for a run that continues after
    ``start_iteration`` drops later lines of an interrupted run, and a last line that was cut off.
    """

    def __init__(
        self,
        folder: str | Path | None,
        *,
        prints: bool,
        start_iteration: int,
        train_iters: int,
        progress_bar: bool,
        line: Callable[[StepRecord, datetime], str] = compact_line,
        out: TextIO | None = None,
        loggers: Sequence[MetricLogger] = (),
        trackers: Sequence[FedLogger] = (),
    ) -> None:
        """``folder`` is that of ``log.jsonl``, made if need be; None means no file. ``prints``:
        this is the rank that prints. ``line`` makes its lines. ``out`` is stdout by default.
        ``loggers`` and ``trackers`` are those of the rank that prints; they are closed with the
        log."""
        self._prints = prints
        self._trackers: tuple[FedLogger, ...] = tuple(trackers)
        self._loggers: tuple[MetricLogger, ...] = (*loggers, *trackers)
        self.tracked = {logger.name: logger.run for logger in trackers if logger.run is not None}
        """The trackers' runs of this run: a resumed run goes on with them."""
        self._line = line
        self._out = sys.stdout if out is None else out
        self._file: TextIO | None = None
        self._abandoned = False
        self._events = EventFile(folder) if prints and folder is not None else None
        self.reached = 0
        """The last iteration in the file when it was opened, which an interrupted run has
        reached."""
        self.evaluated: dict[int, float] = {}
        """The loss of each evaluation of the run by iteration, also before a resume. Filled only on
        the rank that prints."""
        self._bar: Any = None
        if not prints:
            return
        if folder is not None:
            # A fresh start begins a new curve: a line of iteration 0 in the file is another run's.
            self._open(Path(folder) / FILE_NAME, start_iteration or NOTHING)
        if progress_bar and self._out.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=train_iters,
                initial=start_iteration,
                file=self._out,
                unit="it",
                dynamic_ncols=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.tell(END, error=str(error) or type(error).__name__)
        self.close()

    def close(self) -> None:
        """Close the file and leave the progress bar as it stands. Closing again does nothing."""
        if self._bar is not None:
            self._bar.close()
        if self._file is not None:
            self._file.close()
        self._bar = self._file = None
        for logger in self._loggers:
            logger.close()
        self._tell_problems()
        self._loggers = ()
        self._trackers = ()

    def _tell_problems(self) -> None:
        """Report what trackers have not taken, here and in ``events.jsonl``."""
        for tracker in self._trackers:
            for words in tracker.problems():
                self.say(f" warning: {words}")
                self.tell(FAULT, words=words)

    def _open(self, path: Path, iteration: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.reached = last_iteration(path)
        kept = truncate(path, iteration)
        self.evaluated = {
            entry["iteration"]: entry["validation_loss"]
            for entry in kept
            if "validation_loss" in entry
        }
        self._file = path.open("a", encoding="utf-8")

    def abandon(self, words: str) -> None:
        """Write nothing more into the folder, which has become another run's, except ``words`` on
        why this process ends, unless they are empty. Any thread may call it."""
        self._abandoned = True
        if words:
            self.tell(END, error=words)
        self._events = None

    def rewind(self, iteration: int) -> None:
        """Go back to ``iteration``, as the run did: later lines leave the file, not the
        terminal."""
        if self._file is not None and not self._abandoned:
            self._file.close()
            self._open(Path(self._file.name), iteration)
        self.event(REWIND, iteration=iteration, reached=self.reached)
        for logger in self._loggers:
            logger.rewind(iteration)
        if self._bar is not None:
            self._bar.n = iteration
            self._bar.refresh()

    def event(self, what: str, **details: Any) -> None:
        """Append an event of the run to ``events.jsonl``, which never loses a line. Raises
        CheckpointError."""
        events = self._events
        if events is not None:
            events.append(what, **details)

    def tell(self, what: str, **details: Any) -> None:
        """As ``event``, from any thread and without an error: a line that cannot be written is
        lost."""
        events = self._events
        if events is not None:
            events.tell(what, **details)

    def advance(self) -> None:
        """Move the progress bar by one optimizer step."""
        if self._bar is not None:
            self._bar.update(1)

    def write(self, record: StepRecord) -> None:
        """Log one interval. Raises TrainingError if a number in it is not finite: the run should
        have stopped before."""
        if not self._prints:
            return
        now = datetime.now()
        self.say(self._line(record, now))
        entry = {
            "iteration": record.iteration,
            record.names.loss.replace(" ", "_"): record.lm_loss,
            **record.numbers,
            **{key: getattr(record, key) for key in _JSON_KEYS},
        }
        entry["time"] = now.isoformat(timespec="seconds")
        if record.compute is not None:
            entry["compute_ms_min"] = record.compute.least
            entry["compute_ms_median"] = record.compute.median
            entry["compute_ms_max"] = record.compute.most
            entry["slowest_rank"] = record.compute.slowest
        self._append(entry)
        for logger in self._loggers:
            logger.step(record)
        self._tell_problems()

    def write_validation(self, record: ValidationRecord, *, in_curve: bool = True) -> None:
        """Log one evaluation.

        A resumed run that repeats the evaluation of its first iteration prints it again, but the
        file keeps one. An evaluation that is not ``in_curve`` is only printed: an uninterrupted run
        would not have made it.
        """
        if not self._prints:
            return
        self.say(format_validation(record))
        if in_curve and record.iteration not in self.evaluated:
            self.evaluated[record.iteration] = record.loss
            entry = {
                "iteration": record.iteration,
                "consumed_samples": record.consumed_samples,
                "validation_loss": record.loss,
                f"validation_{record.names.unit}": record.count,
                **{f"validation_{name}": value for name, value in record.numbers.items()},
            }
            self._append(entry)
            for logger in self._loggers:
                logger.validation(record)

    def say(self, line: str) -> None:
        """Print a line above the progress bar, on the printing rank."""
        if not self._prints:
            return
        if self._bar is not None:
            self._bar.write(line, file=self._out)
        else:
            print(line, file=self._out, flush=True)

    def _append(self, entry: dict[str, Any]) -> None:
        for key, value in entry.items():
            if isinstance(value, float) and not math.isfinite(value):
                where = f"{key} at iteration {entry['iteration']}"
                do = "lower --lr or look at the data of this step"
                raise TrainingError(where, got=value, expected="a finite number", do=do)
        if self._file is not None and not self._abandoned:
            try:
                self._file.write(json.dumps(entry) + "\n")
                self._file.flush()
            except OSError as error:
                do = "free space or mend the permissions, and resume with --load"
                raise CheckpointError(
                    self._file.name, got=error.strerror, expected="to append a line", do=do
                ) from error


def last_iteration(path: Path) -> int:
    """Return the iteration of the last whole line of ``path``; 0 where there is none."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        lines = file.read().splitlines()
    for line in reversed(lines):
        try:
            iteration = parse_json(line)["iteration"]
        except (ValueError, TypeError, KeyError):
            continue
        if isinstance(iteration, int):
            return iteration
    return 0


def truncate(path: Path, iteration: int) -> list[dict[str, Any]]:
    """Drop the lines of ``path`` beyond ``iteration`` and any line that was cut off. Returns the
    lines that are kept.

    The file is replaced in one step. A missing file counts as an empty one.
    """
    lines = []
    if path.exists():
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    kept = []
    for line in lines:
        try:
            entry = parse_json(line)
        except ValueError:  # no JSON, a number of too many digits, or deep nesting
            continue
        if (
            isinstance(entry, dict)
            and isinstance(entry.get("iteration"), int)
            and entry["iteration"] <= iteration
        ):
            kept.append((line, entry))
    with replacing(path, synced=True) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line, _ in kept)
    return [entry for _, entry in kept]
