"""Everything that only a GPU can show, part by part; a part that fails does not keep the others
from running. Reports are written after each part, and all is over when --minutes are: what has not
run by then is said to."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, and no other

from tools.gpucheck.figures import into
from tools.gpucheck.parts import ROOT, Part, Setting, all_parts
from tools.gpucheck.report import BEGUN, CANNOT, PASSED, Outcome, markdown, read, rows_of, write

REPORT = "gpu_check.json"
TABLES = "gpu_check.md"
EXAMPLE_MEMORY = 150_754_820_096
"""An H200's, where parts are listed without a GPU."""
LEAST = 45.0
"""Seconds with which a part is still worth starting."""
GRACE = 10.0
"""Seconds in which a part that takes too long may write what it has."""
KILLED = 15.0
"""Seconds after which nobody waits for a killed process any more: one whose GPU hangs may stay in
the driver."""


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line; exits with status 2 and one message where it is wrong."""
    parser = argparse.ArgumentParser(
        "bash tools/gpu_check.sh", description=__doc__, allow_abbrev=False
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/gpu_check"),
        metavar="FOLDER",
        help="of reports (default build/gpu_check)",
    )
    parser.add_argument(
        "--only", metavar="PART,...", help="these parts, by name, or all whose names begin so"
    )
    parser.add_argument(
        "--layers",
        type=int,
        default=0,
        help="at most so many in the benches of a step (default: all that fit)",
    )
    parser.add_argument(
        "--rounds", type=int, default=1, help="of the benches of a step (default 1)"
    )
    parser.add_argument(
        "--steps", type=int, default=4, help="timed steps in each of their rounds (default 4)"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="for everything (default 30)")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="tiny models, on a CPU too: shows that the check works, and no figures",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="parts at once, with --tiny: what does not work shows in minutes (default 1)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="leave out the parts that have passed, by the report in FOLDER",
    )
    parser.add_argument("--list", action="store_true", help="print the commands, run nothing")
    parser.add_argument(
        "--table",
        type=Path,
        metavar="FILE",
        nargs="+",
        help="print the tables of reports as one, run nothing",
    )
    parser.add_argument(
        "--into",
        type=Path,
        metavar="PAGE",
        help="write the figures of the report into the rows of a page that say `not measured`, and "
        "run nothing; the report is that of --out, or REPORT",
    )
    parser.add_argument("report", type=Path, nargs="?", metavar="REPORT", help="for --into")
    options = parser.parse_args(words)
    if options.jobs < 1 or (options.jobs > 1 and not options.tiny):
        parser.error("--jobs: at least 1, and with --tiny alone: figures need the device alone")
    if options.layers < 0 or options.rounds < 1 or options.steps < 1 or options.minutes <= 0:
        parser.error(
            "--layers is not negative, --rounds and --steps are at least 1, --minutes is positive"
        )
    known = [part.name for part in all_parts(setting_of(options, EXAMPLE_MEMORY))]
    wanted = options.only.split(",") if options.only is not None else [""]
    if unknown := [name for name in wanted if not any(one.startswith(name) for one in known)]:
        parser.error(
            f"--only: no part begins with {', '.join(unknown)}; there are {', '.join(known)}"
        )
    options.wanted = tuple(wanted)
    return options


def setting_of(options: argparse.Namespace, memory: int, *, gpus: int = 1) -> Setting:
    """What the parts depend on."""
    return Setting(
        options.out,
        memory,
        options.layers,
        options.rounds,
        options.steps,
        tiny=options.tiny,
        gpus=gpus,
    )


def run(part: Part, folder: Path, seconds: float) -> Outcome:
    """Run one part for at most so long, in a process group of its own, its output into
    ``FOLDER/NAME.log`` and the end of that here."""
    command = shlex.join(part.command)
    print(f"== {part.name}: {command}", flush=True)
    if part.json is not None:
        Path(part.json).unlink(missing_ok=True)  # of an earlier check
    outcome = Outcome(part.name, part.title, command, "", 0.0, absent=part.absent)
    if part.obstacle is not None:
        return replace(outcome, status=f"{CANNOT}: {part.obstacle}")
    if seconds < min(LEAST, part.seconds):
        return replace(outcome, status=f"{CANNOT}: no time was left")
    begin = time.monotonic()
    log = folder / f"{part.name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            part.command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=min(seconds, part.seconds))
            status = PASSED if code == 0 else f"failed with {code}"
        except subprocess.TimeoutExpired:
            status = "took too long"
        finally:
            end(process)
    text = log.read_text(errors="replace")
    print(text[-4000:].rstrip(), flush=True)
    rows, absent = rows_of(part)
    tail = "" if status == PASSED else text[-2000:]
    return replace(
        outcome,
        status=status,
        seconds=time.monotonic() - begin,
        rows=rows,
        absent=part.absent + absent,
        tail=tail,
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """The process, if it still runs, and what it has started: asked first, so that it can write
    what it has."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILLED)


