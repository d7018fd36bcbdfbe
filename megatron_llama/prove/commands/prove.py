"""``prove``: compare a configuration, made small, with one process and with HuggingFace."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from textwrap import wrap
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatron_llama.config.parse import Parsed, flag
from megatron_llama.config.schema import TrainingConfig
from megatron_llama.config.sections import config_sections
from megatron_llama.errors import ClusterError, ConfigError, counted
from megatron_llama.launch.launcher import place_from_environment
from megatron_llama.planner.outputs import write_text
from megatron_llama.prove.prove_config import ProveConfig
from megatron_llama.train.setup.layout import AutoParallelConfig
from megatron_llama.tune.sft.sft_config import SFTConfig

if TYPE_CHECKING:
    from megatron_llama.prove.case import Case
    from megatron_llama.prove.proof import Proof

SECTIONS = (ProveConfig, SFTConfig, *config_sections(), AutoParallelConfig)
WIDTH = 100
"""Width of lines that go to a file."""
SECONDS: Mapping[str, int] = MappingProxyType({"s": 1, "m": 60, "h": 3600})


def prove(parsed: Parsed) -> int:
    """Prove a configuration, drawn configurations, or a finished run by its log. Returns 0 if all
    comparisons hold, 1 if one differs or cannot be made."""
    _require_one_process()
    options = parsed.get(ProveConfig)
    if options.fuzz and options.steps_from:
        do = "leave one of them out"
        raise ConfigError("--fuzz, --steps-from", got="both", expected="one of them", do=do)
    if options.fuzz < 0:
        expected = "a number of configurations"
        raise ConfigError("--fuzz", got=options.fuzz, expected=expected, do="give --fuzz N")
    if len(options.steps_from) > 2:
        got = counted(len(options.steps_from), "log")
        raise ConfigError(
            "--steps-from", got=got, expected="LOG, or LOG OTHER", do="leave some out"
        )
    _require_what_is_used(parsed)
    budget = _seconds(options.budget)
    folder = _output(options.output)
    if options.fuzz:
        return _fuzz(options.fuzz, parsed.get(TrainingConfig).seed, budget)
    if options.steps_from:
        return _compare_steps(parsed, budget, folder)
    return _prove(parsed, budget, folder)


def _prove(parsed: Parsed, budget: float, folder: Path | None) -> int:
    """Print the scaled options and the comparisons. Returns the exit code."""
    from megatron_llama.prove.given import processes_of
    from megatron_llama.prove.pool import WorkerPool
    from megatron_llama.prove.proof import prove_case
    from megatron_llama.prove.report import as_json, lines, page, verdict
    from megatron_llama.prove.shrink import shrink

    options = parsed.get(ProveConfig)
    world_size, assumed = processes_of(parsed, options.world_size)
    cases = shrink(parsed, world_size, options.ranks)
    if assumed:
        print(assumed)
    ends = time.monotonic() + budget
    proofs: list[Proof] = []
    with WorkerPool() as pool, tempfile.TemporaryDirectory(prefix="prove-") as runs:
        for number, case in enumerate(cases):
            for line in told(case, world_size, get_terminal_size((WIDTH, 0)).columns):
                print(line)
            left = (ends - time.monotonic()) / (len(cases) - number)
            print(f"comparing, for about {left:.0f} s at most\n", flush=True)
            proofs.append(prove_case(pool, case, Path(runs) / str(number), left, say=_progress))
            for line in lines(proofs[-1]):
                print(line)
            print(flush=True)
    if folder is not None:
        _write(folder, as_json(proofs))
        write_text("--output", str(folder / "prove.html"), page(proofs, "prove"))
    print(verdict(proofs))
    return 0 if all(proof.holds for proof in proofs) else 1


def _progress(line: str) -> None:
    """Print a line on the progress of a proof to stderr, apart from its results."""
    print(f"  {line}", file=sys.stderr, flush=True)


def _fuzz(count: int, seed: int, budget: float) -> int:
    """Print the results of drawn configurations, each with ``budget``. Returns the exit code."""
    from megatron_llama.prove.fuzz import Prover, fuzz
    from megatron_llama.prove.pool import WorkerPool

    # Lines are flushed, since users look at the output file of many cases before its end.
    say = partial(print, flush=True)
    with WorkerPool() as pool, tempfile.TemporaryDirectory(prefix="prove-") as runs:
        return 0 if fuzz(Prover(pool, Path(runs), budget), seed, count, say=say).holds else 1


def _compare_steps(parsed: Parsed, budget: float, folder: Path | None) -> int:
    """Print whether a run's log drifts from another log or one process. Returns the exit code."""
    from megatron_llama.prove.drift import Dtype, as_json, compare_logs, lines
    from megatron_llama.prove.first_steps import first_steps
    from megatron_llama.prove.given import processes_of
    from megatron_llama.prove.logs import read_log
    from megatron_llama.prove.pool import WorkerPool

    options = parsed.get(ProveConfig)
    training = parsed.get(TrainingConfig)
    log, *others = (Path(path) for path in options.steps_from)
    if others:
        # A configuration without a dtype is fp32. Without a configuration the runs may be in bf16.
        configured = parsed.explicit - {field.name for field in fields(ProveConfig)}
        default: Dtype = "bf16" if training.bf16 or not configured else "fp32"
        dtype = options.log_dtype or ("fp16" if training.fp16 else default)
        drift = compare_logs(log, others[0], dtype=dtype)
    else:
        world_size, assumed = processes_of(parsed, options.world_size)
        if assumed:
            print(assumed)
        read = read_log(log)
        own = {kind: value for kind, value in parsed.instances.items() if kind is not ProveConfig}
        with WorkerPool() as pool:
            drift = first_steps(
                pool, replace(parsed, instances=own), world_size, read, seconds=budget
            )
    for line in lines(drift):
        print(line)
    if folder is not None:
        _write(folder, as_json(drift))
    return 0 if drift.verdict == "rounding" else 1


