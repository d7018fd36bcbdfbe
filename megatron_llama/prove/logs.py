"""Reads losses and gradient norms of a finished run from the log of its trainer."""

from __future__ import annotations

import gzip
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from megatron_llama.config.fields import shown
from megatron_llama.config.limits import LARGEST_ITERATION, LARGEST_LINE, LARGEST_UNPACKED
from megatron_llama.config.lines import bounded_lines, parse_json
from megatron_llama.errors import DataError, counted
from megatron_llama.metrics.log import FILE_NAME

OURS = "megatron_llama"
MEGATRON = "Megatron-LM"
TITAN = "torchtitan"
FP32_ROUNDING = 2.0**-24
"""Relative rounding of a number with all digits: trainers compute losses in fp32, and TensorBoard
keeps fp32."""


@dataclass(frozen=True)
class Number:
    """A number of a log. It may be NaN or infinite, like the run's own number."""

    value: float
    rounding: float
    """Largest distance from the run's own number: the rounding of fp32, and half a unit of the last
    printed digit."""


@dataclass(frozen=True)
class LoggedStep:
    """A log's record of one optimizer step."""

    iteration: int
    """Number of optimizer steps done, so 1-based."""
    loss: Number | None
    """None if the log has none. NaN if the log says that it was not finite."""
    grad_norm: Number | None
    """Norm of this step alone, before clipping. None if the log has none. NaN if the log says that
    it was not finite."""
    mean_of: int
    """Number of steps, up to this one, whose mean is the loss; 0 if the log does not say."""
    where: str
    """File and line."""
    skipped: int = 0
    """Steps since the last line that did not change the weights, as far as the log says."""


@dataclass(frozen=True)
class RunLog:
    """The curve of a run. If an iteration was repeated, it has the later one."""

    path: Path
    trainer: str
    steps: Mapping[int, LoggedStep]
    """Steps by iteration, in ascending order; never empty."""
    notes: tuple[str, ...]
    """Decisions of the reader, as sentences."""


def read_log(path: Path) -> RunLog:
    """Return the curve of a run.

    ``path`` is a file or a folder: a ``log.jsonl`` of ours, the printed text of Megatron-LM,
    torchtitan or this trainer, packed by gzip or not, or TensorBoard's events of one of the three.
    The kind of a file is decided by its content. Several text files or event files of a folder are
    read in the order of their names, as parts of one run. Raises DataError, with the file and the
    line, for content that is not understood.
    """
    notes: list[str] = []
    try:
        files = _files(path)
        if all(_holds_events(file) for file in files):
            trainer, entries = _events(files)
        else:
            trainer, entries = _lines_of(files, notes)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        where = getattr(error, "filename", None) or path
        do = "mend its permissions, or name another copy of it"
        raise DataError(where, got=reason, expected="a log that can be read", do=do) from error
    if not entries:
        raise DataError(
            path,
            got=notes[0] if notes else "no line of a training step",
            expected="'iteration 5/ 100 | ... lm loss: ...' (Megatron-LM), "
            f"'step: 5  loss: ...' (torchtitan), our {FILE_NAME}, or TensorBoard's events",
            do="name the file that has the loss of every step",
        )
    steps = _averaged(trainer, _one_curve(path, _with_loss(path, entries, notes), notes), notes)
    return RunLog(path, trainer, MappingProxyType(steps), tuple(notes))


SMALLEST_PACKED = 2**20
"""Packed files smaller than this may unpack to as much as a file of this size."""
LONGEST_NUMBER = 64
"""Most characters of a number in a log."""
LARGEST_EXPONENT = 400
"""Largest decimal exponent of a number in a log; fp64 ends at 308."""
_TEXTS = frozenset({".log", ".out", ".err", ".txt", ".jsonl"})


