"""Hosts, conditions and options of one run."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, and no other

from tools.overlap.against import PREFIX
from tools.overlap.catalogue import (
    EXPERT_NAMES,
    EXPERTS_PER_TOKEN,
    HF,
    HF_NAMES,
    MIXTURE,
    MODES,
    NAMES,
    STEPS,
    USER,
    baseline,
    model,
)
from tools.overlap.conditions import Limits, Stalls, alternating, stalling
from tools.overlap.hosts import Delay, Hosts, RigError
from tools.overlap.job import Job, bits_per_second
from tools.overlap.tensor import Job as TensorJob

KNOWN = NAMES + HF_NAMES + EXPERT_NAMES
OURS = frozenset(mode.name for mode in MODES)
DESCRIPTION = f"""Data-parallel training on an emulated cluster: how long a step takes beyond its
computation, and what it sends.

Hosts are network namespaces of this machine; block compute is a timed wait. All contenders take
turns in one run: in each round, in random order, {STEPS} training steps of each.
Contenders: {", ".join(NAMES)}.
With transformers: {", ".join(HF_NAMES)}.
With --experts: {", ".join(EXPERT_NAMES)}, whose hosts divide the experts among them."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        "bash tools/bench_overlap.sh",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--hosts", type=int, default=4, help="number of hosts, one process each (default 4)"
    )
    parser.add_argument(
        "--rate", default="400mbit", help="of every cable, in each direction (default 400mbit)"
    )
    parser.add_argument(
        "--rounds", type=int, default=8, help="measurements of each contender (default 8)"
    )
    parser.add_argument(
        "--modes", help=f"contenders, with commas between (default: all without {HF})"
    )
    parser.add_argument(
        "--user-module",
        dest="modes",
        action="store_const",
        const=",".join(USER),
        help="blocks of Hugging Face's LLaMA under shard(), DDP and FSDP2, and our own model: "
        + ",".join(USER),
    )
    parser.add_argument(
        "--experts",
        type=int,
        default=0,
        metavar="N",
        help="the user's module is Hugging Face's Mixtral, and our own model is one: each block "
        f"has N experts, of which a token has {EXPERTS_PER_TOKEN}, of an N-th of the width: "
        + ",".join(MIXTURE),
    )
    parser.add_argument(
        "--tensor",
        action="store_true",
        help="instead: the hosts are tensor-parallel ranks of one model; whole messages and "
        "messages in pieces",
    )
    parser.add_argument(
        "--context-parallel",
        action="store_true",
        help="attention of one sequence over all hosts instead, in each --cp-comm-type",
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="CHECKOUT",
        help="another checkout of this project (git worktree add): its modes take turns too, as "
        "against:MODE",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one row per contender")
    parser.add_argument(
        "--alternate",
        metavar="RATE:SECONDS,...",
        help="cables that change their rate, over and over",
    )
    parser.add_argument("--slow-host", metavar="RATE", help="rate of the last host's cable")
    parser.add_argument(
        "--stall",
        metavar="MS:PERIOD_MS",
        help="the switch passes on nothing for MS in every PERIOD_MS",
    )
    parser.add_argument(
        "--latency",
        type=float,
        default=0.0,
        metavar="MS",
        help="of every packet; needs a kernel with netem",
    )
    parser.add_argument(
        "--jitter",
        type=float,
        default=0.0,
        metavar="MS",
        help="how far a packet's latency may be off",
    )
    options = parser.parse_args(arguments)
    try:
        _complete(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def _complete(options: argparse.Namespace) -> None:
    """Check and convert. Raises ValueError."""
    chosen = (options.modes or ",".join(MIXTURE if options.experts else NAMES)).split(",")
    if options.experts:
        if options.experts < EXPERTS_PER_TOKEN or model().intermediate_size % options.experts:
            raise ValueError(
                f"--experts is at least {EXPERTS_PER_TOKEN}, and divides the width "
                f"{model().intermediate_size} of an MLP"
            )
        if options.experts % options.hosts and set(EXPERT_NAMES) & {*chosen}:
            raise ValueError(
                f"--experts {options.experts}: {options.hosts} hosts cannot divide them; give a "
                f"multiple, or --modes without {', '.join(EXPERT_NAMES)}"
            )
    elif divided := [name for name in chosen if name in EXPERT_NAMES]:
        raise ValueError(f"--modes {', '.join(divided)}: needs --experts")
    names = tuple(dict.fromkeys((*map(baseline, chosen), *chosen)))
    if options.against is not None:
        options.against = options.against.absolute()
        if not (options.against / "tools" / "overlap" / "ours.py").exists():
            raise ValueError(f"--against {options.against}: no checkout of this project")
        names += tuple(PREFIX + name for name in names if name in OURS)
    unknown = [name for name in names if name.removeprefix(PREFIX) not in KNOWN]
    if unknown:
        raise ValueError(f"--modes: unknown {', '.join(unknown)}; there are {', '.join(KNOWN)}")
    if not 2 <= options.hosts <= 250 or options.rounds < 1:
        raise ValueError("--hosts is from 2 to 250, --rounds at least 1")
    if options.latency < 0 or options.jitter < 0:
        raise ValueError("--latency and --jitter are not negative")
    options.names = names
    bits_per_second(options.rate)
    if options.slow_host is not None:
        bits_per_second(options.slow_host)
    if options.alternate is not None:
        options.alternate = [_phase(part) for part in options.alternate.split(",")]
        if options.slow_host is not None:
            raise ValueError("--alternate changes every cable: it cannot go with --slow-host")
    if options.stall is not None:
        options.stall = _stall(options.stall)


def _phase(text: str) -> tuple[str, float]:
    rate, _, seconds = text.partition(":")
    bits_per_second(rate)
    if not _positive(seconds):
        raise ValueError(f"--alternate {text}: expected RATE:SECONDS, like 400mbit:0.5")
    return rate, float(seconds)


def _stall(text: str) -> tuple[float, float]:
    """(length, period) in seconds."""
    length, _, period = text.partition(":")
    if not _positive(length) or not _positive(period) or float(length) >= float(period):
        raise ValueError(
            f"--stall {text}: expected MS:PERIOD_MS, the first shorter than the second, "
            "like 100:500"
        )
    return float(length) / 1e3, float(period) / 1e3


def _positive(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


def words(options: argparse.Namespace) -> tuple[str, ...]:
    """The conditions, for the title."""
    found = []
    if options.alternate is not None:
        found.append(
            "rates " + ", ".join(f"{rate} for {seconds:g} s" for rate, seconds in options.alternate)
        )
    if options.slow_host is not None:
        found.append(f"last host {options.slow_host}")
    if options.stall is not None:
        found.append(f"stalls of {options.stall[0] * 1e3:g} ms every {options.stall[1] * 1e3:g} ms")
    if options.experts:
        found.append(f"{options.experts} experts in a block")
    if options.latency or options.jitter:
        found.append(f"latency {options.latency:g} ms, jitter {options.jitter:g} ms")
    return tuple(found)


def run(options: argparse.Namespace) -> None:
    """Make the cluster, run the ranks, remove it."""
    target = str(options.json.absolute()) if options.json is not None else None
    job = Job(
        options.hosts,
        options.rate,
        options.rounds,
        options.names,
        words(options),
        target,
        str(options.against) if options.against is not None else None,
        options.experts,
    )
    rates = [options.rate] * options.hosts
    if options.slow_host is not None:
        rates[-1] = options.slow_host
    delay = Delay(options.latency, options.jitter) if options.latency or options.jitter else None
    stalls = Stalls()
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts(options.hosts, rates, delay))
        limits = stack.enter_context(Limits(hosts))
        if options.alternate is not None:
            stack.enter_context(alternating(limits, options.alternate))
        if options.stall is not None:
            length, period = options.stall
            stack.enter_context(stalling(hosts, limits, seconds=length, period=period, seen=stalls))
        if options.tensor:
            tensor = TensorJob(options.hosts, options.rate, options.rounds, target)
            hosts.run(["-m", "tools.overlap.tensor", tensor.dump()])
            return
        if options.context_parallel:
            spread = {"hosts": job.hosts, "rate": job.rate, "rounds": job.rounds, "json": target}
            hosts.run(["-m", "tools.overlap.context", json.dumps(spread)])
            return
        hosts.run(["-m", "tools.overlap.measure", job.dump()])
    if options.stall is not None:
        print(stalls)


def _interrupted(number: int, frame: object) -> None:
    raise RigError(f"ended by {signal.Signals(number).name}; everything was removed")


def main() -> None:
    """Errors are one message; whatever happens, nothing stays behind."""
    options = parse(sys.argv[1:])
    if os.geteuid() != 0:
        sys.exit(
            "error: emulated hosts are network namespaces, which only root may make; run "
            "this as root (sudo -E)"
        )
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        sys.exit(
            f"error: no {' and no '.join(missing)} in PATH; install iproute2 (apt-get "
            "install iproute2)"
        )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupted)
    try:
        run(options)
    except RigError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
