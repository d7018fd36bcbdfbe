"""Training, from options to the state in which the run ends."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from megatron_llama.checkpoint import checkpoint_dir
from megatron_llama.checkpoint.lease import Lease, leasing
from megatron_llama.config.parse import Parsed
from megatron_llama.config.schema import CheckpointConfig, Config, ParallelConfig, TrainingConfig
from megatron_llama.config.sections import config_sections
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.object_collectives import on_rank0, raise_on_all_ranks
from megatron_llama.engine.mesh import Mesh
from megatron_llama.errors import ConfigError, UserError
from megatron_llama.launch.join import join, this_place
from megatron_llama.launch.launcher import Place, fix_sums, separate_queues
from megatron_llama.launch.mesh import build_mesh, placement_warnings
from megatron_llama.launch.orphan import ending_with_launcher
from megatron_llama.model.llama import score_rule
from megatron_llama.model.nn.attention import attention_warnings
from megatron_llama.model.nn.sliding import sliding_warnings
from megatron_llama.pipeline.build import compute_dtype
from megatron_llama.train.api.common.options import Options, read_options
from megatron_llama.train.api.common.watched import watched
from megatron_llama.train.run.build import open_run
from megatron_llama.train.run.callbacks import Callback
from megatron_llama.train.run.loop import train as run_steps
from megatron_llama.train.run.result import TrainResult
from megatron_llama.train.setup.build import read_first_step
from megatron_llama.train.setup.deciders import (
    CONFIGURATION,
    FIRST_STEP,
    OUTPUTS,
    SAMPLES,
    TEXT,
    WORDS,
    ready_of,
)
from megatron_llama.train.setup.draft import By, Decider, Draft, Need, decides, refuses
from megatron_llama.train.setup.driver import decide
from megatron_llama.train.setup.inputs import Ready
from megatron_llama.train.setup.kernels import chosen_flash
from megatron_llama.train.setup.layout import AutoParallelConfig
from megatron_llama.train.setup.processes import launched_processes, unmet_processes

if TYPE_CHECKING:
    from megatron_llama.checkpoint.background import BackgroundSaver

SECTIONS = (*config_sections(), AutoParallelConfig)
"""The options of a run."""


def train(
    config: Options = None, callbacks: Sequence[Callback] = (), **options: object
) -> TrainResult:
    """Train a model on an indexed dataset, as ``python -m megatron_llama pretrain`` does: in one
    process, or in all processes that torchrun or srun has started, each of which calls this. Where
    the program has made a process group already, its processes are used and the group is left as
    it was. Collective. It may be called again in the same process.

    ``config`` is a Config, a mapping of options, or the path of a YAML file; keyword ``options``
    win over it. Names and values are those of docs/options.md, with underscores; ``model`` names a
    preset. ``callbacks`` are called on every rank, at the moments that their methods describe. Rank
    0 prints the log, and the options of section ``log`` change what it prints.

    The weights come from ``load``, from ``init_from_hf`` or from the seed. SIGTERM and SIGINT stop
    the run after the current step, with everything saved, while it runs in the main thread.

    ```python
    import megatron_llama as ml

    result = ml.train(
        data_path="data/docs",  # data/docs.bin and data/docs.idx, which preprocess has written
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        seq_length=64,
        global_batch_size=8,
        train_iters=20,
        lr=3e-3,
        save="runs/small",
    )
    print(result.loss, result.checkpoint)
    ```

    In several processes the program is the same, and every rank gets the result:

    ```python
    # torchrun --nproc-per-node 2 train.py
    import megatron_llama as ml

    options = {
        "data_path": "data/docs",
        "seq_length": 64,
        "global_batch_size": 8,
        "train_iters": 30,
        "lr": 3e-3,
        "data_parallel_sharding_strategy": "optim_grads_params",
    }
    # The model's shape is that of the checkpoint. One of another layout goes on in this one.
    result = ml.train(options, load="runs/small", save="runs/small")
    assert result.iteration == 30
    ```

    Raises ConfigError with every problem of the options, DataError, CheckpointError, ClusterError,
    and TrainingError for a run that cannot go on; all of these are UserErrors. An error of a
    callback is raised on its rank; the other ranks raise a ClusterError."""
    parsed = read_options(config, options, SECTIONS)
    return run_and_leave(lambda: run_training(parsed, TEXT, callbacks=callbacks))


def run_and_leave(run: Callable[[], TrainResult]) -> TrainResult:
    """Return the result of ``run``, or raise its error. Nothing is left of its process group in
    either case, so that a program may go on."""
    handled = sys.exception()
    try:
        return run()
    except BaseException as error:
        # Its frames hold the run's groups for as long as the error lives. A gloo group keeps its
        # connections open while it is held, and the other ranks would wait on them.
        raised: BaseException | None = error
        while raised is not None and raised is not handled:
            traceback.clear_frames(raised.__traceback__)
            raised = raised.__cause__ or raised.__context__
        raise
    finally:
        # Reference cycles would keep what the process group held, and its threads.
        gc.collect()


def run_training(
    parsed: Parsed,
    reads: Sequence[Decider],
    *,
    callbacks: Sequence[Callback] = (),
    needs_data: bool = True,
    place: Place | None = None,
    complete: Callable[[Ready, Mesh], Ready] | None = None,
) -> TrainResult:
    """Train on the inputs that the deciders ``reads`` choose and that ``complete`` completes,
    perhaps with a model. ``needs_data``: it reads --data-path. ``place``: the place of this
    process, by default from the environment. Collective. Raises UserError."""
    if parsed.get(TrainingConfig).deterministic_mode:
        fix_sums()
    if place is None and parsed.get(ParallelConfig).max_restarts_in_place > 0:
        raise ConfigError(
            "max_restarts_in_place",
            got="a run of a program",
            expected="a command, whose process can be started again",
            do="start python -m megatron_llama pretrain (or sft, align)",
        )
    place = place or this_place()
    options = parsed.get(CheckpointConfig)
    forks = options.async_save and options.save is not None
    if forks and place.joined and place.world_size > 1:
        raise ConfigError(
            "--async-save",
            got="a process group that the program has made",
            expected="one that train() makes, whose store the writing processes can reach",
            do="leave --async-save out, or let train() make the group",
        )
    # --async-save forks a process here, before the process group and its threads exist: a fork
    # copies no thread, and locks that one holds would stay locked.
    # The lease outlives that process, which may be publishing a checkpoint.
    with (
        ending_with_launcher(place.rank) as follower,
        leasing(options.save, steal=options.steal_save) as lease,
        _in_background(place, wanted=forks) as background,
    ):
        follower.begin()
        first = FIRST_STEP if complete is None else ()
        deciders = (*reads, *SAMPLES, *OUTPUTS, *first)
        with set_up(parsed, place, deciders, lease, needs_data=needs_data) as (draft, mesh):
            ready = ready_of(draft)
            if complete is not None:
                ready = complete(ready, mesh)
                with raise_on_all_ranks(mesh.world):
                    read_first_step(ready, (mesh.data_rank,), mesh.data_size)
            with open_run(
                ready, mesh, background=background, lease=lease, callbacks=callbacks
            ) as built:
                return run_steps(built)


@contextmanager
def set_up(
    parsed: Parsed,
    place: Place,
    deciders: Sequence[Decider] = (),
    lease: Lease | None = None,
    *,
    needs_data: bool = True,
    configuration: Sequence[Decider] = CONFIGURATION,
) -> Iterator[tuple[Draft, Mesh]]:
    """Yield the decisions of the ``configuration`` and of the ``deciders`` after it, and the mesh
    for them; rank 0 prints the decisions. In the section the death of a rank becomes an error that
    names it. ``lease``, if given, is taken. Collective. Raises UserError."""
    parallel = _joinable(parsed.get(ParallelConfig))
    timeout = 60 * parallel.distributed_timeout_minutes
    fixed = parsed.get(TrainingConfig).deterministic_mode
    separate_queues()
    with devices.deterministic(wanted=fixed), watched(place, timeout) as watch:
        if place.world_size > 1 and not place.joined:
            # Problems of the words alone are reported before a process waits for another.
            decide(Draft(parsed, unmet_processes(place), needs_data), WORDS)
        world, device = join(parallel, place, watch)
        devices.open_backward(device)
        begun = Draft(parsed, launched_processes(place, world), needs_data)
        every = (*configuration, *deciders)
        save = parsed.get(CheckpointConfig).save
        if lease is None or save is None:
            draft = decide(begun, every)
        else:
            present: list[tuple[str, ...]] = []
            draft = _decided_beside(begun, guarded(every, lease, save, present), save, present)
            lease.held = draft.held
            if draft.held is None:
                # A run that cannot begin takes the folder from no other run: all problems are
                # refused before.
                lease.take(world)
                if on_rank0(lambda: [saved_in(save)] != present, world):
                    # The earlier run has saved meanwhile, and this one goes on from there.
                    draft = decide(begun, every)
        if world.rank == 0:
            notes = lease.notes if lease is not None else ()
            _print_lines((*notes, *draft.notes), draft.warnings)
        config = draft.config
        mesh = build_mesh(
            config,
            rank=place.rank,
            world_size=place.world_size,
            device=device,
            recorder=world.recorder,
            world=world,
        )
        if mesh.rank == 0:
            _print_lines((), _slow_choices(config, mesh, place))
        with chosen_flash(config.training, device, world):
            yield draft, mesh


def _in_background(place: Place, *, wanted: bool) -> AbstractContextManager[BackgroundSaver | None]:
    """Return a section with a process that writes checkpoints, or without one."""
    if not wanted:
        return nullcontext()
    from megatron_llama.checkpoint.background import in_background

    return in_background(place)


def _decided_beside(
    begun: Draft, deciders: Sequence[Decider], save: str, present: list[tuple[str, ...]]
) -> Draft:
    """Return what the ``guarded`` deciders decide, beside a run that may still save there. It
    removes its older checkpoints, and what was read here may have been one of them."""
    attempts_left = 3
    while True:
        attempts_left -= 1
        present.clear()
        try:
            return decide(begun, deciders)
        except UserError:  # the same on every rank
            world = begun.processes.world
            if not attempts_left or on_rank0(lambda: present in ([], [saved_in(save)]), world):
                raise


def guarded(
    deciders: Sequence[Decider], lease: Lease, save: str, present: list[tuple[str, ...]]
) -> Sequence[Decider]:
    """Return the deciders between two that keep other runs out of ``save``. On rank 0 ``present``
    gets what is ``saved_in`` it before. If they leave no lease in the draft, the folder is another
    run's, or has been until now."""

    @refuses(needs=Need.FILES, by=By.RANK_0)
    def note_checkpoints(draft: Draft) -> None:
        present.append(saved_in(save))

    @decides("held", needs=Need.MACHINE, by=By.RANK_0)
    def take_folder(draft: Draft) -> Draft:
        held = lease.take_at_once()
        return replace(draft, held=held if [saved_in(save)] == present else None)

    return (note_checkpoints, *deciders, take_folder)