def _files(path: Path) -> list[Path]:
    """Return the files of the run in order."""
    if not path.exists():
        raise DataError(path, got="no such file", expected="a log", do="check the path")
    if path.is_file():
        return [path]
    if not path.is_dir():
        do = "write what it says into a file, and name that"
        raise DataError(path, got="a pipe or a device", expected="a file or a folder", do=do)
    if (path / FILE_NAME).is_file():
        return [path / FILE_NAME]
    files = sorted((file for file in path.rglob("*") if file.is_file()), key=_in_numbers)
    events = [file for file in files if _holds_events(file)]
    texts = [file for file in files if _TEXTS & set(file.suffixes[-2:])]
    if not events and not texts:
        raise DataError(
            path,
            got="no log in this folder",
            expected=f"{FILE_NAME}, event files of TensorBoard, or files *.log, *.out or *.txt",
            do="name the file itself",
        )
    return events or texts


def _in_numbers(path: Path) -> list[tuple[int, str]]:
    """Return a key that sorts ``rank10`` after ``rank9``."""
    parts = re.split(r"(\d+)", str(path))
    return [(int(piece), "") if piece.isdecimal() else (-1, piece) for piece in parts]


def _holds_events(path: Path) -> bool:
    """Whether TensorBoard wrote the file: its first record names the version of the format."""
    with path.open("rb") as file:
        return b"brain.Event:" in file.read(64)


def _opened(path: Path) -> IO[str]:
    """Return an open text, packed or not, in UTF-8, or in UTF-16 as the shell of Windows writes."""
    with path.open("rb") as file:
        begin = file.read(2)
    if begin == b"\x1f\x8b":
        return gzip.open(path, "rt", encoding="utf-8", errors="replace")
    code = "utf-16" if begin in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    return path.open(encoding=code, errors="replace")


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
# Each of these takes time proportional to the length of any line.
_MEGATRON_STEP = re.compile(r"\biteration\s+(\d{1,12})\s*/\s*\d+\s*\|")
_TITAN_STEP = re.compile(r"(?<!validate )\bstep:\s*(\d{1,12})\s+loss:\s*(\S+)")
_TITAN_REST = re.compile(r"(?:\s+grad_norm:\s*(?P<norm>\S+))?\s+(?!grad_norm)\w+:")
"""Text after a step and its loss: the norm, and the next field, which shows that both have all
their digits."""
_ONLY_OURS = "tokens/s/GPU"
"""A field of our lines that lines of Megatron never have."""
_NOT_COMPACT = "number of nan iterations"
"""A field of our lines that only --log-format megatron has."""
_BANNER = re.compile(r" iterations +([\d,]{1,24}) to \d")
_LOADED = "loaded checkpoint from "
_LOADED_AT = re.compile(r" at iteration (\d{1,12})")
"""Text of our banner, and of Megatron, with the iteration at which a run begins."""
_INTERVAL = -1
"""Value of ``mean_of`` until all lines are read. It stands for the steps between two lines."""


def _lines_of(files: Iterable[Path], notes: list[str]) -> tuple[str, list[LoggedStep]]:
    """Return the trainer that wrote the lines, and the steps in the order of lines. Lines that were
    cut off are left out, with a note."""
    entries: list[LoggedStep] = []
    trainers: dict[str, str] = {}
    torn: list[str] = []
    for path in files:
        with _opened(path) as file:
            is_json = _is_json(path)
            lines = _numbered_lines(path, file, notes, skips_long=not is_json)
            steps = _json_steps(lines) if is_json else _text_steps(lines, torn)
            for trainer, entry in steps:
                trainers.setdefault(trainer, entry.where)
                entries.append(entry)
    if len(trainers) > 1:
        origins = " and ".join(f"lines of {name} ({where})" for name, where in trainers.items())
        raise DataError(
            ", ".join(map(str, files)), got=origins, expected="one run", do="name its log alone"
        )
    if torn:
        some = ", ".join(torn[:5]) + (" ..." if len(torn) > 5 else "")
        lines_of = counted(len(torn), "line of a step", "lines of steps")
        notes.append(f"{lines_of} without a whole loss left out, as cut off: {some}")
    return next(iter(trainers), ""), entries