def check(
    parts: Sequence[Part],
    folder: Path,
    seconds: float,
    machine: dict[str, str],
    earlier: Sequence[Outcome] = (),
    *,
    jobs: int = 1,
) -> int:
    """Run parts, ``jobs`` at once, for so long at most and write the reports, before and after each
    one: what ends the check early, even with the machine, leaves what was found and where it ended.
    ``earlier`` outcomes are in the reports too. 0 if all passed, else 1."""
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    outcomes = list(earlier)
    under_way: dict[str, Outcome] = {}
    noting = Lock()

    def do(part: Part) -> None:
        begun = Outcome(part.name, part.title, shlex.join(part.command), BEGUN, 0.0)
        with noting:
            under_way[part.name] = begun
            write(folder / REPORT, machine, [*outcomes, *under_way.values()])
        outcome = run(part, folder, seconds - GRACE - (time.monotonic() - begin))
        clock = f"{(time.monotonic() - begin) / 60:.1f} of {seconds / 60:g} minutes"
        print(f"== {part.name}: {outcome.status}, {outcome.seconds:.0f} s; {clock}\n", flush=True)
        with noting:
            del under_way[part.name]
            outcomes.append(outcome)
            write(folder / REPORT, machine, [*outcomes, *under_way.values()])
            (folder / TABLES).write_text("\n".join(markdown(machine, outcomes)) + "\n")

    if jobs == 1:
        for part in parts:  # in this thread, which an interrupt ends
            do(part)
    else:
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(do, parts))
    print((folder / TABLES).read_text())
    bad = [outcome.name for outcome in outcomes if not outcome.passed]
    if bad:
        print(
            f"error: {len(bad)} of {len(outcomes)} parts did not pass: {', '.join(bad)}; "
            f"see {folder}/NAME.log",
            file=sys.stderr,
        )
    return 1 if bad else 0


def machine_of() -> tuple[dict[str, str], int] | None:
    """What this machine computes with, and its memory in bytes; None without a GPU."""
    import torch

    from megatron_llama.engine.comm import device as devices

    device = devices.accelerator(0)
    if devices.is_host(device):
        return None
    query = [
        "nvidia-smi",
        "--query-gpu=driver_version,power.limit,clocks.max.sm",
        "--format=csv,noheader",
    ]
    try:
        said = subprocess.run(
            query, capture_output=True, text=True, check=True
        ).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        said = "unknown"
    try:
        revision = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
        ).stdout.strip()
    except OSError:
        revision = ""  # no git here, as where only the files were copied
    named = {
        "device": devices.name(device),
        "commit": revision or "unknown",
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
    }
    return {**named, "driver, power limit, highest clock": said}, devices.memory_bytes(device)


def main(words: Sequence[str]) -> int:
    """The exit status: 0 if all parts passed, 1 if some did not, 2 for what is wrong with the call
    or the machine."""
    options = parse(words)
    if options.table is not None:
        return print_tables(options.table)
    if options.into is not None:
        return write_figures(options.into, options.report or options.out / REPORT)
    machine = None if options.list else machine_of()
    if machine is None and not (options.list or options.tiny):
        do = (
            "install torch for CUDA, or run this where there is one (--list, --table and "
            "--tiny work here)"
        )
        print(f"error: {sys.executable} sees no GPU: {do}", file=sys.stderr)
        return 2
    named, memory = machine or ({"device": "none: no figure below means anything"}, EXAMPLE_MEMORY)
    setting = setting_of(options, memory, gpus=gpus_of(machine, listed=options.list))
    setting = hindered(setting)
    parts = [part for part in all_parts(setting) if part.name.startswith(options.wanted)]
    if options.list:
        print("\n".join(f"{part.name}: {shlex.join(part.command)}" for part in parts))
        return 0
    earlier = list[Outcome]()
    if options.resume and (options.out / REPORT).exists():
        theirs, outcomes = read(options.out / REPORT)
        if theirs != named:
            print(
                f"error: --resume: {options.out} is of another machine or commit", file=sys.stderr
            )
            return 2
        earlier = [outcome for outcome in outcomes if outcome.passed]
    done = {outcome.name for outcome in earlier}
    left = [part for part in parts if part.name not in done]
    return check(left, options.out, options.minutes * 60, named, earlier, jobs=options.jobs)


def gpus_of(machine: object, *, listed: bool) -> int:
    """How many GPUs parts may use; where parts are only listed, as if there were one."""
    from megatron_llama.engine.comm import device as devices

    return devices.accelerator_count() if machine is not None else int(listed)


def hindered(setting: Setting) -> Setting:
    """The setting with what cannot run on this device."""
    from megatron_llama.engine.comm import device as devices
    from megatron_llama.engine.comm.flash3 import flash3_problem
    from megatron_llama.model.nn.fp8.support import fp8_problem
    from megatron_llama.model.plan.fp8 import BLOCKWISE, TENSORWISE

    device = devices.accelerator(0)
    return replace(
        setting,
        flash3_obstacle=flash3_problem(device),
        fp8_obstacle=fp8_problem(device, BLOCKWISE),
        tensorwise_obstacle=fp8_problem(device, TENSORWISE),
    )


def write_figures(page: Path, report: Path) -> int:
    """Write figures of a report into a page, and say which. The exit status."""
    try:
        machine, outcomes = read(report)
        text, lines = into(page.read_text(), machine, outcomes)
    except (OSError, ValueError) as error:
        print(f"error: --into: {error}", file=sys.stderr)
        return 2
    page.write_text(text)
    print("\n".join(lines))
    return 0


def print_tables(paths: Sequence[Path]) -> int:
    """Of several reports, as if it had been one check; the machine is that of the first. The exit
    status."""
    try:
        reports = [read(path) for path in paths]
    except (OSError, ValueError) as error:
        print(f"error: --table: {error}", file=sys.stderr)
        return 2
    print(
        "\n".join(
            markdown(reports[0][0], [outcome for _, outcomes in reports for outcome in outcomes])
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
