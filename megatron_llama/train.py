"""The training loop: everything that happens in a run is visible in ``train``."""

from __future__ import annotations

from contextlib import closing

from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.comm.agreement import together
from megatron_llama.config import Config
from megatron_llama.feed import Feed, Interrupts
from megatron_llama.mesh import Mesh
from megatron_llama.model.llama import build_stages
from megatron_llama.model.load import load_stages, rank_specs
from megatron_llama.optim.build import build_optimizer, compute_dtype
from megatron_llama.optim.lr import learning_rate
from megatron_llama.pipeline.runtime import FixedWeights, PipelineRuntime
from megatron_llama.progress import Progress
from megatron_llama.setup import Saver, Validation, build_loader, load_or_init, open_log, trained_weights
from megatron_llama.tokenizer.base import Tokenizer


def evaluate_only(config: Config, mesh: Mesh, *, eod: int | None = None) -> None:
    """Print the loss of a checkpoint or HuggingFace folder on the validation split. No optimizer is built: a rank holds
    its share of the weights and nothing else."""
    stages, dtype = build_stages(config, mesh), compute_dtype(config)
    with together(mesh.world):
        state, weights = trained_weights(config)
        load_stages(stages.values(), rank_specs(config, mesh), weights, dtype=dtype, device=mesh.device)
    runtime = PipelineRuntime(stages, FixedWeights(), mesh, config, dtype=dtype)
    with open_log(config, mesh, state) as log:
        Validation(config, mesh, runtime, eod).run(state, log)


def train(config: Config, mesh: Mesh, *, eod: int | None = None, tokenizer: Tokenizer | None = None) -> None:
    """Train until ``train_iters``, or until some rank is asked to stop.

    ``config`` is resolved (validate.check); ``eod`` is the end-of-document id where an option needs one; ``tokenizer``
    is kept beside the checkpoints. Raises UserError of some kind, on every rank the same."""
    training, clip = config.training, config.optimizer.clip_grad
    stages = build_stages(config, mesh)
    with closing(build_optimizer(config, stages.values(), mesh)) as optimizer:
        loader = build_loader(config, mesh, eod)
        runtime = PipelineRuntime(stages, optimizer, mesh, config, dtype=compute_dtype(config))
        validation = Validation(config, mesh, runtime, eod)
        state = load_or_init(config, optimizer, mesh)
        saver = Saver(config, mesh, optimizer, tokenizer)  # writes to --save, as the log does: nothing before this line has
        with open_log(config, mesh, state) as log, Interrupts() as interrupts:
            progress = Progress(config, mesh, log)
            validation.run(state, log)
            feed = Feed(loader, mesh.world, interrupts, first_sample=state.consumed_samples)
            for iteration in range(state.iteration, training.train_iters):
                lr = learning_rate(config.optimizer, training.train_iters, iteration)
                batches = feed.take(following=state.consumed_samples + training.global_batch_size)
                optimizer.begin_update(lr, clip=clip)
                loss = runtime.step(batches)  # every microbatch: forward, backward, reduce
                update = optimizer.step(lr, clip=clip)
                state = TrainState(iteration + 1, state.consumed_samples + training.global_batch_size)
                progress.step(state, lr, loss, update)
                stopping = feed.stop_agreed()
                if validation.due(state) or saver.due(state) or stopping:
                    progress.settle()  # never save or evaluate a step that went wrong
                    if validation.due(state):
                        validation.run(state, log)
                    if saver.due(state) or stopping:
                        saver.save(state, log)
                    progress.restart_clock()
                if stopping:
                    log.say(f" stopped by a signal after iteration {state.iteration}")
                    break
            progress.settle()
            optimizer.settle()