def _numbered_lines(
    path: Path, file: IO[str], notes: list[str], *, skips_long: bool
) -> Iterator[tuple[str, str]]:
    """Yield the lines of a file with their places. A line that is too long is left out with a note,
    or refused. Raises DataError, also for a packed file that unpacks to far more than its size."""
    most = LARGEST_UNPACKED * max(path.stat().st_size, SMALLEST_PACKED)
    length = 0
    for number, line in enumerate(bounded_lines(file), 1):
        where = f"{path}:{number}"
        length += LARGEST_LINE if line is None else len(line)
        if length > most:
            got = f"more than {most:,} characters in a file of {path.stat().st_size:,} bytes"
            expected = f"at most {LARGEST_UNPACKED} times its size"
            raise DataError(path, got=got, expected=expected, do="unpack it, and name the log")
        if line is not None:
            yield where, line
        elif skips_long:
            notes.append(f"{where} has more than {LARGEST_LINE:,} characters and is left out")
        else:
            got = f"a line of more than {LARGEST_LINE:,} characters"
            expected = "a JSON object in each line"
            raise DataError(where, got=got, expected=expected, do="take the line out")


def _is_json(path: Path) -> bool:
    with _opened(path) as file:
        first = next((line for line in bounded_lines(file) if line is None or line.strip()), "")
    first = first or ""
    return first.lstrip().startswith(("{", "[{")) or first.strip() == "["


def _json_steps(lines: Iterable[tuple[str, str]]) -> Iterator[tuple[str, LoggedStep]]:
    """Yield the steps of a ``log.jsonl`` without evaluations. A last line that was cut off when the
    run was killed is left out too."""
    bad: str | None = None
    good = 0
    for where, line in lines:
        if bad is not None:
            raise DataError(
                bad,
                got="a line that is cut off" if good else "JSON over several lines",
                expected="a JSON object in each line",
                do="take the line out if the run went on behind it"
                if good
                else f"name a {FILE_NAME} that pretrain or sft has written",
            )
        if not line.strip():
            continue
        try:
            entry = parse_json(line)
        except ValueError:
            bad = where
            continue
        good += 1
        if isinstance(entry, dict) and "validation_loss" in entry:
            continue
        iteration = entry.get("iteration") if isinstance(entry, dict) else None
        skipped = entry.get("skipped_iterations", 0) if isinstance(entry, dict) else 0
        if (
            type(iteration) is not int
            or not 1 <= iteration <= LARGEST_ITERATION
            or type(skipped) is not int
            or not 0 <= skipped <= LARGEST_ITERATION
            or "lm_loss" not in entry
        ):
            raise DataError(
                where,
                got=line.strip()[:60],
                expected="an object with iteration and lm_loss",
                do=f"name a {FILE_NAME} that pretrain or sft has written",
            )
        loss, norm = (_computed(where, entry.get(key)) for key in ("lm_loss", "grad_norm"))
        yield OURS, LoggedStep(iteration, loss, norm, 1, where, skipped)


def _computed(where: str, value: Any) -> Number:
    """Return a number that has all digits. JSON has null for a number that is not finite."""
    number = math.nan if value is None else value
    if isinstance(number, int) and not isinstance(number, bool) and abs(number) < 2**64:
        number = float(number)
    if not isinstance(number, float):
        raise DataError(where, got=repr(value)[:60], expected="a number", do="mend the line")
    return Number(number, abs(number) * FP32_ROUNDING)