def _require_what_is_used(parsed: Parsed) -> None:
    """Raise ConfigError for options that would change nothing."""
    options = parsed.get(ProveConfig)
    if options.fuzz:
        what = f"--fuzz {options.fuzz}"
        unused = parsed.explicit - {"fuzz", "seed", "budget"}
        why = "configurations are drawn over all options; --seed and --budget (of each) count"
    elif len(options.steps_from) == 2:
        what = "--steps-from LOG OTHER"
        unused = parsed.explicit & {"world_size", "ranks", "budget"}
        why = "nothing is trained"
    elif options.steps_from:
        what = "--steps-from LOG"
        unused = parsed.explicit & {"ranks", "log_dtype"}
        why = "the configuration says the type, and one process trains it"
    else:
        what = "a configuration"
        unused = parsed.explicit & {"log_dtype"}
        why = "it goes with --steps-from LOG OTHER"
    if unused:
        names = sorted(unused)
        some = ", ".join(map(flag, names[:5])) + (" ..." if len(names) > 5 else "")
        do = f"leave out what would change nothing: {why}"
        raise ConfigError(what, got=some, expected="no such option beside it", do=do)


def told(case: Case, world_size: int, width: int) -> Iterator[str]:
    """Yield the changes to the user's configuration in lines of ``width`` characters: scaled
    options, and why they show the same; options that may have no effect; options left out; then, in
    short, options kept."""
    scaled = [note for note in case.notes if note.is_scaled]
    here = counted(case.world_size, "process", "processes")
    kind = "sft" if case.sft else "pretrain"
    whole = "" if case.world_size == world_size else f"{world_size} processes shown on "
    yield f"{case.name}: {kind}, {whole}{here}{'' if scaled else ', nothing scaled'}"
    kept = [note for note in case.notes if note.yours == note.here]
    rows = [(note.option, f"{note.yours} -> {note.here}: {note.why}") for note in scaled]
    rows += [(note.option, f"{note.here}: kept; {note.why}") for note in kept if note.why]
    column = max((len(option) for option, _ in rows), default=0) + 4
    for option, text in rows:
        yield from _wrapped(text, width, f"  {option}".ljust(column), " " * column)
    left_out = [note for note in case.notes if note.is_left_out]
    if left_out:
        options = {
            why: ", ".join(note.option for note in left_out if note.why == why)
            for why in dict.fromkeys(note.why for note in left_out)
        }
        text = "; ".join(f"{names} ({why})" for why, names in options.items())
        yield from _wrapped(f"left out: {text}", width, "  ", "    ")
    plain = [f"{note.option} {note.here}" for note in kept if not note.why]
    if scaled and plain:
        yield from _wrapped(f"kept: {', '.join(plain)}", width, "  ", "    ")


def _wrapped(text: str, width: int, first: str, others: str) -> list[str]:
    return wrap(text, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)


def _require_one_process() -> None:
    """Raise ClusterError under a launcher, since the command starts its processes itself."""
    place = place_from_environment()
    if place.world_size > 1:
        raise ClusterError(
            "prove",
            got=f"{place.world_size} processes that torchrun or srun started",
            expected="one, which starts the others",
            do="start it without them; --world-size says how many processes the run has",
        )


def _seconds(text: str) -> float:
    """Return the seconds of a text such as ``90s``, ``3m`` or ``1h``. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if match is None or float(match[1]) == 0:
        expected = "a number of seconds, minutes or hours, such as 90s, 3m or 1h"
        raise ConfigError("--budget", got=text, expected=expected, do="correct it")
    return float(match[1]) * SECONDS[match[2]]


def _output(path: str | None) -> Path | None:
    """Make the output folder and return it. It is made first, so that an error comes before minutes
    of work. Raises ConfigError."""
    if path is None:
        return None
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        expected = "a folder that can be made"
        raise ConfigError(
            "--output", got=error.strerror, expected=expected, do="check the path"
        ) from None
    return folder


def _write(folder: Path, content: Mapping[str, Any]) -> None:
    """Write the result for programs."""
    write_text("--output", str(folder / "prove.json"), json.dumps(content, indent=1) + "\n")
    print(f"written: {folder}")
