"""The training loop. Everything that happens in a run is visible in ``train``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from signal import Signals

from megatron_llama.data.stream_places import seek
from megatron_llama.engine.comm.object_collectives import on_rank0
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.metrics.events import END
from megatron_llama.metrics.log import MetricLog
from megatron_llama.model.plan.run_params import logged_group, param_groups
from megatron_llama.pipeline.runtime import PipelineRuntime
from megatron_llama.train.run.bad_steps import BadSteps
from megatron_llama.train.run.callbacks import Part, Run, Step
from megatron_llama.train.run.checkpoints import Checkpoints
from megatron_llama.train.run.course import Course
from megatron_llama.train.run.export import Export
from megatron_llama.train.run.lr import learning_rate
from megatron_llama.train.run.prefetch import RETURN, SAVE, SIGNALS, STOPS, Interrupts, Prefetcher
from megatron_llama.train.run.progress import Progress
from megatron_llama.train.run.result import TrainResult
from megatron_llama.train.setup.inputs import Ready


@dataclass(frozen=True)
class BuiltRun:
    """A run that ``open_run`` has built, ready for its first step."""

    inputs: Ready
    mesh: Mesh
    optimizer: OverlappedDistributedOptimizer
    runtime: PipelineRuntime
    log: MetricLog
    run: Run
    course: Course
    interrupts: Interrupts
    bad_steps: BadSteps
    progress: Progress
    checkpoints: Checkpoints
    export: Export
    parts: Sequence[Part]
    """The parts of the run beside its steps, in the order of their calls. ``progress``,
    ``checkpoints`` and ``export`` are among them."""
    open_prefetcher: Callable[..., Prefetcher]
    """Opens a prefetcher that begins to read at ``first_sample``."""


def train(built: BuiltRun) -> TrainResult:
    """Train until ``train_iters``, until the samples of --epochs are used up, or until some rank
    is asked to stop. Everything is saved when it returns. Collective.

    Raises UserError, the same on every rank, and what a callback raises."""
    run = built.run
    course = built.course
    parts = built.parts
    optimizer = built.optimizer
    bad_steps = built.bad_steps
    recorder = built.mesh.recorder
    training = run.config.training
    clip_grad = run.config.optimizer.clip_grad
    # The first group has all parameters that no --param-group names.
    groups = param_groups(run.config).configs
    logged = logged_group(run.config)

    for part in parts:
        part.on_start(run)
    for part in parts:
        part.after_start(run)
    prefetcher = built.open_prefetcher(first_sample=bad_steps.first_sample(course.state))
    reason = "the last iteration"
    stopped_by: Signals | None = None

    while not course.is_last:
        for part in parts:
            part.before_step(run)
        before = course.state
        rates = [
            learning_rate(group, training.train_iters, before.iteration, before.consumed_samples)
            for group in groups
        ]
        course.state = bad_steps.next_state(before)
        recorder.iteration = run.iteration
        batches = prefetcher.take(next_sample=bad_steps.first_sample(course.state))
        # Announced now, so that buckets can be updated during backward when nothing is clipped.
        optimizer.announce_step(rates, clip=clip_grad)
        # Every microbatch: forward, backward, and the reduction of its gradients.
        loss = built.runtime.step(batches)
        numbers = built.runtime.numbers
        update = optimizer.step(rates, clip=clip_grad, skip_update=bad_steps.skip_update(loss))
        step = Step.of(course.state, rates[logged], loss, update, numbers, batches)
        for part in parts:
            part.on_step(run, step)
        recorder.enter("what follows the step")

        request = prefetcher.agreed_request()
        interval = training.exit_interval
        course.stopping = request in STOPS or (interval > 0 and run.iteration % interval == 0)
        course.save_asked = request == SAVE
        # The host learns the outcome of a step one step later. It waits for it here if something is
        # due, so that a bad step is never saved or evaluated.
        checked = any(part.needs_checked_step and part.due(run) for part in parts)
        if checked:
            built.progress.check_last_step()
        if bad_steps.rollback_needed or request == RETURN:
            go_back(built)
            if not course.is_last:
                prefetcher.restart(bad_steps.first_sample(course.state))
                continue
            # The last step of a pass was bad, and no samples are left to repeat it: the run ends
            # here, in the state to which it has returned.
        for part in parts:
            # Asked again: an earlier part may end the run, which makes a checkpoint due.
            if part.due(run):
                part.on_due(run)
        if checked:
            built.progress.restart_clock()  # the log's averages are those of training alone
        for part in parts:
            part.after_step(run)

        if course.must_return:
            go_back(built)
            prefetcher.restart(bad_steps.first_sample(course.state))
        elif course.early_stop_reason is not None:
            reason = course.early_stop_reason
            built.log.say(f" stopped after iteration {run.iteration}: {reason}")
            break
        elif course.stopping:
            stopped_by = SIGNALS.get(request)
            reason = built.interrupts.reason(request) if request in STOPS else "--exit-interval"
            built.log.say(f" stopped by {reason} after iteration {run.iteration}")
            break

    for part in parts:
        part.before_end(run)
    for part in parts:
        part.on_end(run)
    built.log.event(END, iteration=run.iteration, reason=reason)
    if stopped_by is not None:
        # A launcher may end the other ranks as soon as one ends with a status other than 0, so all
        # ranks wait here until rank 0 has closed its logs.
        on_rank0(built.log.close, built.mesh.world)
    return result_of(built, stopped_by or built.interrupts.stopped_by)


def go_back(built: BuiltRun) -> None:
    """Return to the newest good checkpoint, or to the start. Collective. Raises CheckpointError,
    and TrainingError where the run has gone back too often, the same on every rank."""
    returned = built.checkpoints.go_back()
    built.bad_steps.rewind(returned)
    seek(built.inputs.training, returned.places)
    built.course.rewind(returned)
    for part in built.parts:
        part.on_return(built.run)
    built.interrupts.returned()


def result_of(built: BuiltRun, stopped_by: Signals | None) -> TrainResult:
    """Return the result of the run."""
    last_step = built.progress.last
    evaluations = built.course.evaluations
    return TrainResult(
        built.run.config,
        built.run.iteration,
        built.run.consumed_samples,
        loss=last_step.loss if last_step is not None else None,
        grad_norm=last_step.grad_norm if last_step is not None else None,
        losses=built.progress.losses,
        numbers=last_step.counted if last_step is not None else {},
        validation_losses={at: evaluation.loss for at, evaluation in evaluations.items()},
        validation_numbers={at: evaluation.numbers for at, evaluation in evaluations.items()},
        checkpoint=built.checkpoints.newest,
        export=built.export.folder,
        stopped_by=stopped_by,
    )
