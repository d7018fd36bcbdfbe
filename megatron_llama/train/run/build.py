"""The construction of a run: engine, first weights, log, and the parts in their order."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron_llama.checkpoint.lease import Lease
from megatron_llama.checkpoint.saver import Saver
from megatron_llama.config.schema import Config
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.object_collectives import raise_on_all_ranks
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.engine.options import MUON
from megatron_llama.metrics.events import FAULT, START
from megatron_llama.metrics.log import MetricLog
from megatron_llama.model.llama import build_stages
from megatron_llama.pipeline.build import build_optimizer, compute_dtype, runtime_class
from megatron_llama.train.run.bad_steps import BadSteps
from megatron_llama.train.run.callbacks import Callback, Callbacks, Run
from megatron_llama.train.run.checkpoints import Checkpoints
from megatron_llama.train.run.course import Course
from megatron_llama.train.run.data_files import DataFiles
from megatron_llama.train.run.export import Export
from megatron_llama.train.run.loop import BuiltRun
from megatron_llama.train.run.prefetch import Interrupts, Prefetcher
from megatron_llama.train.run.progress import Progress
from megatron_llama.train.run.validation import Evaluator, Validation
from megatron_llama.train.setup.banner import already_finished, describe_run
from megatron_llama.train.setup.build import (
    build_loader,
    find_not_finite_at_start,
    load_or_init,
    open_log,
    warn_of_start,
)
from megatron_llama.train.setup.facts import run_facts
from megatron_llama.train.setup.inputs import Ready
from megatron_llama.train.setup.start import folder_from_elsewhere
from megatron_llama.train.setup.weight_check import begin_own_share

if TYPE_CHECKING:
    from megatron_llama.checkpoint.background import BackgroundSaver
    from megatron_llama.checkpoint.model_folders.export import FinalExport
    from megatron_llama.train.run.profiling import Profiling


def name_device(config: Config, device: torch.device) -> str:
    """Return the name of a run's device, with a remark if it computes bf16 products in fp32."""
    narrow = compute_dtype(config) is torch.bfloat16 or config.optimizer.optimizer == MUON
    if not narrow or not devices.is_host(device) or devices.multiplies_bf16():
        return devices.name(device)
    return (
        f"{devices.name(device)}, products of bf16 in fp32: this processor has no instructions for "
        "bf16, so it saves no time"
    )


