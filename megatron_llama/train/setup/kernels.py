"""Kernels that not every machine has: refused before a run is built. FlashAttention 3
(``--attention-backend fa3``) is run while it lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from megatron_llama.config.schema import TrainingConfig
from megatron_llama.engine.comm import device as devices
from megatron_llama.engine.comm.object_collectives import raise_on_all_ranks
from megatron_llama.engine.mesh import Axis
from megatron_llama.errors import ConfigError
from megatron_llama.train.setup.draft import By, Draft, Need, refuses


@refuses(needs=Need.MACHINE, by=By.EACH_RANK)
def refuse_without_kernels(draft: Draft) -> None:
    """Raise ConfigError if this machine cannot run the FlashAttention 3 or the products in FP8 that
    the run asks for."""
    problem = None
    if draft.config.training.attention_backend == "fa3":
        from megatron_llama.engine.comm.flash3 import flash3_problem

        problem = flash3_problem(devices.accelerator(0))
    if draft.config.training.fp8 != "none":
        from megatron_llama.model.nn.fp8.support import fp8_problem

        recipe = draft.config.training.fp8
        problem = problem or fp8_problem(devices.accelerator(0), recipe)
    if problem is not None:
        raise ConfigError(problem)


@contextmanager
def chosen_flash(training: TrainingConfig, device: torch.device, world: Axis) -> Iterator[None]:
    """Run the flash attention that --attention-backend names in a section. Collective. Raises
    ConfigError on all ranks if one cannot."""
    with ExitStack() as section:
        if training.attention_backend == "fa3":
            from megatron_llama.engine.comm.flash3 import flash3

            with raise_on_all_ranks(world):
                section.enter_context(flash3(device))
        yield
