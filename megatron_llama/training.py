"""The training loop. Everything that happens in a run is visible in ``train``."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals

from megatron_llama.checkpoint.background import BackgroundSaver
from megatron_llama.checkpoint.lease import Lease
from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.checkpoint.saver import Saver
from megatron_llama.config.schema import Config
from megatron_llama.conversion.export import FinalExport
from megatron_llama.data.text_stream import seek
from megatron_llama.distributed.comm.object_collectives import (
    on_rank0,
    raise_error_on_all_ranks,
    raise_on_all_ranks,
)
from megatron_llama.distributed.mesh import Mesh
from megatron_llama.engine.build import build_optimizer, compute_dtype
from megatron_llama.engine.lr import learning_rate
from megatron_llama.engine.replicas import check_replicas, has_replicas
from megatron_llama.loop.bad_steps import BadSteps
from megatron_llama.loop.banner import already_finished, banner
from megatron_llama.loop.build import (
    Validation,
    build_loader,
    check_datasets,
    find_not_finite_at_start,
    load_or_init,
    open_log,
    read_first_step,
    roll_back,
    warn_of_start,
)
from megatron_llama.loop.callbacks import Callback, Callbacks, Evaluation, Run
from megatron_llama.loop.facts import run_facts
from megatron_llama.loop.inputs import VALIDATION, Inputs, Source, open_samples, require_outputs
from megatron_llama.loop.prefetch import RETURN, SAVE, SIGNALS, STOPS, Interrupts, Prefetcher
from megatron_llama.loop.profiling import Profiling
from megatron_llama.loop.progress import Progress
from megatron_llama.loop.start import folder_from_elsewhere, trained_weights
from megatron_llama.loop.text_inputs import with_places
from megatron_llama.loop.text_samples import SampleTexts
from megatron_llama.loop.weight_check import begin_weight_check
from megatron_llama.metrics.events import END, FAULT, START
from megatron_llama.model.llama import build_stages
from megatron_llama.model.load import load_stages, rank_specs
from megatron_llama.pipeline.runtime import FixedWeights, PipelineRuntime
from megatron_llama.plans.params import logged_group, param_groups


@dataclass(frozen=True)
class TrainResult:
    """What a run has come to. All ranks have the same."""

    config: Config = field(repr=False)
    """The configuration with everything decided."""
    iteration: int
    """Optimizer steps taken, those before a resume included."""
    consumed_samples: int
    """Samples behind the run."""
    loss: float | None
    """Loss of the last step; None if no step was left to take."""
    grad_norm: float | None
    """L2 norm of the last step's gradient before clipping; None as with ``loss``."""
    losses: Mapping[int, float]
    """Training loss by iteration, of the steps of this run that were logged (every
    ``log_interval``-th and the last)."""
    numbers: Mapping[str, float]
    """What the objective counts beside its loss in the last step, by name: for ``align`` rewards,
    margins and accuracies, NaN where there was nothing to count. Empty for other runs."""
    validation_losses: Mapping[int, float]
    """Validation loss by iteration, of the evaluations of this run."""
    validation_numbers: Mapping[int, Mapping[str, float]]
    """The same ``numbers`` over each of these evaluations, by iteration."""
    checkpoint: Path | None
    """The newest checkpoint that this run has saved; None without ``save``."""
    export: Path | None
    """The HuggingFace folder of ``export_hf``; None if the run has written none."""
    stopped_by: Signals | None
    """The signal that asked the run to stop, if one did. Everything is saved all the same."""


def untrained(inputs: Inputs) -> TrainResult:
    """What a run has come to that has taken no step."""
    state = inputs.state
    return TrainResult(
        inputs.config,
        state.iteration,
        state.consumed_samples,
        loss=None,
        grad_norm=None,
        losses={},
        numbers={},
        validation_losses={},
        validation_numbers={},
        checkpoint=None,
        export=None,
        stopped_by=None,
    )