@contextmanager
def open_run(
    inputs: Ready,
    mesh: Mesh,
    *,
    background: BackgroundSaver | None = None,
    lease: Lease | None = None,
    callbacks: Sequence[Callback] = (),
) -> Iterator[BuiltRun]:
    """Build all that ``train`` needs, print the description of the run, and close all of it in the
    end. Collective.

    ``background``, if given, writes the checkpoints while training goes on. ``lease``, if given, is
    already taken and keeps other runs out of --save. ``callbacks`` are called on this rank. Raises
    UserError, the same on every rank."""
    started = time.monotonic()
    config = inputs.config
    if mesh.rank == 0:
        described = describe_run(inputs, mesh.world.size, name_device(config, mesh.device))
        for subject, words in described.items():
            print(f" {subject:<11} {words}", flush=True)

    with ExitStack() as stack:
        # Only rank 0 looks at the file save-now and at the clock; the others follow its request.
        if mesh.rank == 0:
            minutes = config.training.exit_duration_in_mins
            interrupts = Interrupts(config.checkpoint.save, minutes=minutes, since=started)
        else:
            interrupts = Interrupts()
        # This context ends last: a launcher that has seen another rank end sends SIGTERM at once,
        # and this rank must still close the contexts below and name that rank
        # (``train/api/common/watched.py``).
        stack.enter_context(interrupts)
        stages = build_stages(config, mesh)
        steps_per_epoch = -(-len(inputs.training) // config.training.global_batch_size)
        optimizer = stack.enter_context(
            closing(build_optimizer(config, stages.values(), mesh, steps_per_epoch=steps_per_epoch))
        )
        replica_check = []
        if config.training.check_weight_hash_across_dp_replicas_interval:
            from megatron_llama.train.run.replica_check import ReplicaCheck

            replica_check = [ReplicaCheck(config, optimizer, mesh)]
        graphs = []
        if config.training.cuda_graph_scope == "block":
            from megatron_llama.train.run.graphs import Graphs

            graphs = [Graphs(stages, optimizer, mesh)]
        loader = build_loader(
            config, inputs.training, data_rank=mesh.data_rank, data_size=mesh.data_size
        )
        runtime = runtime_class(config)(
            stages, optimizer, mesh, config, dtype=compute_dtype(config), objective=inputs.objective
        )
        with mesh.recorder.outside_steps("loading the weights"):
            # Training begins before all files are compared. Saves wait for the comparison, for a
            # time.
            folder = folder_from_elsewhere(config.checkpoint, inputs.start)
            weight_check = stack.enter_context(
                begin_own_share(
                    Path(folder) if folder is not None else None,
                    inputs.listed,
                    [(shown.weights, shown.local_rank) for shown in inputs.seen],
                    mesh.world,
                    in_background=True,
                )
            )
            begin = partial(load_or_init, config, optimizer, mesh, inputs.start)
            state = begin()
            not_finite = find_not_finite_at_start(config, optimizer, mesh, inputs.start)
        # From here on the run writes to --save. Nothing above writes there, so that a run that
        # cannot start leaves the folder as it was.
        with raise_on_all_ranks(mesh.world):
            saver = Saver(
                config,
                mesh,
                optimizer,
                inputs.tokenizer,
                background,
                inputs.identity,
                inputs.carried,
                lease,
                begins_finite=not not_finite,
            )
            log = stack.enter_context(open_log(config, mesh, state))
            bad_steps = BadSteps(config, mesh, log, state.history)
        if lease is not None:
            lease.tell_loss(log.abandon)
        facts = run_facts(inputs, mesh)
        log.event(START, reached=log.reached, trackers=log.tracked, **facts)
        warn_of_start(not_finite, config, log)
        # The watch's words about hanging ranks outlive this process in the file of events.
        mesh.recorder.told = lambda words: log.tell(FAULT, words=words)
        interrupts.listen()
        # All these objects live as long as the run. The garbage collector would scan them again and
        # again, on every rank at another moment, while the others wait.
        gc.collect()
        if not gc.get_freeze_count():  # what a program has frozen would be thawed with it
            gc.freeze()
            stack.callback(gc.unfreeze)

        course = Course(state, bad_steps.is_last)
        users = Callbacks(callbacks, course, mesh.recorder)
        progress = Progress(config, mesh, log, bad_steps, course, inputs.names)
        texts = []
        if inputs.prompts:
            from megatron_llama.train.run.text_samples import SampleTexts  # which few runs need

            texts.append(SampleTexts(config, mesh, runtime, inputs.tokenizer, inputs.prompts, log))
        evaluator = (
            Evaluator(config, mesh, runtime, inputs.validation, inputs.names)
            if inputs.validation is not None
            else None
        )
        checkpoints = Checkpoints(
            inputs,
            mesh,
            optimizer,
            saver,
            log,
            bad_steps,
            course,
            interrupts,
            begin=begin,
            weight_check=weight_check,
            callbacks=users,
        )
        data_files = stack.enter_context(DataFiles(config, mesh, inputs.seen, log))
        tracing = tuple(
            stack.enter_context(tracer)
            for tracer in _tracing(config, mesh, log, optimizer.settle, progress.restart_clock)
        )
        export = Export(
            _final_export(inputs, mesh, optimizer), checkpoints, course, log, mesh.recorder
        )
        if course.is_last:
            log.say(f" {already_finished(inputs)}")
        yield BuiltRun(
            inputs=inputs,
            mesh=mesh,
            optimizer=optimizer,
            runtime=runtime,
            log=log,
            run=Run(config, mesh, course, interrupts, checkpoints.write),
            course=course,
            interrupts=interrupts,
            bad_steps=bad_steps,
            progress=progress,
            checkpoints=checkpoints,
            export=export,
            # The parts are called in this order at each moment of a run. Saves, also those of
            # users, come after the comparison of copies, which may stop the run, and after the
            # evaluation, whose loss a checkpoint has and which may end the run. At the end saves
            # are complete before the export.
            parts=(
                *graphs,
                progress,
                *replica_check,
                Validation(config, mesh, evaluator, log, course, users),
                users,
                checkpoints,
                *texts,
                data_files,
                *tracing,
                export,
            ),
            open_prefetcher=partial(
                Prefetcher,
                loader,
                mesh.world,
                interrupts,
                device=mesh.device,
                checks=(data_files, weight_check),
            ),
        )


def _final_export(
    ready: Ready, mesh: Mesh, optimizer: OverlappedDistributedOptimizer
) -> FinalExport | None:
    """Return the writer of --export-hf; None without that option."""
    folder = ready.config.checkpoint.export_hf
    if folder is None:
        return None
    # Only a run that exports loads the writers of HuggingFace's format, before its first step.
    from megatron_llama.checkpoint.model_folders.export import FinalExport

    return FinalExport(folder, ready.config, mesh, optimizer, ready.tokenizer, ready.carried)


def _tracing(
    config: Config,
    mesh: Mesh,
    log: MetricLog,
    settle: Callable[[], None],
    restart_clock: Callable[[], None],
) -> Iterator[Profiling]:
    """Yield the part that traces steps, if the run traces some."""
    if config.log.profile or config.log.record_timeline is not None:
        # Only such a run loads the tracer.
        from megatron_llama.train.run.profiling import Profiling

        yield Profiling(config, mesh, log, settle, restart_clock)