def _text_steps(
    lines: Iterable[tuple[str, str]], torn: list[str]
) -> Iterator[tuple[str, LoggedStep]]:
    """Yield the steps of a text. ``torn`` gets the places of lines that were cut off."""
    begun: int | None = None
    for where, line in lines:
        if "iteration" not in line and "step:" not in line:
            continue
        plain = _COLOUR.sub("", line)
        if _MEGATRON_STEP.search(plain):
            trainer, step = _megatron_step(where, plain)
            if step.loss is None and not step.skipped:
                torn.append(where)
                continue
            # Sums begin with the process, so its first mean may be over fewer steps than others.
            if begun is not None and step.mean_of == _INTERVAL and step.iteration > begun:
                step = replace(step, mean_of=step.iteration - begun)
            begun = None
            yield trainer, step
        elif (first := _first_of_process(plain)) is not None:
            begun = first
        elif begin := _TITAN_STEP.search(plain):
            if _TITAN_REST.match(plain, begin.end()):
                yield TITAN, _titan_step(where, plain)
            else:
                torn.append(where)


def _first_of_process(line: str) -> int | None:
    """Return the iteration from which a process goes on; None if the line does not say it."""
    if banner := _BANNER.match(line):
        return int(banner[1].replace(",", "") or 0) - 1
    _, loaded, rest = line.partition(_LOADED)
    places = _LOADED_AT.findall(rest) if loaded else []
    return int(places[-1]) if places else None


def _field(text: str) -> tuple[str, str] | None:
    """Return the name and value of a field of Megatron: ``name: value`` or ``name value``. The
    value is the last word."""
    words = text.rsplit(maxsplit=1)
    if len(words) < 2 or not words[0].strip():
        return None
    name = words[0].strip()
    return name.removesuffix(":").rstrip() or name, words[1]


def _megatron_step(where: str, line: str) -> tuple[str, LoggedStep]:
    """Return the trainer and the step of a line of Megatron-LM's ``training_log`` of any year. Its
    fields end with bars. Their order has changed; names end with a colon since 2020. A loss or norm
    without a bar after it may have lost digits and is left out."""
    begins = list(_MEGATRON_STEP.finditer(line))
    if len(begins) > 1:
        do = "let each process write a file of its own"
        raise DataError(where, got="two steps in one line", expected="one", do=do)
    fields: dict[str, str] = {}
    whole = line[begins[0].end() :].split("|")[:-1]
    for field in whole:
        if pair := _field(field):
            fields[pair[0]] = pair[1]
    loss = _printed(
        where, next((fields[key] for key in ("lm loss", "lm_loss") if key in fields), None)
    )
    norm = _printed(where, fields.get("grad norm"))
    count = re.search(r"number of skipped iterations:?\s+(\d{1,12})\b", line)
    skipped = int(count[1]) if count else 0
    trainer = OURS if _ONLY_OURS in fields else MEGATRON
    compact = trainer == OURS and _NOT_COMPACT not in fields
    # Means are over the steps that were not skipped. Some years' Megatron printed 0 without any.
    if skipped and not compact and loss is not None and not loss.value > 0.0:
        loss = None
    mean_of = 1 if compact else 0 if skipped else _INTERVAL
    return trainer, LoggedStep(int(begins[0][1]), loss, norm, mean_of, where, skipped)


def _titan_step(where: str, line: str) -> LoggedStep:
    """Return the step of a line of torchtitan's ``MetricsProcessor``. Before mid-2025 a line had no
    gradient norm, and the loss was the mean since the last line. Now it is the loss of the step."""
    begins = list(_TITAN_STEP.finditer(line))
    if len(begins) > 1:
        do = "let each process write a file of its own (torchrun --log-dir)"
        raise DataError(where, got="two steps in one line", expected="one", do=do)
    whole = _TITAN_REST.match(line, begins[0].end())
    norm = _printed(where, whole["norm"]) if whole is not None else None
    return LoggedStep(
        int(begins[0][1]), _printed(where, begins[0][2]), norm, int(norm is not None), where
    )


