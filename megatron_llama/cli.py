"""``python -m megatron_llama <command>``: finds the command, parses its options, runs it, and
prints an error as one message."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise, takewhile
from types import MappingProxyType
from typing import Any

from megatron_llama import __version__
from megatron_llama.errors import ConfigError, UserError


@dataclass(frozen=True)
class Command:
    """Where a command is found. Its module is imported only if the command runs, so that --help
    does not wait for torch."""

    module: str
    function: str
    sections: str
    """The sections of its options, as ``module:attribute``."""
    summary: str
    positional: tuple[str, ...] = ()
    """Options whose values may follow the command in this order, without their names."""


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "preprocess": Command(
            "preprocess",
            "preprocess",
            "data.preprocess_config:PreprocessConfig",
            "Turn text into an indexed dataset of tokens.",
        ),
        "pretrain": Command(
            "pretrain",
            "pretrain",
            "commands.pretrain:SECTIONS",
            "Train a LLaMA; torchrun or srun start it on several processes.",
        ),
        "sft": Command(
            "sft",
            "sft",
            "commands.sft:SECTIONS",
            "Tune a model on conversations; started like pretrain.",
        ),
        "evaluate": Command(
            "evaluate",
            "evaluate",
            "commands.evaluate:SECTIONS",
            "Loss and perplexity of --load or --init-from-hf on a dataset or text.",
        ),
        "data": Command(
            "data",
            "data",
            "commands.data:SECTIONS",
            "Look at examples for sft: data preview|check|stats FILE.",
            ("action", "train_data"),
        ),
        "generate": Command(
            "generate",
            "generate",
            "commands.generate:SECTIONS",
            "Continue prompts with a trained model.",
        ),
        "chat": Command(
            "chat", "chat", "commands.chat:SECTIONS", "Talk with a trained model, line by line."
        ),
        "export": Command(
            "export",
            "export",
            "commands.common.configs:ExportConfig",
            "Write a checkpoint as a HuggingFace folder.",
        ),
        "convert": Command(
            "convert",
            "convert",
            "commands.common.configs:ConvertConfig",
            "Write a model in another format: convert SRC DST --to FORMAT.",
            ("src", "dst"),
        ),
        "merge": Command(
            "merge",
            "merge",
            "commands.common.configs:MergeConfig",
            "Add LoRA adapters to their model: merge SRC DST [--options].",
            ("src", "dst"),
        ),
        "verify": Command(
            "verify",
            "verify",
            "commands.common.configs:VerifyConfig",
            "Compare two models, of any formats: verify A B [--options].",
            ("a", "b"),
        ),
        "inspect": Command(
            "inspect",
            "inspect",
            "commands.common.configs:NoOptions",
            "Look at a file: inspect config|checkpoint|dataset PATH, or presets.",
        ),
        "schedule": Command(
            "schedule",
            "schedule",
            "commands.common.configs:ScheduleConfig",
            "Show a pipeline schedule: who does what when, bubbles, memory.",
        ),
        "plan": Command(
            "plan",
            "plan",
            "commands.plan:SECTIONS",
            "The fastest layouts for a cluster: plan --model NAME --gpus N; "
            "plan score|compare FILE.",
            ("action", "file"),
        ),
        "env": Command(
            "env",
            "env",
            "commands.common.configs:NoOptions",
            "Versions and devices, for a bug report.",
        ),
    }
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0 if it went well, 2 for a wrong command line or
    configuration, 130 for Control-C, 1 for other errors."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return run(words)
    except UserError as error:
        rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
        if rank == "0" or not error.everywhere:
            on_rank = "" if rank == "0" else f" on rank {rank}"
            print(f"error{on_rank}: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, ConfigError) else 1
    except BrokenPipeError:  # the reader of our output has ended, as head and less do
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return 130
    finally:
        if "torch.distributed" in sys.modules:
            from megatron_llama.distributed.mesh import close_mesh

            close_mesh()


def run(words: list[str]) -> int:
    """Dispatch to a command and return its exit status. Raises UserError."""
    if not words or words[0] in ("-h", "--help"):
        print(overview())
        return 0
    if words[0] == "--version":
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
    command = COMMANDS[name]
    module, _, attribute = command.sections.partition(":")
    found = getattr(import_module(f"megatron_llama.{module}"), attribute)
    sections: Sequence[type[Any]] = found if isinstance(found, tuple) else (found,)
    if {"-h", "--help"} & set(words):
        from megatron_llama.config.help import help_text

        print(help_text(name, command.summary, sections), end="")
        return 0
    function: Callable[..., int | None] = getattr(
        import_module(f"megatron_llama.commands.{command.module}"), command.function
    )
    if name == "inspect":  # takes words, no options
        function(words)
        return 0
    from megatron_llama.config.megatron_names import ALIASES, MEGATRON
    from megatron_llama.config.parse import parse

    words = _with_dry_run_value(_with_names(words, command.positional))
    return function(parse(words, sections, aliases={**MEGATRON, **ALIASES})) or 0


def _with_names(words: list[str], names: Sequence[str]) -> list[str]:
    """Turn the words before the first flag into the options that they stand for."""
    leading = list(takewhile(lambda word: not word.startswith("--"), words))[: len(names)]
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
    """The text of ``--help`` without a command."""
    lines = [
        "usage: python -m megatron_llama COMMAND [--config FILE.yaml] [--option value ...]",
        "",
    ]
    lines += [f"  {name:<11}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [*lines, "", "COMMAND --help lists the options of a command; docs/options.md has them all."]
    )


if __name__ == "__main__":
    sys.exit(main())
