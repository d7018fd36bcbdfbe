"""The part of a run that lets blocks run as graphs (--cuda-graph-scope block)."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.launch.launcher import register_no_graphs
from megatron_llama.model.llama import Stage
from megatron_llama.train.run.block_graphs import BlockGraphs
from megatron_llama.train.run.callbacks import Part, Run, Step


class Graphs(Part):
    """Begins to capture when the first step is over."""

    def __init__(
        self, stages: Mapping[int, Stage], optimizer: OverlappedDistributedOptimizer, mesh: Mesh
    ) -> None:
        register_no_graphs()
        self._graphs = BlockGraphs(stages, optimizer, mesh)

    def on_step(self, run: Run, step: Step) -> None:
        self._graphs.begin()
