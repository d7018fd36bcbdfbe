"""``pretrain``: from a command line to a running mesh."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from signal import Signals
from typing import TYPE_CHECKING

from megatron_llama.commands.common.auto_parallel import chosen
from megatron_llama.commands.common.configs import AutoParallelConfig, DryRunConfig
from megatron_llama.commands.common.startup import OpenInputs, Ready, start_up
from megatron_llama.commands.common.watched import watched
from megatron_llama.config.help import config_sections
from megatron_llama.config.parse import Parsed
from megatron_llama.config.schema import CheckpointConfig, Config, ParallelConfig, TrainingConfig

if TYPE_CHECKING:
    from megatron_llama.distributed.comm.watch import Watch
    from megatron_llama.distributed.launcher import Place
    from megatron_llama.distributed.mesh import Axis, Mesh
    from megatron_llama.loop.inputs import Inputs
    from megatron_llama.loop.start import Start
    from megatron_llama.planner.choice import Choice

SECTIONS = (*config_sections(), AutoParallelConfig, DryRunConfig)


def pretrain(parsed: Parsed) -> int:
    """Train from random weights, a HuggingFace folder or a checkpoint. Returns the exit status."""
    return run(parsed, open_stream_inputs)


def run(parsed: Parsed, open_inputs: OpenInputs, *, needs_data: bool = True) -> int:
    """Train on what ``open_inputs`` opens, or only check that with --dry-run. ``needs_data``: it
    reads --data-path. Returns the exit status."""
    if parsed.get(TrainingConfig).deterministic_mode:
        from megatron_llama.distributed.launcher import fix_sums

        fix_sums()
    if parsed.get(DryRunConfig).dry_run != "no":
        from megatron_llama.commands.common.dry_run import dry_run

        dry_run(parsed, open_inputs, needs_data=needs_data)
        return 0
    from megatron_llama.checkpoint.background import in_background
    from megatron_llama.distributed.launcher import place_from_environment

    options = parsed.get(CheckpointConfig)
    # --async-save forks a process here, before the process group and its threads exist: a fork
    # copies no thread, and locks that one holds would stay locked.
    saving = in_background(
        place_from_environment(), wanted=options.async_save and options.save is not None
    )
    with saving as background, prepared(parsed, needs_data=needs_data) as (ready, mesh):
        from megatron_llama.training import train

        inputs = open_inputs(parsed, ready, mesh.world)
        stopped_by = train(inputs, mesh, background=background)
    return exit_status(stopped_by, inputs.config.training)


def exit_status(stopped_by: Signals | None, training: TrainingConfig) -> int:
    """The exit status of a run that came to an orderly end: as a shell has it where a signal ended
    a process, so that nothing which follows the run takes it for done."""
    if stopped_by is None or training.exit_zero_on_signal:
        return 0
    return 128 + stopped_by


def open_stream_inputs(parsed: Parsed, ready: Ready, world: Axis) -> Inputs:
    """Open what training on --data-path reads. Collective. Raises UserError."""
    from megatron_llama.loop.inputs import open_inputs, stream_samples

    vocabulary = ready.vocabulary
    return open_inputs(
        ready.config,
        world,
        partial(
            stream_samples,
            eod=vocabulary.eod,
            tokenizer=vocabulary.tokenizer,
            share=(world.rank, world.size),
        ),
        tokenizer=vocabulary.tokenizer,
    )


class Launched:
    """The ``Processes`` that a launcher has started, this one among them. ``watch`` is that of this
    one; it starts when they meet."""

    def __init__(self, place: Place, watch: Watch) -> None:
        self._place = place
        self._watch = watch
        self.mesh: Mesh | None = None
        """None until they have met."""

    @property
    def world_size(self) -> int:
        return self._place.world_size

    def on_this_machine(self) -> AbstractContextManager[None]:
        return nullcontext()

    def choose(self, parsed: Parsed, config: Config, start: Start | None) -> Choice:
        return chosen(parsed, config, self._place, start, self._watch)

    def meet(self, config: Config) -> Axis:
        from megatron_llama.distributed.mesh import init_mesh

        self.mesh = init_mesh(config, self._place, self._watch)
        return self.mesh.world

    def memory(self) -> int:
        assert self.mesh is not None
        return agreed_memory(self.mesh, self._place)


@contextmanager
def prepared(parsed: Parsed, *, needs_data: bool = True) -> Iterator[tuple[Ready, Mesh]]:
    """``start_up`` with the processes of the launcher; prints what was decided on the way. Inside
    the context the death of a rank becomes an error that names it."""
    from megatron_llama.distributed import device as devices
    from megatron_llama.distributed.launcher import place_from_environment
    from megatron_llama.distributed.mesh import placement_warnings
    from megatron_llama.engine.build import compute_dtype
    from megatron_llama.nn.attention import attention_warnings

    place = place_from_environment()
    timeout = 60 * parsed.get(ParallelConfig).distributed_timeout_minutes
    fixed = parsed.get(TrainingConfig).deterministic_mode
    with devices.deterministic(wanted=fixed), watched(place, timeout) as watch:
        processes = Launched(place, watch)
        ready = start_up(parsed, processes, needs_data=needs_data)
        config = ready.config
        mesh = processes.mesh
        assert mesh is not None
        if mesh.rank == 0:
            m = config.model
            placed = placement_warnings(config.parallel, place.local_world_size)
            slow = attention_warnings(
                mesh.device,
                compute_dtype(config),
                m.num_attention_heads,
                m.num_key_value_heads,
                m.head_dim,
                config.training.attention_backend,
            )
            warnings = (*ready.warnings, *placed, *slow)
            for line in (*ready.lines, *(f"warning: {text}" for text in warnings)):
                print(f" {line}", flush=True)
        yield ready, mesh


def agreed_memory(mesh: Mesh, place: Place) -> int:
    """Bytes of memory that every process has: the minimum over all ranks, so that all decide alike.
    Collective."""
    import torch
    import torch.distributed as dist

    from megatron_llama.distributed import device as devices
    from megatron_llama.distributed.comm.collectives import all_reduce

    sharing = (place.local_world_size or place.world_size) if devices.is_host(mesh.device) else 1
    memory = torch.tensor(devices.memory_bytes(mesh.device) // sharing, device=mesh.device)
    all_reduce(memory, mesh.world, dist.ReduceOp.MIN).wait()
    return int(memory)
