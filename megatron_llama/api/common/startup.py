"""From a command line to a configuration that is ready to run.

``start_up`` is the start of a run and of its dry run: what one of them refuses, the other refuses
in the same words. They differ in their ``Processes``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megatron_llama.api.common.layout import Choice, wanted
from megatron_llama.config.parse import Parsed
from megatron_llama.config.schema import CheckpointConfig, Config, LogConfig

if TYPE_CHECKING:
    from megatron_llama.distributed.axes import Axis
    from megatron_llama.loop.inputs import Inputs
    from megatron_llama.loop.start import Start
    from megatron_llama.loop.vocabulary import Vocabulary

OpenInputs = Callable[[Parsed, "Ready", "Axis"], "Inputs"]
"""Opens what a command reads. Collective. Raises UserError."""


class Processes(Protocol):
    """The processes of a run."""

    @property
    def world_size(self) -> int:
        """How many there are."""

    def on_this_machine(self) -> AbstractContextManager[None]:
        """A section that asks what only the machine of the run has to have."""

    def choose(self, parsed: Parsed, config: Config, start: Start | None) -> Choice:
        """The layout of --auto-parallel. Collective."""

    def meet(self, config: Config) -> Axis:
        """The axis of all processes that do this together. Collective."""

    def memory(self) -> int:
        """Bytes of memory that every process has. Collective, after ``meet``."""


@dataclass(frozen=True)
class Ready:
    """A configuration with everything decided."""

    config: Config
    vocabulary: Vocabulary
    lines: tuple[str, ...]
    """What was decided for the user."""
    warnings: tuple[str, ...]
    """What can run but is probably not meant."""


def start_up(parsed: Parsed, processes: Processes, *, needs_data: bool = True) -> Ready:
    """Resolve and check the configuration, and meet the other processes on the way. Collective.
    Raises UserError.

    ``needs_data``: the command reads --data-path."""
    from megatron_llama.api.common.loaded import loaded_model
    from megatron_llama.distributed.comm.object_collectives import raise_on_all_ranks
    from megatron_llama.loop.start import compare, find_start, with_pad_embedding_as_before
    from megatron_llama.loop.vocabulary import find_vocabulary, with_vocabulary
    from megatron_llama.metrics.mlflow import require_mlflow
    from megatron_llama.metrics.tensorboard import require_tensorboard
    from megatron_llama.metrics.trackio import require_trackio
    from megatron_llama.metrics.wandb import require_wandb
    from megatron_llama.plans.auto import decide
    from megatron_llama.plans.resolve import assemble, check

    options = parsed.get(CheckpointConfig)
    with processes.on_this_machine():
        require_tensorboard(parsed.get(LogConfig))
        require_wandb(parsed.get(LogConfig))
        require_mlflow(parsed.get(LogConfig))
        require_trackio(parsed.get(LogConfig))
    # The checkpoint is looked for before the model fields: if it is missing, that is the error to
    # show, not the absence of the fields that it would have given.
    start = find_start(options) if options.load is not None else None
    trained = loaded_model(parsed, start)
    config = assemble(parsed, trained=trained)
    config, padding = with_pad_embedding_as_before(config, start, parsed.explicit)
    layout: tuple[str, ...] = ()
    if wanted(parsed):
        choice = processes.choose(parsed, config, start)
        config = choice.config
        layout = choice.notes
    resolved = check(config, processes.world_size, needs_data=needs_data)
    world = processes.meet(resolved.config)
    with raise_on_all_ranks(world):
        vocabulary = find_vocabulary(resolved.config)
        config = with_vocabulary(resolved.config, vocabulary)
        changes = (
            compare(options, start, trained, config.model)
            if start is not None and trained is not None
            else []
        )
    # What only some ranks can see (a tokenizer, a dataset) has raised on all of them by now.
    config, decided = decide(config, processes.world_size, processes.memory())
    return Ready(
        config,
        vocabulary,
        (*parsed.notes, *padding, *layout, *resolved.notes, *decided),
        (*resolved.warnings, *changes, *vocabulary.warnings),
    )
