"""Runs ``--help`` of each script that is named by the arguments, in a process of its own: by path and as a module.

``python run_help.py ROOT SCRIPT ...`` prints one JSON object: a key for each way, with the exit status and the output. The libraries that
most tools import are imported once, and each run is a fork: a hundred imports of torch would take minutes.
"""

from __future__ import annotations

import io
import json
import os
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.nn.parallel

assert torch


def run(root: Path, script: str, as_module: bool) -> tuple[object, str]:
    """Exit status and output of one way. As a module: from the root of the checkout; by path: from anywhere."""
    out = io.StringIO()
    path = root / "tools" / script
    sys.argv = [str(path), "--help"]
    status: object = 0
    try:
        with redirect_stdout(out), redirect_stderr(out):
            if as_module:
                os.chdir(root)
                sys.path.insert(0, str(root))
                runpy.run_module("tools." + script.removesuffix(".py").replace("/", "."), run_name="__main__", alter_sys=True)
            else:
                if path.suffix:  # run_path does it for a folder
                    sys.path.insert(0, str(path.parent))
                runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        status = end.code
    except BaseException as error:
        status = repr(error)
    package = sys.modules.get("megatron_llama")
    if package is not None and not Path(str(package.__file__)).is_relative_to(root):
        status = f"imported {package.__file__}"
    return status, out.getvalue()


def forked(root: Path, script: str, as_module: bool) -> tuple[object, str]:
    """The same in a process of its own."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        with os.fdopen(write, "w") as pipe:
            json.dump(run(root, script, as_module), pipe)
            pipe.flush()
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return tuple(json.loads(text)) if text else ("died", "")


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file
    root = Path(sys.argv[1])
    results = {f"{script} {'module' if way else 'path'}": forked(root, script, way) for script in sys.argv[2:] for way in (False, True)}
    print(json.dumps(results))
