"""Processes that exchange a tensor, as those of a run do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

from megatron_llama.engine.comm import device as devices
from megatron_llama.launch.launcher import unlaunched
from megatron_llama.train.doctor.findings import Finding

TRIAL = "megatron_llama.train.doctor.exchange"
PATIENCE = 120.0
"""Seconds after which processes that have not met never will."""
LAST_WORDS = 300
"""Characters that are shown of the output of processes that could not say what failed."""


def trials() -> Iterator[Finding]:
    """Yield the result of a trial in which torchrun starts processes here that reduce a tensor: one
    for each GPU, or two on the host."""
    count = devices.accelerator_count() or 2
    name = f"{count} processes"
    if count == 1:
        yield Finding("1 process", "a single GPU has nobody to exchange with")
        return
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    # OMP_NUM_THREADS: torchrun warns of its own choice otherwise.
    process = subprocess.Popen(
        [sys.executable, *launch, "-m", TRIAL],
        env={"OMP_NUM_THREADS": "1", **unlaunched()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        _kill(process)
        out, err = process.communicate()
        out += f"no end after {PATIENCE:.0f} s"
    except BaseException:
        _kill(process)
        raise
    yield Finding.unless(
        process.returncode == 0,
        name,
        out.strip() or err.strip()[-LAST_WORDS:],
        expected="processes that torchrun starts here and that exchange a tensor",
        do=f"look at the network above; repeat it: python {' '.join([*launch, '-m', TRIAL])}",
    )


def _kill(process: subprocess.Popen[str]) -> None:
    """End torchrun and its processes, which are a session of their own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
