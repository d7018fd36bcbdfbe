"""A model that is evaluated and not trained: no optimizer, no loop."""

from __future__ import annotations

from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.config.schema import Config
from megatron_llama.engine.comm.object_collectives import raise_on_all_ranks
from megatron_llama.engine.mesh import Mesh
from megatron_llama.model.llama import build_stages
from megatron_llama.model.load import load_stages, rank_specs
from megatron_llama.pipeline.build import compute_dtype
from megatron_llama.pipeline.fixed_weights import FixedWeights
from megatron_llama.pipeline.runtime import PipelineRuntime
from megatron_llama.train.run.validation import Evaluator
from megatron_llama.train.setup.build import open_log
from megatron_llama.train.setup.inputs import VALIDATION, Source, open_samples
from megatron_llama.train.setup.start import Start, trained_weights
from megatron_llama.train.setup.weight_check import begin_weight_check


def evaluate_only(config: Config, mesh: Mesh, start: Start | None, source: Source) -> None:
    """Print the loss of ``start``, or of a HuggingFace folder, on the validation split."""
    samples = open_samples(source, config, VALIDATION, mesh.world)
    runtime, state = forward_runtime(config, mesh, start)
    with raise_on_all_ranks(mesh.world):
        opened = open_log(config, mesh, state)
    with opened as log:
        Evaluator(config, mesh, runtime, samples).measure(state, log, in_curve=True)


def forward_runtime(
    config: Config, mesh: Mesh, start: Start | None
) -> tuple[PipelineRuntime, TrainState]:
    """Return the model of ``start`` or of a HuggingFace folder, and the state that it was saved in.
    Collective. Raises UserError, the same on every rank.

    No optimizer is built: a rank holds its share of the weights and nothing else."""
    stages = build_stages(config, mesh)
    dtype = compute_dtype(config)
    with raise_on_all_ranks(mesh.world):
        trained = trained_weights(config, start)
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
