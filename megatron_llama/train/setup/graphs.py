"""--cuda-graph-scope block: refused before a run is built."""

from __future__ import annotations

from megatron_llama.errors import ConfigError, describe
from megatron_llama.train.setup.draft import By, Draft, Need, refuses


@refuses(needs=Need.MACHINE, by=By.EACH_RANK)
def refuse_graphs_on_hosts(draft: Draft) -> None:
    """Raise ConfigError for graphs of blocks on a machine without a device."""
    if draft.config.training.cuda_graph_scope != "none" and not captures():
        raise ConfigError(
            describe(
                "--cuda-graph-scope block",
                got="a machine without a GPU",
                expected="a device that captures graphs",
                do="leave it out",
            )
        )


def captures() -> bool:
    """Whether this machine has a device that captures graphs."""
    from megatron_llama.engine.comm import device as devices

    return not devices.is_host(devices.accelerator(0))
