"""Everything that only a GPU can show, part by part; a part that fails does not keep the others from running."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tools.gpucheck.parts import Part, Setting, all_parts
from tools.gpucheck.report import Outcome, markdown, read, rows_of, write

REPORT, TABLES = "gpu_check.json", "gpu_check.md"
EXAMPLE_MEMORY = 150_754_820_096
"""An H200's, where parts are listed without a GPU."""


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line; exits with status 2 and one message where it is wrong."""
    parser = argparse.ArgumentParser("gpu_check.sh", description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("build/gpu_check"), metavar="FOLDER", help="of reports (default build/gpu_check)")
    parser.add_argument("--only", metavar="PART,...", help="these parts, by name, or all whose names begin so")
    parser.add_argument("--layers", type=int, default=0, help="at most so many in the benches of a step (default: all that fit)")
    parser.add_argument("--rounds", type=int, default=2, help="of the benches of a step (default 2)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps in each of their rounds (default 4)")
    parser.add_argument("--minutes", type=float, default=20.0, help="most time of one part (default 20)")
    parser.add_argument("--list", action="store_true", help="print the commands, run nothing")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the tables of a report, run nothing")
    options = parser.parse_args(words)
    if options.layers < 0 or options.rounds < 1 or options.steps < 1 or options.minutes <= 0:
        parser.error("--layers is not negative, --rounds and --steps are at least 1, --minutes is positive")
    known = [part.name for part in all_parts(setting_of(options, EXAMPLE_MEMORY))]
    wanted = options.only.split(",") if options.only is not None else [""]
    if unknown := [name for name in wanted if not any(one.startswith(name) for one in known)]:
        parser.error(f"--only: no part begins with {', '.join(unknown)}; there are {', '.join(known)}")
    options.wanted = tuple(wanted)
    return options


def setting_of(options: argparse.Namespace, memory: int) -> Setting:
    """What the parts depend on."""
    return Setting(options.out, memory, options.layers, options.rounds, options.steps)


def run(part: Part, folder: Path, seconds: float) -> Outcome:
    """Run one part in a process group of its own, its output into ``FOLDER/NAME.log`` and the end of that here."""
    if part.json is not None:
        Path(part.json).unlink(missing_ok=True)  # of an earlier check
    begin, log = time.monotonic(), folder / f"{part.name}.log"
    command = shlex.join(part.command)
    print(f"== {part.name}: {command}", flush=True)
    with log.open("wb") as output:
        process = subprocess.Popen(part.command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(timeout=seconds)
            status = "passed" if code == 0 else f"failed with {code}"
        except subprocess.TimeoutExpired:
            status = "took too long"
        finally:
            end(process)
    print(log.read_text(errors="replace")[-4000:].rstrip(), flush=True)
    outcome = Outcome(part.name, part.title, command, status, time.monotonic() - begin, rows_of(part))
    print(f"== {part.name}: {status}, {outcome.seconds:.0f} s\n", flush=True)
    return outcome


def end(process: subprocess.Popen[bytes]) -> None:
    """The process, if it still runs, and what it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def check(parts: Sequence[Part], folder: Path, seconds: float, machine: dict[str, str]) -> int:
    """Run parts and write the reports, after each one: what ends the check early leaves what was found. 0 if all passed, else 1."""
    folder.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    for part in parts:
        outcomes.append(run(part, folder, seconds))
        write(folder / REPORT, machine, outcomes)
        (folder / TABLES).write_text("\n".join(markdown(machine, outcomes)) + "\n")
    print((folder / TABLES).read_text())
    bad = [outcome.name for outcome in outcomes if not outcome.passed]
    if bad:
        print(f"error: {len(bad)} of {len(outcomes)} parts failed: {', '.join(bad)}; see {folder}/NAME.log", file=sys.stderr)
    return 1 if bad else 0


def machine_of() -> tuple[dict[str, str], int] | None:
    """What this machine computes with, and its memory in bytes; None without a GPU."""
    import torch

    from megatron_llama import device as devices

    device = devices.accelerator(0)
    if devices.is_host(device):
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        said = "unknown"
    named = {"device": devices.name(device), "torch": torch.__version__, "cuDNN": str(torch.backends.cudnn.version())}  # type: ignore[no-untyped-call]
    return {**named, "driver, power limit, highest clock": said}, devices.memory_bytes(device)


def main(words: Sequence[str]) -> int:
    """The exit status: 0 if all parts passed, 1 if some did not, 2 for what is wrong with the call or the machine."""
    options = parse(words)
    if options.table is not None:
        try:
            print("\n".join(markdown(*read(options.table))))
        except (OSError, ValueError) as error:
            print(f"error: --table: {error}", file=sys.stderr)
            return 2
        return 0
    machine = None if options.list else machine_of()
    memory = EXAMPLE_MEMORY if machine is None else machine[1]
    parts = [part for part in all_parts(setting_of(options, memory)) if part.name.startswith(options.wanted)]
    if options.list:
        print("\n".join(f"{part.name}: {shlex.join(part.command)}" for part in parts))
        return 0
    if machine is None:
        do = "install torch for CUDA, or run this where there is one (--list and --table work here)"
        print(f"error: {sys.executable} sees no GPU: {do}", file=sys.stderr)
        return 2
    return check(parts, options.out, options.minutes * 60, machine[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
