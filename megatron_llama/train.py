"""The training loop. Everything that happens in a run is visible in ``train``."""

from __future__ import annotations

import gc
import time
from contextlib import ExitStack, closing
from functools import partial

from megatron_llama.checkpoint.background import BackgroundSaver
from megatron_llama.checkpoint.saver import Saver
from megatron_llama.config.schema import Config
from megatron_llama.convert.export import FinalExport
from megatron_llama.distributed.comm.object_collectives import raise_on_all_ranks
from megatron_llama.distributed.mesh import Mesh
from megatron_llama.engine.build import build_optimizer, compute_dtype
from megatron_llama.engine.lr import learning_rate
from megatron_llama.engine.replicas import check_replicas
from megatron_llama.loop.bad_steps import BadSteps
from megatron_llama.loop.build import (
    Source,
    Validation,
    build_loader,
    load_or_init,
    open_log,
    open_training_samples,
    roll_back,
    stream_samples,
)
from megatron_llama.loop.prefetch import SAVE, STOP, Interrupts, Prefetcher
from megatron_llama.loop.profiling import Profiling
from megatron_llama.loop.progress import Progress
from megatron_llama.loop.start import trained_weights
from megatron_llama.loop.text_samples import Prompt, SampleTexts
from megatron_llama.model.llama import build_stages
from megatron_llama.model.load import load_stages, rank_specs
from megatron_llama.pipeline.runtime import FixedWeights, PipelineRuntime
from megatron_llama.tokenizer.base import Tokenizer


def evaluate_only(config: Config, mesh: Mesh, source: Source) -> None:
    """Print the loss of a checkpoint or HuggingFace folder on the validation split.

    No optimizer is built: a rank holds its share of the weights and nothing else."""
    stages = build_stages(config, mesh)
    dtype = compute_dtype(config)
    with raise_on_all_ranks(mesh.world):
        state, weights = trained_weights(config)
        load_stages(
            stages.values(), rank_specs(config, mesh), weights, dtype=dtype, device=mesh.device
        )
    runtime = PipelineRuntime(stages, FixedWeights(), mesh, config, dtype=dtype)
    with open_log(config, mesh, state) as log:
        Validation(config, mesh, runtime, source).run(state, log)


def train(
    config: Config,
    mesh: Mesh,
    source: Source | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    background: BackgroundSaver | None = None,
    prompt: Prompt | None = None,
    same_data: bool = False,
) -> None:
    """Train until ``train_iters``, or until some rank is asked to stop. Collective.

    ``config`` is resolved (``plans.resolve.check``). ``source`` gives the samples; the default is
    those of --data-path, without the options that need an end-of-document id. ``tokenizer`` is
    copied into each checkpoint. ``background``, if given, writes the checkpoints while training
    goes on. ``prompt`` makes tokens of --sample-prompt. With ``same_data`` a run does not resume
    from a checkpoint that was trained on other samples. Raises UserError, the same on every
    rank."""
    started = time.monotonic()
    source = source or partial(stream_samples, eod=None)
    config, samples, identity = open_training_samples(config, mesh, source, same_data=same_data)
    training = config.training
    clip_grad = config.optimizer.clip_grad
    check_replicas_interval = training.check_weight_hash_across_dp_replicas_interval

    with ExitStack() as stack:
        stages = build_stages(config, mesh)
        steps_per_epoch = -(-len(samples) // training.global_batch_size)
        optimizer = stack.enter_context(
            closing(build_optimizer(config, stages.values(), mesh, steps_per_epoch=steps_per_epoch))
        )
        loader = build_loader(config, mesh, samples)
        runtime = PipelineRuntime(stages, optimizer, mesh, config, dtype=compute_dtype(config))
        validation = Validation(config, mesh, runtime, source)
        texts = SampleTexts(config, mesh, runtime, tokenizer, prompt)
        state = load_or_init(config, optimizer, mesh)
        export = FinalExport(config, mesh, optimizer, tokenizer)
        # From here on the run writes to --save. Nothing before this line has, so that a run that
        # cannot start leaves the folder as it was.
        saver = Saver(config, mesh, optimizer, tokenizer, background, identity)
        log = stack.enter_context(open_log(config, mesh, state))
        # Only rank 0 looks at the file save-now and at the clock; the others follow its request.
        if mesh.rank == 0:
            minutes = training.exit_duration_in_mins
            interrupts = Interrupts(config.checkpoint.save, minutes=minutes, since=started)
        else:
            interrupts = Interrupts()
        stack.enter_context(interrupts)
        # What has been built lives as long as the run. The garbage collector would look at it again
        # and again, on every rank at another moment, while the others wait.
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)

        bad_steps = BadSteps(config, mesh, log, state.history)
        progress = Progress(config, mesh, log, bad_steps)
        validation.run(state, log)
        profiling = stack.enter_context(
            Profiling(config, mesh, log, optimizer.settle, progress.restart_clock)
        )
        prefetcher = Prefetcher(
            loader,
            mesh.world,
            interrupts,
            first_sample=bad_steps.first_sample(state),
            device=mesh.device,
        )
        early_stop_reason = None

        while state.iteration < training.train_iters:
            profiling.before(state.iteration)
            lr = learning_rate(
                config.optimizer, training.train_iters, state.iteration, state.consumed_samples
            )
            state = bad_steps.next_state(state)
            mesh.recorder.iteration = state.iteration
            batches = prefetcher.take(next_sample=bad_steps.first_sample(state))
            # So that buckets can be updated during backward when nothing is clipped.
            optimizer.announce_step(lr, clip=clip_grad)
            # Every microbatch: forward, backward, and the reduction of its gradients.
            loss = runtime.step(batches)
            update = optimizer.step(lr, clip=clip_grad, skip_update=bad_steps.skip_update(loss))
            progress.record_step(state, lr, loss, update)

            request = prefetcher.agreed_request()
            interval = training.exit_interval
            stopping = request == STOP or (interval > 0 and state.iteration % interval == 0)
            saving = saver.due(state) or stopping or request == SAVE
            evaluating = validation.due(state)
            writing_texts = texts.due(state)
            if evaluating or saving or writing_texts:
                # The host learns how a step went one step later. It waits for that here, so that
                # a step that went wrong is never saved or evaluated.
                progress.check_last_step()
            if bad_steps.rollback_needed:
                state = roll_back(config, optimizer, mesh, saver, log)
                bad_steps.rewind(state)
                progress.rewind()
                prefetcher.restart(bad_steps.first_sample(state))
                continue

            if check_replicas_interval and state.iteration % check_replicas_interval == 0:
                check_replicas(optimizer, mesh, state.iteration)
            validation_loss = None
            if evaluating:
                validation_loss = validation.run(state, log)
                early_stop_reason = validation.early_stop_reason(log)
            if saving or early_stop_reason:
                saver.save(bad_steps.with_history(state), log, validation_loss)
            if writing_texts:
                texts.write(state, log)
            if evaluating or saving or writing_texts:
                progress.restart_clock()  # the log's averages are those of training alone
            if saver.failed(log):
                interrupts.stop()
            if early_stop_reason:
                log.say(f" stopped after iteration {state.iteration}: {early_stop_reason}")
                break
            if stopping:
                reason = interrupts.reason if request == STOP else "--exit-interval"
                log.say(f" stopped by {reason} after iteration {state.iteration}")
                break

        progress.check_last_step()
        optimizer.settle()
        saver.finish(log)
        export.write(state, saver.newest, log, early=early_stop_reason is not None)
