"""The runs that a proof compares, each made once."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from megatron_llama.config.batch_ramp import BatchSizes
from megatron_llama.prove.case import STEPS, Case
from megatron_llama.prove.compare import History, gradients_of
from megatron_llama.prove.data_check import RankReads, Reads
from megatron_llama.prove.materials import Materials, make_materials
from megatron_llama.prove.pool import WorkerPool
from megatron_llama.prove.reference import SPREAD, learning_rates
from megatron_llama.prove.run import Tensors, Trained, run, states

TIMEOUT = 180.0
"""Seconds that a run may take."""


class Runs:
    """Trains cases on the same materials where they can share them, and reads what they have
    written. A run that has failed fails again at once."""

    def __init__(self, pool: WorkerPool, folder: Path, *, steps: int = STEPS) -> None:
        self.pool = pool
        self.folder = folder
        self.steps = steps
        self.longest = 0.0
        """Seconds of the longest run so far."""
        self._numbers = count()
        self._materials: dict[str, Materials] = {}
        self._trained: dict[tuple[str, int], Trained | Exception] = {}
        self._states: dict[Path, Tensors] = {}

    def materials(self, case: Case) -> Materials:
        """What a case is trained on and from; the same for cases that differ in how they are
        spread alone. Raises ConfigError."""
        options = {name: case.options[name] for name in case.options.keys() - SPREAD - LIKE}
        key = repr((sorted(options.items()), case.sft))
        if key not in self._materials:
            folder = self.folder / f"materials-{len(self._materials)}"
            self._materials[key] = make_materials(case, folder, self.steps)
        return self._materials[key]

    def trained(self, case: Case, until: int = 0) -> Trained:
        """The run of a case, or its first ``until`` steps, of which there may be more. Raises
        WorkerError and ConfigError."""
        until = until or self.steps
        key = repr((sorted(case.options.items()), case.world_size, case.sft))
        for steps in range(until, self.steps + 1):
            if (key, steps) in self._trained:
                break
        else:
            steps = until
            self._trained[key, steps] = self._train(case, until)
        found = self._trained[key, steps]
        if isinstance(found, Exception):
            raise found
        return found

    def gone_on(self, case: Case, begun: Trained, at: int) -> Trained:
        """A run that goes on from step ``at`` of another one, to its last step, as a case that
        may have another layout. Raises WorkerError and ConfigError."""
        found = self._train(case, begun.iterations[-1], begun.checkpoints[at])
        if isinstance(found, Exception):
            raise found
        return found

    def _train(self, case: Case, until: int, start: Path | None = None) -> Trained | Exception:
        began = time.monotonic()
        folder = self.folder / f"run-{next(self._numbers)}"
        try:
            return run(
                self.pool,
                case,
                folder,
                self.materials(case),
                start=start,
                steps=self.steps,
                until=until,
                timeout=TIMEOUT,
            )
        except Exception as error:
            return error
        finally:
            self.longest = max(self.longest, time.monotonic() - began)

    def states(self, trained: Trained) -> tuple[Tensors, ...]:
        """What each step has left, in the order of the steps."""
        for path in trained.checkpoints.values():
            if path not in self._states:
                self._states[path] = states(path)
        return tuple(self._states[trained.checkpoints[step]] for step in trained.iterations)

    def history(self, trained: Trained, until: int = 0) -> History:
        """What a run has come to in its steps, or in the first ones."""
        until = until or self.steps
        norms = trained.grad_norms[:until]
        return History(
            trained.losses[:until],
            norms,
            gradients_of(self.states(trained)[:until], trained.config.optimizer, norms),
            {at: loss for at, loss in trained.validation_losses.items() if at <= until},
        )

    def start(self, case: Case) -> Mapping[str, Tensor]:
        """The weights with which a case begins, by HuggingFace's names."""
        weights: dict[str, Tensor] = {}
        for file in sorted(self.materials(case).model.glob("*.safetensors")):
            weights |= load_file(file)
        return weights


LIKE = frozenset(
    {
        *("bf16", "fp16", "fp64", "initial_loss_scale", "min_loss_scale", "loss_scale_window"),
        *("hysteresis", "clip_grad", "freeze", "z_loss_weight", "lora_rank", "lora_alpha"),
        *("optimizer_offload", "optimizer_offload_fraction", "offload_speculative"),
        *("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "global_batch_size"),
    }
)
"""Options that change nothing of the materials, beside those that say how a run is spread."""


def batch_sizes(trained: Trained) -> tuple[int, ...]:
    """The samples of each step."""
    sizes = BatchSizes.from_training(trained.config.training)
    found: list[int] = []
    for _ in trained.iterations:
        found.append(sizes.at(sum(found)))
    return tuple(found)


def rates_of(trained: Trained) -> tuple[float, ...]:
    """The learning rates that the steps of a run must have."""
    config = trained.config
    return learning_rates(config.optimizer, config.training.train_iters, batch_sizes(trained))


def reads_of(trained: Trained) -> Reads:
    """What each rank of a run has read."""
    case = trained.case
    tp, cp, pp = (
        case.options.get(f"{axis}_parallel_size", 1)
        for axis in ("tensor_model", "context", "pipeline_model")
    )
    assert isinstance(tp, int) and isinstance(cp, int) and isinstance(pp, int)
    dp = case.world_size // (tp * cp * pp)
    return {
        step: [
            RankReads(rank // (tp * cp) % dp, record.steps[index].batches)
            for rank, record in enumerate(trained.ranks)
        ]
        for index, step in enumerate(trained.iterations)
    }