def _printed(where: str, text: str | None) -> Number | None:
    """Return a number with the rounding of its printed digits."""
    if text is None:
        return None
    try:
        if len(text) > LONGEST_NUMBER:
            raise InvalidOperation
        number = Decimal("nan" if text == "n/a" else text)
        if number.is_finite() and abs(number.adjusted()) > LARGEST_EXPONENT:
            raise InvalidOperation
    except InvalidOperation:
        do = (
            "write it with a decimal point, and nothing between thousands"
            if re.fullmatch(r"[\d.,]+([eE][+-]?\d+)?", text)
            else "if lines of several processes are mixed, let each write a file of its own"
        )
        raise DataError(where, got=shown(text), expected="a number", do=do) from None
    if number.is_nan():
        return Number(math.nan, 0.0)
    if not number.is_finite():
        return Number(float(number), 0.0)
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int)
    digits = float(Decimal(1).scaleb(exponent)) / 2
    return Number(float(number), digits + abs(float(number)) * FP32_ROUNDING)


_TAGS = (
    ("lm loss", "grad-norm", MEGATRON),
    ("lm-loss-training/lm loss", "grad-norm/grad-norm", MEGATRON),
    ("loss_metrics/global_avg_loss", "grad_norm", TITAN),
)
"""Tags of loss and gradient norm, and the trainer: Megatron-LM and ours, Megatron-DeepSpeed,
torchtitan."""


def _events(files: Iterable[Path]) -> tuple[str, list[LoggedStep]]:
    """Return the trainer and the steps of TensorBoard's event files. There Megatron writes the loss
    of the step itself, even if its text has a mean."""
    if find_spec("tensorboard") is None:
        do = "pip install '.[tensorboard]', or name the text log"
        raise DataError(
            "--steps-from", got="event files", expected="the package tensorboard", do=do
        )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainers: set[str] = set()
    entries: list[LoggedStep] = []
    names: set[str] = set()
    for path in files:
        events: Any = EventAccumulator(str(path), size_guidance={"scalars": 0})
        try:
            events.Reload()
        except Exception as error:  # of tensorboard and protobuf, for records that are none
            got = f"a record that is damaged ({type(error).__name__})"
            do = "copy the file again, or name the text log"
            raise DataError(path, got=got, expected="TensorBoard's events", do=do) from error
        scalars = set(events.Tags()["scalars"])
        names |= scalars
        for loss_tag, norm_tag, trainer in _TAGS:
            if loss_tag not in scalars:
                continue
            trainers.add(trainer)
            norms = (
                {e.step: e.value for e in events.Scalars(norm_tag)} if norm_tag in scalars else {}
            )
            for event in events.Scalars(loss_tag):
                where = f"{path}: step {event.step}"
                if not 0 <= event.step <= LARGEST_ITERATION:
                    expected = f"a step from 0 to {LARGEST_ITERATION:,}"
                    raise DataError(where, got=event.step, expected=expected, do="copy it again")
                loss, norm = (_computed(where, v) for v in (event.value, norms.get(event.step)))
                mean_of = 0 if trainer == TITAN and norm is None else 1
                entries.append(LoggedStep(event.step, loss, norm, mean_of, where))
            break
    if len(trainers) != 1:
        raise DataError(
            ", ".join(map(str, files)),
            got=f"events named {', '.join(sorted(names)[:12]) or 'nothing'}",
            expected=f"the loss of one run, named {' or '.join(tag for tag, _, _ in _TAGS)}",
            do="name the folder of one run of Megatron-LM, torchtitan or megatron_llama",
        )
    return trainers.pop(), entries


