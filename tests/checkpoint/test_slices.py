"""A rank that starts from a HuggingFace folder reads its own slices of it, once, and nothing else."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from megatron_llama.checkpoint.model_folders.hf.reader import HFWeights
from megatron_llama.checkpoint.model_folders.hf.writer import export_hf
from megatron_llama.config.schema import Config, ModelConfig, ParallelConfig
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.launch.launcher import Place
from megatron_llama.launch.mesh import build_mesh
from megatron_llama.model.init import InitialWeights
from megatron_llama.model.llama import build_stages
from megatron_llama.model.plan.params import hf_shapes, parameter_count
from megatron_llama.pipeline.build import build_optimizer
from torch import Tensor

from tests.harness import Cluster

MODEL = ModelConfig(
    vocab_size=384, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    max_position_embeddings=64,
)
NORMS = 64 * 9
"""Elements of all norms, which every tensor-parallel rank holds."""
LAYOUTS = {
    "dp4 optim": (ParallelConfig(), 4),
    "dp4 optim_grads_params": (ParallelConfig(data_parallel_sharding_strategy="optim_grads_params"), 4),
    "dp2 no_shard": (ParallelConfig(data_parallel_sharding_strategy="no_shard"), 1),
    "tp2 sp, dp2": (ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True), 4),
    "tp2, pp2": (ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2), 4),
}
"""With the number of ranks that share the model out."""


@dataclass(frozen=True)
class Asked:
    """What one rank wanted of the folder."""

    elements: Counter[str]
    twice: bool


def ask(place: Place, parallel: ParallelConfig, folder: Path) -> Asked:
    weights, elements, twice = HFWeights(folder), Counter[str](), False
    seen = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in hf_shapes(MODEL).items()}

    def counting(rectangle: Rectangle, out: Tensor) -> None:
        nonlocal twice
        window = seen[rectangle.name][tuple(slice(at, at + size) for at, size in zip(rectangle.offset, rectangle.size, strict=True))]
        twice |= bool(window.any())
        window.fill_(True)
        elements[rectangle.name] += rectangle.numel
        weights(rectangle, out)

    config = Config(model=MODEL, parallel=parallel)
    mesh = build_mesh(config, rank=place.rank, world_size=place.world_size, device=torch.device("cpu"))
    with closing(build_optimizer(config, build_stages(config, mesh).values(), mesh)) as engine:
        engine.load_weights(counting)
    return Asked(elements, twice)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_reads_its_share(name: str, cluster: Cluster, tmp_path: Path) -> None:
    parallel, shares = LAYOUTS[name]
    ranks = 2 if shares == 1 else 4
    folder = export_hf(tmp_path / "hf", MODEL, InitialWeights(1, 0.02), "float32")
    asked = cluster.run(ranks, ask, parallel, folder)
    assert not any(one.twice for one in asked)
    total, copies = parameter_count(MODEL), (parallel.tensor_model_parallel_size - 1) * NORMS
    elements = sum(one.elements.total() for one in asked)
    assert elements == (total + copies) * ranks // shares, "each element once by each group of ranks that holds the model"
    # Buckets are shared out in equal parts; pipeline stages are as equal as layers are.
    assert max(one.elements.total() for one in asked) < 1.1 * elements / ranks
