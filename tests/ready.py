"""A run that is made ready from a configuration that a test has made, without a command line."""

from __future__ import annotations

from functools import partial

from megatron_llama.config.parse import Parsed
from megatron_llama.config.schema import Config
from megatron_llama.engine.mesh import Axis
from megatron_llama.train.setup.deciders import SAMPLES, ready_of
from megatron_llama.train.setup.draft import Draft
from megatron_llama.train.setup.driver import decide
from megatron_llama.train.setup.inputs import Reading, Ready, Source, stream_samples
from megatron_llama.train.setup.processes import Processes
from megatron_llama.train.setup.start import find_start


def ready_for(config: Config, world: Axis, source: Source | None = None, *, same_data: bool = False) -> Ready:
    """Open what a run of ``config`` reads, by default --data-path. Collective."""
    draft = Draft(
        Parsed({}, {}),
        Processes(world, world.size, ()),
        start=find_start(config.checkpoint),
        config=config,
        reading=Reading(source or partial(stream_samples, eod=None), same_data=same_data),
    )
    return ready_of(decide(draft, SAMPLES))