def _with_loss(path: Path, entries: Iterable[LoggedStep], notes: list[str]) -> list[LoggedStep]:
    """Return the steps without lines of torchtitan's processes before the last pipeline stage. They
    compute no loss and print -1."""
    kept: list[LoggedStep] = []
    dropped = 0
    for entry in entries:
        if entry.loss is not None and entry.loss.value == -1.0:
            dropped += 1
        else:
            kept.append(entry)
    if not kept:
        raise DataError(
            path,
            got="a loss of -1 in every line",
            expected="losses",
            do="name the log of a rank of the last pipeline stage (LOG_RANK), or the events",
        )
    if dropped:
        lines = counted(dropped, "line")
        notes.append(f"{lines} of ranks in front of the last pipeline stage (loss -1) left out")
    return kept


def _one_curve(
    path: Path, entries: Iterable[LoggedStep], notes: list[str]
) -> dict[int, LoggedStep]:
    """Return each step once. Several processes may have written each line, and a run that died may
    have repeated steps: the later ones count, and the steps after the earlier ones do not."""
    steps: dict[int, LoggedStep] = {}
    returns: list[LoggedStep] = []
    seen: set[int] = set()
    for entry in entries:
        seen.add(entry.iteration)
        if (known := steps.get(entry.iteration)) is not None and _same(known, entry):
            continue
        if steps and entry.iteration <= next(reversed(steps)):
            returns.append(entry)
            # Iterations grow, so the last ones are those that no longer count.
            while steps and next(reversed(steps)) >= entry.iteration:
                steps.popitem()
            if not steps:
                notes.append(
                    f"{entry.where} begins anew, and nothing before it counts: if these are two "
                    "runs, name the files of one"
                )
            # Megatron's sums begin anew with the process.
            entry = replace(entry, mean_of=max(entry.mean_of, 0))
        steps[entry.iteration] = entry
    # A run does not die every third step. Lines that go back so often belong to two runs, or to
    # processes that each print a loss of their own.
    if len(returns) > max(2, len(seen) // 3):
        raise DataError(
            returns[0].where,
            got=f"another loss for iteration {returns[0].iteration} than a line before, "
            f"and so {len(returns)} times in {path}",
            expected="one run, and the same numbers from all of its processes",
            do="name the log of one process",
        )
    if returns:
        at = ", ".join(f"{entry.iteration} ({entry.where})" for entry in returns[:5])
        notes.append(f"the run went back to iteration {at}: the later lines count")
    return steps


def _same(step: LoggedStep, other: LoggedStep) -> bool:
    return repr((step.loss, step.grad_norm)) == repr((other.loss, other.grad_norm))


def _averaged(
    trainer: str, steps: dict[int, LoggedStep], notes: list[str]
) -> dict[int, LoggedStep]:
    """Return the steps with ``mean_of`` as far as the distances of lines show it."""
    places = list(steps)
    gaps = Counter(b - a for a, b in pairwise(places))
    # One line alone shows no interval. If it is not of the first step, it may be a mean.
    interval = gaps.most_common(1)[0][0] if gaps else max(places[0], 1)
    settled: dict[int, LoggedStep] = {}
    for iteration, step in steps.items():
        mean_of = step.mean_of
        if mean_of == _INTERVAL:
            # Megatron of 2026 also prints the first step and includes it in the next mean. A file
            # that begins later may begin in the middle of an interval.
            whole = iteration % interval == 0 and (iteration > places[0] or iteration == interval)
            mean_of = 1 if iteration == 1 else interval if gaps and whole else 0
        settled[iteration] = replace(step, mean_of=mean_of if interval > 1 else 1)
    if interval > 1 and any(step.mean_of > 1 for step in settled.values()):
        notes.append(f"losses are means over {interval} steps, as {trainer} prints them")
    elif gaps and interval > 1:
        notes.append(f"there is a line every {interval} steps")
    lost = [
        iteration
        for iteration, step in settled.items()
        if step.loss is None or not math.isfinite(step.loss.value)
    ]
    if lost:
        some = ", ".join(map(str, lost[:5])) + (" ..." if len(lost) > 5 else "")
        notes.append(f"no finite loss at {counted(len(lost), 'iteration')}: {some}")
    return settled
