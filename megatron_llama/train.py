"""The training loop: everything that happens in a run is visible in ``train``."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial

from megatron_llama.checkpoint.background import Background
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
    begin,
    build_loader,
    go_back,
    load_or_init,
    open_log,
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
    """Print the loss of a checkpoint or HuggingFace folder on the validation split. No optimizer is
    built: a rank holds its share of the weights and nothing else."""
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
    background: Background | None = None,
    prompt: Prompt | None = None,
    same_data: bool = False,
) -> None:
    """Train until ``train_iters``, or until some rank is asked to stop.

    ``config`` is resolved (validate.check); ``source`` gives the samples, by default those of
    --data-path without the options that need an end-of-document id; ``tokenizer`` is kept beside
    the checkpoints; ``background`` writes them, if given; ``prompt`` makes tokens of
    --sample-prompt; ``same_data``: refuse to go on with other samples than the checkpoint was
    trained on. Raises UserError of some kind, on every rank the same."""
    started = time.monotonic()
    source = source or partial(stream_samples, eod=None)
    config, samples, identity = begin(config, mesh, source, same_data=same_data)
    training = config.training
    clip = config.optimizer.clip_grad
    replicas = config.training.check_weight_hash_across_dp_replicas_interval
    stages = build_stages(config, mesh)
    steps_per_epoch = -(-len(samples) // training.global_batch_size)
    with closing(
        build_optimizer(config, stages.values(), mesh, steps_per_epoch=steps_per_epoch)
    ) as optimizer:
        loader = build_loader(config, mesh, samples)
        runtime = PipelineRuntime(stages, optimizer, mesh, config, dtype=compute_dtype(config))
        validation = Validation(config, mesh, runtime, source)
        texts = SampleTexts(config, mesh, runtime, tokenizer, prompt)
        hopeless = None
        state = load_or_init(config, optimizer, mesh)
        export = FinalExport(config, mesh, optimizer, tokenizer)
        saver = Saver(
            config, mesh, optimizer, tokenizer, background, identity
        )  # writes to --save: nothing before this line has
        with (
            open_log(config, mesh, state) as log,
            _interrupts(config, mesh, started) as interrupts,
            _frozen(),
            ExitStack() as ended,
        ):
            bad_steps = BadSteps(config, mesh, log, state.history)
            progress = Progress(config, mesh, log, bad_steps)
            validation.run(state, log)
            profiling = ended.enter_context(
                Profiling(config, mesh, log, optimizer.settle, progress.restart_clock)
            )
            prefetcher = Prefetcher(
                loader,
                mesh.world,
                interrupts,
                first_sample=bad_steps.first_sample(state),
                device=mesh.device,
            )
            while state.iteration < training.train_iters:
                profiling.before(state.iteration)
                lr = learning_rate(
                    config.optimizer, training.train_iters, state.iteration, state.consumed_samples
                )
                state = bad_steps.following(state)
                mesh.recorder.iteration = state.iteration
                batches = prefetcher.take(following=bad_steps.first_sample(state))
                optimizer.begin_update(lr, clip=clip)
                loss = runtime.step(batches)  # every microbatch: forward, backward, reduce
                update = optimizer.step(lr, clip=clip, skip_update=bad_steps.skip_update(loss))
                progress.step(state, lr, loss, update)
                wish = prefetcher.agreed()
                stopping = wish == STOP or (
                    training.exit_interval > 0 and state.iteration % training.exit_interval == 0
                )
                saving = saver.due(state) or stopping or wish == SAVE
                if validation.due(state) or saving or texts.due(state):
                    progress.settle()  # never save or evaluate a step that went wrong
                if bad_steps.goes_back:
                    state = go_back(config, optimizer, mesh, saver, log)
                    bad_steps.rewind(state)
                    progress.rewind()
                    prefetcher.restart(bad_steps.first_sample(state))
                    continue
                if replicas and state.iteration % replicas == 0:
                    check_replicas(optimizer, mesh, state.iteration)
                if validation.due(state) or saving:
                    measured = validation.run(state, log) if validation.due(state) else None
                    hopeless = validation.hopeless(log) if measured is not None else None
                    if saving or hopeless:
                        saver.save(bad_steps.remember(state), log, measured)
                    progress.restart_clock()
                if texts.due(state):
                    texts.write(state, log)
                    progress.restart_clock()
                if saver.failed(log):
                    interrupts.stop()
                if hopeless:
                    log.say(f" stopped after iteration {state.iteration}: {hopeless}")
                    break
                if stopping:
                    why = interrupts.why if wish == STOP else "--exit-interval"
                    log.say(f" stopped by {why} after iteration {state.iteration}")
                    break
            progress.settle()
            optimizer.settle()
            saver.finish(log)
            export.write(state, saver.newest, log, early=hopeless is not None)


@contextmanager
def _frozen() -> Iterator[None]:
    """What has been built lives as long as the run: the garbage collector need not look at it again
    and again, on every rank at another moment, while the others wait."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _interrupts(config: Config, mesh: Mesh, started: float) -> Interrupts:
    """The file and the clock are rank 0's."""
    if mesh.rank != 0:
        return Interrupts()
    return Interrupts(
        config.checkpoint.save, minutes=config.training.exit_duration_in_mins, since=started
    )
