"""Native checkpoints as HuggingFace folders: on demand, and at the end of a run."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

from megatron_llama.checkpoint import native
from megatron_llama.checkpoint.failures import writing
from megatron_llama.checkpoint.folders import fresh_staging, staging
from megatron_llama.checkpoint.meta import TrainState
from megatron_llama.config.schema import Config
from megatron_llama.convert.hf.files import export_hf, require_free
from megatron_llama.convert.peft.format import write_peft
from megatron_llama.distributed.comm.object_collectives import all_reduce_max, raise_on_all_ranks
from megatron_llama.distributed.mesh import Mesh
from megatron_llama.engine.optimizer import OverlappedDistributedOptimizer
from megatron_llama.errors import CheckpointError
from megatron_llama.metrics.log import MetricLog
from megatron_llama.tokenizer.base import Tokenizer

WEIGHTS = ".weights"
"""Beside the folder of an export: the checkpoint of a run that saves none, until it is exported."""
MEETING_SECONDS = 1.0


def export_checkpoint(
    checkpoint: str | Path,
    output: str | Path,
    *,
    dtype: str = "auto",
    tokenizer: Tokenizer | None = None,
) -> str:
    """Write a checkpoint as a HuggingFace folder, which appears whole or not at all. Returns the
    dtype of its weights.

    ``dtype``: as ``export_hf`` has it, or ``auto``: bfloat16 for a run with --bf16, else float32.
    Raises CheckpointError."""
    weights = native.open_weights(checkpoint)
    if dtype == "auto":
        dtype = "bfloat16" if weights.meta.config["training"]["bf16"] else "float32"
    export_hf(output, weights.model, weights, dtype, tokenizer)
    return dtype


def export_adapter(
    checkpoint: str | Path, output: str | Path, tokenizer: Tokenizer | None = None
) -> str:
    """Write the low-rank additions of a checkpoint as PEFT has them; the folder appears whole or
    not at all. Returns their dtype.

    Raises CheckpointError."""
    weights = native.open_weights(checkpoint)
    lora = weights.lora
    if not lora.lora_rank:
        do = "leave --adapter out"
        raise CheckpointError(
            checkpoint, got="no low-rank additions", expected="a run with --lora-rank", do=do
        )
    base = weights.meta.config.get("checkpoint", {}).get("init_from_hf")
    write_peft(output, weights.model, lora, weights.stored, base=base, tokenizer=tokenizer)
    return "float32"


class FinalExport:
    """Writes the model of a run into --export-hf when all its iterations are done. Does nothing
    without that option.

    Raises CheckpointError or DataError, on every rank, where that could not work: at the start, not
    after days."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        optimizer: OverlappedDistributedOptimizer,
        tokenizer: Tokenizer | None,
    ) -> None:
        self._config = config
        self._mesh = mesh
        self._optimizer = optimizer
        self._tokenizer = tokenizer
        self._target = (
            Path(config.checkpoint.export_hf).resolve()
            if config.checkpoint.export_hf is not None
            else None
        )
        if self._target is not None:
            with raise_on_all_ranks(mesh.world), writing(self._target):
                if mesh.rank == 0:
                    _rehearse(self._target, tokenizer)

    def write(
        self, state: TrainState, checkpoint: Path | None, log: MetricLog, *, early: bool = False
    ) -> None:
        """Export ``checkpoint``, or, where the run has saved none, what the engine holds.
        Collective; nothing is done before the last iteration, unless the run has come to its end
        ``early``. Raises CheckpointError on every rank."""
        if self._target is None or not (
            early or state.iteration == self._config.training.train_iters
        ):
            return
        beside = self._target.with_name(self._target.name + WEIGHTS)
        try:
            if checkpoint is None:
                checkpoint = native.save(beside, self._optimizer, self._mesh, state, self._config)
            self._export(checkpoint, self._target)
        finally:
            if self._mesh.rank == 0:
                shutil.rmtree(beside, ignore_errors=True)
        log.say(
            f" exported to {self._target}{'' if self._tokenizer is not None else ', without a tokenizer: none is known'}"
        )

    def _export(self, checkpoint: Path, target: Path) -> None:
        """On the first rank. The others meet it every second: a large model takes longer than a
        collective may."""
        with ThreadPoolExecutor(1) as pool:
            job = (
                pool.submit(
                    partial(export_checkpoint, checkpoint, target, tokenizer=self._tokenizer)
                )
                if self._mesh.rank == 0
                else None
            )
            running = True
            while running:
                if job is not None:
                    wait([job], MEETING_SECONDS)
                unfinished, agreed = all_reduce_max(
                    int(job is not None and not job.done()), self._mesh.world
                )
                agreed.wait()
                running = bool(unfinished)
        with raise_on_all_ranks(self._mesh.world):
            if job is not None:
                job.result()


def _rehearse(target: Path, tokenizer: Tokenizer | None) -> None:
    """Whether the folder may be written, and the tokenizer can be expressed there."""
    require_free(target)
    try:
        folder = fresh_staging(target)
        if tokenizer is not None:
            tokenizer.save_hf(folder)
    finally:
        shutil.rmtree(staging(target), ignore_errors=True)