def evaluate_only(config: Config, mesh: Mesh, source: Source) -> None:
    """Print the loss of a checkpoint or HuggingFace folder on the validation split."""
    samples = open_samples(source, config, VALIDATION, mesh.world)
    runtime, state = forward_runtime(config, mesh)
    with open_log(config, mesh, state) as log:
        Validation(config, mesh, runtime, samples).run(state, log, last=True)


def forward_runtime(config: Config, mesh: Mesh) -> tuple[PipelineRuntime, TrainState]:
    """Return the model of a checkpoint or HuggingFace folder, and the state that it was saved in.
    Collective. Raises UserError, the same on every rank.

    No optimizer is built: a rank holds its share of the weights and nothing else."""
    stages = build_stages(config, mesh)
    dtype = compute_dtype(config)
    with raise_on_all_ranks(mesh.world):
        trained = trained_weights(config)
    with begin_weight_check(trained.folder, mesh.world) as check:
        with raise_on_all_ranks(mesh.world):
            load_stages(
                stages.values(),
                rank_specs(config, mesh),
                trained.weights,
                dtype=dtype,
                device=mesh.device,
            )
        check.require()
    return PipelineRuntime(stages, FixedWeights(), mesh, config, dtype=dtype), trained.state


def train(
    inputs: Inputs,
    mesh: Mesh,
    *,
    background: BackgroundSaver | None = None,
    lease: Lease | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainResult:
    """Train until ``train_iters``, until the samples of --epochs are used up, or until some rank
    is asked to stop. Everything is saved when it returns. Collective.

    ``background``, if given, writes the checkpoints while training goes on. ``lease``, if given,
    has been taken: it keeps other runs out of --save. ``callbacks`` are called on this rank. Raises
    UserError, the same on every rank, and what a callback raises."""
    started = time.monotonic()
    config = inputs.config
    with raise_on_all_ranks(mesh.world):
        read_first_step(inputs, (mesh.data_rank,), mesh.data_size)
        if mesh.rank == 0:
            require_outputs(config)
    for line in (*inputs.lines, *banner(inputs, mesh)) if mesh.rank == 0 else ():
        print(f" {line}", flush=True)
    training = config.training
    clip_grad = config.optimizer.clip_grad
    # The first is that of all parameters of which --param-group says nothing.
    groups = param_groups(config).configs
    logged = logged_group(config)
    check_replicas_interval = training.check_weight_hash_across_dp_replicas_interval

    with ExitStack() as stack:
        # Only rank 0 looks at the file save-now and at the clock; the others follow its request.
        if mesh.rank == 0:
            minutes = training.exit_duration_in_mins
            interrupts = Interrupts(config.checkpoint.save, minutes=minutes, since=started)
        else:
            interrupts = Interrupts()
        # Left last: a launcher that has seen another rank end sends SIGTERM at once, and this one
        # has to close what follows, and to say which rank it was (``api/common/watched.py``).
        stack.enter_context(interrupts)
        stages = build_stages(config, mesh)
        steps_per_epoch = -(-len(inputs.training) // training.global_batch_size)
        optimizer = stack.enter_context(
            closing(build_optimizer(config, stages.values(), mesh, steps_per_epoch=steps_per_epoch))
        )
        if check_replicas_interval and not has_replicas(optimizer, mesh):
            check_replicas_interval = 0
        loader = build_loader(
            config, inputs.training, data_rank=mesh.data_rank, data_size=mesh.data_size
        )
        runtime = PipelineRuntime(
            stages, optimizer, mesh, config, dtype=compute_dtype(config), objective=inputs.objective
        )
        validation = Validation(config, mesh, runtime, inputs.validation, inputs.names)
        texts = SampleTexts(config, mesh, runtime, inputs.tokenizer, inputs.prompts)
        with mesh.recorder.outside_steps("loading the weights"):
            # The run begins to train before all files are compared. What it keeps waits for that,
            # for a time.
            weights_folder = folder_from_elsewhere(config.checkpoint, inputs.start)
            weight_check = stack.enter_context(
                begin_weight_check(weights_folder, mesh.world, in_background=True)
            )
            state = load_or_init(config, optimizer, mesh, inputs.start)
            not_finite = find_not_finite_at_start(config, optimizer, mesh, inputs.start)
        export = FinalExport(config, mesh, optimizer, inputs.tokenizer, inputs.carried)
        # From here on the run writes to --save. Nothing before this line has, so that a run that
        # cannot start leaves the folder as it was.
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
        if lease is not None:
            lease.tell_loss(log.abandon)
        facts = run_facts(inputs, mesh)
        log.event(START, reached=log.reached, trackers=log.tracked, **facts)
        warn_of_start(not_finite, config, log)
        # What the watch says of hanging ranks outlives this process in the file of events.
        mesh.recorder.told = lambda words: log.tell(FAULT, words=words)
        interrupts.listen()
        # What has been built lives as long as the run. The garbage collector would look at it again
        # and again, on every rank at another moment, while the others wait.
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)

        run = Run(config, interrupts, state, mesh.rank, mesh.world.size)
        called = Callbacks(callbacks, run, mesh.recorder)
        bad_steps = BadSteps(config, mesh, log, state.history)
        progress = Progress(config, mesh, log, bad_steps, inputs.names)
        if bad_steps.is_last(state):
            log.say(f" {already_finished(inputs)}")
        called.start()
        evaluations: dict[int, Evaluation] = {}
        first = validation.run(state, log, last=bad_steps.is_last(state))
        if first is not None:
            evaluations[state.iteration] = first
        called.evaluation(first)
        data_check = stack.enter_context(check_datasets(config, mesh, log.say))
        profiling = stack.enter_context(
            Profiling(config, mesh, log, optimizer.settle, progress.restart_clock)
        )
        prefetcher = Prefetcher(
            loader,
            mesh.world,
            interrupts,
            first_sample=bad_steps.first_sample(state),
            device=mesh.device,
            checks=(data_check, weight_check),
        )

        def go_back() -> TrainState:
            """Return to the newest good checkpoint, or to the start. Collective."""
            with mesh.recorder.outside_steps("returning to a checkpoint"):
                saver.finish(log)
                if saver.refusal is not None:
                    bad_steps.count_refusal(saver.refusal, saver.newest_good)
                returned = roll_back(config, optimizer, mesh, saver, log, inputs.start)
            bad_steps.rewind(returned)
            seek(inputs.training, returned.places)
            progress.rewind(returned.iteration)
            called.rewind(returned)
            interrupts.returned()
            for iteration in [at for at in evaluations if at > returned.iteration]:
                del evaluations[iteration]
            return returned

        reason = "the last iteration"
        early_stop_reason = None
        stopped_by: Signals | None = None
        stopped = False

        while not bad_steps.is_last(state):
            profiling.before(state.iteration)
            rates = [
                learning_rate(group, training.train_iters, state.iteration, state.consumed_samples)
                for group in groups
            ]
            lr = rates[logged]
            state = bad_steps.next_state(state)
            mesh.recorder.iteration = state.iteration
            batches = prefetcher.take(next_sample=bad_steps.first_sample(state))
            # So that buckets can be updated during backward when nothing is clipped.
            optimizer.announce_step(rates, clip=clip_grad)
            # Every microbatch: forward, backward, and the reduction of its gradients.
            loss = runtime.step(batches)
            counted = runtime.numbers
            update = optimizer.step(rates, clip=clip_grad, skip_update=bad_steps.skip_update(loss))
            last = bad_steps.is_last(state)
            progress.record_step(state, lr, loss, update, counted, last=last)
            called.step(state, lr, loss, update, counted, batches)
            mesh.recorder.enter("what follows the step")

            request = prefetcher.agreed_request()
            interval = training.exit_interval
            stopping = request in STOPS or (interval > 0 and state.iteration % interval == 0)
            saving = saver.due(state, last=last) or stopping or request == SAVE
            evaluating = validation.due(state, last=last)
            writing_texts = texts.due(state, last=last)
            if evaluating or saving or writing_texts:
                # The host learns how a step went one step later. It waits for that here, so that
                # a step that went wrong is never saved or evaluated.
                progress.check_last_step()
            if bad_steps.rollback_needed or request == RETURN:
                state = go_back()
                last = bad_steps.is_last(state)
                if not last:
                    prefetcher.restart(bad_steps.first_sample(state))
                    continue
                # The last step of a pass was bad, and nothing is left to repeat it with: the run
                # ends here, in the state to which it has returned.

            if check_replicas_interval and state.iteration % check_replicas_interval == 0:
                check_replicas(optimizer, mesh, state.iteration)
            evaluated = None
            if evaluating:
                evaluated = validation.run(state, log, last=last)
                early_stop_reason = validation.early_stop_reason(log)
                if evaluated is not None:
                    evaluations[state.iteration] = evaluated
                called.evaluation(evaluated)
            if saving or early_stop_reason:
                weight_check.wait_before_save(log, interrupts, stopping=stopping)
                with mesh.recorder.outside_steps("saving"):
                    validation_loss = evaluated.loss if evaluated is not None else None
                    saved = with_places(bad_steps.with_history(state), inputs.training, mesh.world)
                    ends = last or stopping or early_stop_reason is not None
                    saver.save(saved, log, validation_loss, last=ends)
                weight_check.remember_save(saver.newest)
                if saver.refusal is None:
                    interrupts.saved()
            if writing_texts:
                texts.write(state, log)
            if evaluating or saving or writing_texts:
                progress.restart_clock()  # the log's averages are those of training alone
            if saver.failed(log):
                interrupts.stop()
            called.saves(saver.take_written())
            # A run that is to stop leaves the way back to its next start.
            if saver.refusal is not None and (last or early_stop_reason or not stopping):
                state = go_back()
                early_stop_reason = None
                prefetcher.restart(bad_steps.first_sample(state))
                continue
            if saver.found_refusal:
                interrupts.ask_to_return()
            if early_stop_reason:
                reason = early_stop_reason
                log.say(f" stopped after iteration {state.iteration}: {reason}")
                break
            if stopping:
                stopped = True
                stopped_by = SIGNALS.get(request)
                reason = interrupts.reason(request) if request in STOPS else "--exit-interval"
                log.say(f" stopped by {reason} after iteration {state.iteration}")
                break

        progress.check_last_step()
        optimizer.settle()
        with mesh.recorder.outside_steps("saving"):
            saver.finish(log)
        called.saves(saver.take_written())
        are_weights_compared = weight_check.wait_at_end(log, interrupts, stopped=stopped)
        # Damage that was found during the last step has not reached the other ranks yet.
        raise_error_on_all_ranks(data_check.problem, mesh.world)
        exported = None
        # What is published has begun with weights that are known to be sound.
        if are_weights_compared and (early_stop_reason or bad_steps.is_last(state)):
            with mesh.recorder.outside_steps("exporting"):
                exported = export.write(state, saver.newest, log)
        called.end()
        log.event(END, iteration=state.iteration, reason=reason)
        if stopped_by is not None:
            # A launcher may end the other ranks as soon as one has ended with another status than
            # 0: not before rank 0 has closed its logs.
            on_rank0(log.close, mesh.world)
        last_step = progress.last
        return TrainResult(
            config,
            state.iteration,
            state.consumed_samples,
            loss=last_step.loss if last_step is not None else None,
            grad_norm=last_step.grad_norm if last_step is not None else None,
            losses=progress.losses,
            numbers=last_step.counted if last_step is not None else {},
            validation_losses={at: one.loss for at, one in evaluations.items()},
            validation_numbers={at: one.numbers for at, one in evaluations.items()},
            checkpoint=saver.newest,
            export=exported,
            stopped_by=stopped_by or interrupts.stopped_by,
        )
