"""Exports native checkpoints as HuggingFace folders: on demand, and at the end of a run."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_llama.checkpoint import native
from megatron_llama.checkpoint.carried import NO_FILES, Carried
from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.checkpoint.model_folders.formats import weight_folders
from megatron_llama.checkpoint.model_folders.hf.writer import export_hf
from megatron_llama.checkpoint.model_folders.peft.adapter import write_peft
from megatron_llama.config.schema import Config
from megatron_llama.data.tokenizer.base import Tokenizer
from megatron_llama.engine.comm.device import thread_pool
from megatron_llama.engine.comm.object_collectives import (
    MEETING_SECONDS,
    all_reduce_max,
    raise_on_all_ranks,
)
from megatron_llama.engine.mesh import Mesh
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.errors import CheckpointError
from megatron_llama.metrics.log import MetricLog

WEIGHTS = ".weights"
"""Ending of the folder that holds the checkpoint of a run that saves none, until it is exported."""


def export_checkpoint(
    checkpoint: str | Path,
    output: str | Path,
    *,
    dtype: str = "auto",
    tokenizer: Tokenizer | None = None,
    generation: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> str:
    """Write a checkpoint as a HuggingFace folder, which appears whole or not at all, and return the
    dtype of its weights. ``generation`` is the generation config that the model came with.

    ``dtype`` is one of those of ``export_hf``, or ``auto``: bfloat16 for a run with --bf16, else
    float32. Raises CheckpointError."""
    weights = native.open_weights(checkpoint)
    if dtype == "auto":
        dtype = "bfloat16" if weights.meta.config["training"].get("bf16") else "float32"
    sources = weight_folders(weights.meta.config.get("checkpoint", {}))
    export_hf(
        output,
        weights.model,
        weights,
        dtype,
        tokenizer,
        sources=sources,
        carried=Carried(weights.meta.state.hf_config, generation or {}),
        overwrite=overwrite,
    )
    return dtype


def export_adapter(
    checkpoint: str | Path,
    output: str | Path,
    tokenizer: Tokenizer | None = None,
    *,
    overwrite: bool = False,
) -> str:
    """Write the low-rank additions of a checkpoint in PEFT's format and return their dtype. The
    folder appears whole or not at all. Raises CheckpointError."""
    weights = native.open_weights(checkpoint)
    lora = weights.lora
    if not lora.lora_rank:
        do = "leave --adapter out"
        raise CheckpointError(
            checkpoint, got="no low-rank additions", expected="a run with --lora-rank", do=do
        )
    options = weights.meta.config.get("checkpoint", {})
    if options.get("resize_embeddings"):
        do = "leave --adapter out, which exports the whole model"
        got = "a run with --resize-embeddings, whose new rows are in no adapter"
        raise CheckpointError(checkpoint, got=got, expected="the rows of its base model", do=do)
    write_peft(
        output,
        weights.model,
        lora,
        weights.stored,
        base=options.get("init_from_hf"),
        tokenizer=tokenizer,
        sources=weight_folders(options),
        overwrite=overwrite,
    )
    return "float32"


class FinalExport:
    """Writes the model of a run into --export-hf at the end of the run. That this is possible was
    checked at the start, not after days (``train/setup/inputs.py``)."""

    def __init__(
        self,
        target: str | Path,
        config: Config,
        mesh: Mesh,
        optimizer: OverlappedDistributedOptimizer,
        tokenizer: Tokenizer | None,
        carried: Carried = NO_FILES,
    ) -> None:
        self._target = Path(target).resolve()
        self._config = config
        self._mesh = mesh
        self._optimizer = optimizer
        self._tokenizer = tokenizer
        self._carried = carried

    def write(self, state: TrainState, checkpoint: Path | None, log: MetricLog) -> Path:
        """Export ``checkpoint``, or the engine's weights if the run has saved none, and return the
        folder. Called at the end of the run. Collective. Raises CheckpointError on every rank."""
        beside = self._target.with_name(self._target.name + WEIGHTS)
        try:
            if checkpoint is None:
                state = replace(state, hf_config=self._carried.hf_config)
                checkpoint = native.save(beside, self._optimizer, self._mesh, state, self._config)
            self._export(checkpoint, self._target)
        finally:
            if self._mesh.rank == 0:
                shutil.rmtree(beside, ignore_errors=True)
        without = "" if self._tokenizer is not None else ", without a tokenizer: none is known"
        log.say(f" exported to {self._target}{without}")
        return self._target

    def _export(self, checkpoint: Path, target: Path) -> None:
        """Export on rank 0."""
        with thread_pool(1) as pool:
            export = None
            if self._mesh.rank == 0:
                export = pool.submit(
                    export_checkpoint,
                    checkpoint,
                    target,
                    tokenizer=self._tokenizer,
                    generation=self._carried.generation,
                )
            # The other ranks meet rank 0 again and again: the export of a large model takes longer
            # than a collective may wait.
            running = True
            while running:
                if export is not None:
                    wait([export], MEETING_SECONDS)
                unfinished = int(export is not None and not export.done())
                running_somewhere, agreed = all_reduce_max(unfinished, self._mesh.world)
                agreed.wait()
                running = bool(running_somewhere)
        with raise_on_all_ranks(self._mesh.world):
            if export is not None:
                export.result()