def saved_in(save: str) -> tuple[str, ...]:
    """Return the names of a folder's checkpoints, first the one from which a run would go on."""
    latest = checkpoint_dir.latest(save)
    return (str(latest), *map(str, checkpoint_dir.complete(save).values()))


def _print_lines(notes: Iterable[str], warnings: Iterable[str]) -> None:
    for line in (*notes, *(f"warning: {text}" for text in warnings)):
        print(f" {line}", flush=True)


def _joinable(parallel: ParallelConfig) -> ParallelConfig:
    """Return the options with which the processes can meet. An invalid timeout is refused later,
    with all other problems."""
    minutes = parallel.distributed_timeout_minutes
    return parallel if 0 < minutes < inf else ParallelConfig()


def _slow_choices(config: Config, mesh: Mesh, place: Place) -> Iterator[str]:
    """Yield warnings of choices that work but are slow."""
    model = config.model
    yield from placement_warnings(config.parallel, place.local_world_size)
    yield from attention_warnings(
        mesh.device,
        compute_dtype(config),
        model.num_attention_heads,
        model.num_key_value_heads,
        model.head_dim,
        config.training.attention_backend,
    )
    rules = {score_rule(model, layer) for layer in range(model.num_hidden_layers)}
    yield from sliding_warnings(mesh.device, compute_dtype(config), model.head_dim, rules)
    if model.num_experts:
        from megatron_llama.model.nn.moe.rows import expert_warnings  # of few models

        yield from expert_warnings(mesh.device, compute_dtype(config))
    if config.training.fp8 != "none" and devices.is_host(mesh.device):
        from megatron_llama.model.nn.fp8.support import EMULATED

        yield EMULATED
