"""``pretrain``: train on the command line's options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from signal import Signals
from typing import TYPE_CHECKING

from megatron_llama.config.parse import Parsed
from megatron_llama.config.schema import ParallelConfig, TrainingConfig
from megatron_llama.config.sections import config_sections
from megatron_llama.train.commands.common.configs import DryRunConfig
from megatron_llama.train.setup.layout import AutoParallelConfig

if TYPE_CHECKING:
    from megatron_llama.launch.launcher import Place
    from megatron_llama.train.commands.common.dry_run import NamedFiles
    from megatron_llama.train.run.result import TrainResult
    from megatron_llama.train.setup.draft import Decider

SECTIONS = (*config_sections(), AutoParallelConfig, DryRunConfig)


def pretrain(parsed: Parsed) -> int:
    """Train from random weights, a HuggingFace folder or a checkpoint. Returns the exit status."""
    from megatron_llama.train.setup.deciders import TEXT

    return run(parsed, TEXT)


def run(parsed: Parsed, reads: Sequence[Decider], *, examples: NamedFiles | None = None) -> int:
    """Train on the inputs that the deciders ``reads`` choose, or only check them with --dry-run.
    ``examples`` finds the files that it reads instead of --data-path. Returns the exit status."""
    if parsed.get(DryRunConfig).dry_run != "no":
        return plan_only(parsed, reads, examples=examples)
    from megatron_llama.train.api.train import run_training

    return status_of_run(
        parsed,
        lambda parsed, place: run_training(parsed, reads, needs_data=examples is None, place=place),
    )


def status_of_run(parsed: Parsed, train: Callable[[Parsed, Place | None], TrainResult]) -> int:
    """Train, with --max-restarts-in-place more than once, and return the exit status."""

    def status(parsed: Parsed, place: Place | None) -> int:
        result = train(parsed, place)
        return exit_status(result.stopped_by, result.config.training)

    if parsed.get(ParallelConfig).max_restarts_in_place <= 0:
        return status(parsed, None)
    from megatron_llama.train.commands.common.restarts import with_restarts

    return with_restarts(parsed, status)


def plan_only(
    parsed: Parsed,
    reads: Sequence[Decider],
    checks: Sequence[Decider] = (),
    *,
    examples: NamedFiles | None = None,
) -> int:
    """Check and plan a run with the inputs of ``reads`` and the further work of ``checks``, on the
    files of ``examples`` or of --data-path. Returns the exit status."""
    from megatron_llama.launch.launcher import fix_sums
    from megatron_llama.train.commands.common.dry_run import dry_run

    if parsed.get(TrainingConfig).deterministic_mode:
        fix_sums()
    dry_run(parsed, reads, checks, examples=examples)
    return 0


def exit_status(stopped_by: Signals | None, training: TrainingConfig) -> int:
    """Return the exit status of a run with an orderly end. After a signal it is the one that a
    shell reports, so that later commands do not take the run for complete."""
    if stopped_by is None or training.exit_zero_on_signal:
        return 0
    return 128 + stopped_by
