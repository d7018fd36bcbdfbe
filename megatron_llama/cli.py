"""``python -m megatron_llama <command>``: finds the command, parses its options, runs it, and
prints an error as one message."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from itertools import pairwise, takewhile
from types import MappingProxyType

from megatron_llama.errors import ConfigError, UserError
from megatron_llama.hooks import Command, commands
from megatron_llama.launch.launcher import launched_rank
from megatron_llama.registry import imported
from megatron_llama.train.api.common.report import await_rank0, print_error
from megatron_llama.train.api.common.watched import PRINTED

COMMANDS: Mapping[str, Command] = MappingProxyType(commands())


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0 if it went well, 2 for a wrong command line or
    configuration, 130 for Control-C, 143 for a run that SIGTERM ended, 1 for other errors."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return run(words)
    except UserError as error:
        print_error(error)
        await_rank0(error)
        return 2 if isinstance(error, ConfigError) else 1
    except BrokenPipeError:  # the reader of our output has ended, as head and less do
        return 1
    except KeyboardInterrupt:
        if launched_rank() == "0":
            print("interrupted", file=sys.stderr, flush=True)
        return 130
    except Exception as error:
        if PRINTED in getattr(error, "__notes__", ()):
            return 1
        raise
    finally:
        # Commands leave the process group themselves (``watched``). Its resources are released now,
        # when the commands' variables are gone. A process that joined a group has loaded this
        # module. It is not imported here: Control-C may have ended the import of torch halfway, and
        # a second one would fail.
        groups = sys.modules.get("megatron_llama.engine.comm.groups")
        if groups is not None:
            groups.close_mesh()


def run(words: list[str]) -> int:
    """Dispatch to a command and return its exit status. Raises UserError."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if words[0] == "--version":
        from megatron_llama import __version__

        print(__version__)
        return 0
    name = words.pop(0)
    if name not in COMMANDS:
        from difflib import get_close_matches

        near = get_close_matches(name, COMMANDS, 1)
        do = f"did you mean {near[0]}?" if near else "see --help"
        raise ConfigError("command", got=name, expected=f"one of {', '.join(COMMANDS)}", do=do)
    if name == "preprocess":
        # NumPy starts threads when it is imported. Nothing here uses them, and a process with
        # threads cannot fork its workers (data/workers.py).
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if name == "quickstart":
        # Its processes share the cores: more threads in each only get in each other's way.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    command = COMMANDS[name]
    sections = command.options()
    if {"-h", "--help"} & set(words):
        from megatron_llama.config.help import help_text

        usage = f"python -m megatron_llama {name} {command.words}".rstrip()
        print(help_text(usage, command.summary, sections), end="")
        return 0
    # torch asks for NumPy from C: it takes Control-C in the middle of that import for a machine
    # without NumPy, and goes on. Imported here, Control-C ends the command.
    import_module("numpy")
    function: Callable[..., int | None] = imported(f"{command.module}:{command.function}")
    if name == "inspect":  # takes words, no options
        function(words)
        return 0
    from megatron_llama.config.megatron_names import ALIASES, MEGATRON
    from megatron_llama.config.parse import parse
    from megatron_llama.train.api.common.hub import with_folders

    words = _with_dry_run_value(_with_names(words, command.positional, command.rest))
    parsed = parse(words, sections, aliases={**MEGATRON, **ALIASES}, owners=_commands_with)
    dry = any(getattr(section, "dry_run", "no") == "yes" for section in parsed.instances.values())
    only_planned = dry or name in ("plan", "prove")
    parsed = with_folders(parsed, planned=only_planned, weights=name != "plan")
    if launched_rank() == "0" and not command.logs_notes:
        for note in parsed.notes:
            print(f"note: {note}", file=sys.stderr, flush=True)
    return function(parsed) or 0


def _commands_with(option: str) -> list[str]:
    """Return the commands that have an option of this name."""
    return [
        name
        for name, command in COMMANDS.items()
        if any(option == item.name for section in command.options() for item in fields(section))
    ]


def _with_names(words: list[str], names: Sequence[str], rest: str) -> list[str]:
    """Turn the words before the first flag into the options that they stand for."""
    leading = list(takewhile(lambda word: not word.startswith("--"), words))
    if rest and leading:
        return [f"--{rest}", *words]
    leading = leading[: len(names)]
    options = [f"--{name}={word}" for name, word in zip(names, leading, strict=False)]
    return [*options, *words[len(leading) :]]


def _with_dry_run_value(words: list[str]) -> list[str]:
    """Give --dry-run, the only flag with an optional value, the value yes if it has none."""
    bare = ("--dry-run", "--dry_run")
    values = ("no", "yes", "strict")
    return [
        f"{word}=yes" if word in bare and after not in values else word
        for word, after in pairwise([*words, ""])
    ]


def overview() -> str:
    """Return the text of ``--help`` without a command."""
    lines = [
        "usage: python -m megatron_llama COMMAND [--config FILE.yaml] [--option value ...]",
        "",
    ]
    for name, command in COMMANDS.items():
        lines.append(f"  {name:<11}{command.summary}")
        if command.words and "--config" not in command.words:
            lines.append(f"  {'':<11}{name} {command.words}")
    return "\n".join(
        [*lines, "", "COMMAND --help lists the options of a command; docs/options.md has them all."]
    )


if __name__ == "__main__":
    sys.exit(main())
