"""The reference of a run of preference tuning: its identity, and its scores of completions.

The reference is the first model of the run; with low-rank additions, the model without them. A run
that goes on from its checkpoint has other weights: the checkpoint keeps the reference's digest, and
the scores of that digest are read.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_llama.checkpoint import native
from megatron_llama.checkpoint.failures import require_writable, writing
from megatron_llama.checkpoint.meta import without_effect
from megatron_llama.checkpoint.model_folders.formats import hf_weights
from megatron_llama.config.schema import Config, ModelConfig
from megatron_llama.engine.comm.object_collectives import on_rank0, raise_on_all_ranks
from megatron_llama.engine.mesh import Axis, Mesh
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.errors import CheckpointError, ConfigError, DataError
from megatron_llama.model.init import InitialWeights, WithAdapters
from megatron_llama.model.llama import build_stages
from megatron_llama.model.nn.lora import additions_off
from megatron_llama.model.rope import normal_rope
from megatron_llama.pipeline.build import build_optimizer, compute_dtype
from megatron_llama.pipeline.runtime import PipelineRuntime
from megatron_llama.train.setup.inputs import Ready, resumes
from megatron_llama.train.setup.start import Start, folder_from_elsewhere, resumed, weights_of
from megatron_llama.train.setup.weight_check import begin_weight_check
from megatron_llama.tune.preference.align_config import AlignConfig
from megatron_llama.tune.preference.digest import model_digest
from megatron_llama.tune.preference.objective import completion_logps
from megatron_llama.tune.preference.reference import (
    REFERENCE,
    SHOWN,
    ReferencedSamples,
    Scored,
    Scores,
    read_scores,
    reference_scores,
    write_scores,
)

FLAG = "--reference-scores"


@dataclass(frozen=True)
class Reference:
    """The model with which a run is compared."""

    digest: str
    """The digest of its weights and of their use (``model_digest``)."""
    resumed: bool
    """Whether the run goes on from its checkpoint, which has the digest but not these weights."""


def reference_of(config: Config, start: Start | None, world: Axis) -> Reference:
    """Identify the reference of a run from ``start``. A run that begins with it reads it once; a
    resumed run has its digest from the checkpoint. Collective. Raises CheckpointError, on every
    rank, if the weights cannot be read or the checkpoint has no reference."""
    meta = resumed(config.checkpoint, start)
    if meta is None:
        with raise_on_all_ranks(world):
            source = first_weights(config, start)
        with begin_weight_check(folder_from_elsewhere(config.checkpoint, start), world) as check:
            digest = digest_of(config, source, world)
            # Later steps and runs are compared with this digest.
            check.require()
        return Reference(digest, resumed=False)
    known = (meta.state.data or {}).get(REFERENCE)
    if known is None:
        raise CheckpointError(
            f"--load {meta.folder}",
            got="a run that was compared with no reference",
            expected="one of the same method",
            do="give --finetune to begin anew with its weights as the reference",
        )
    return Reference(str(known), resumed=True)


def first_weights(config: Config, start: Start | None) -> WeightSource:
    """Open the first weights of a run, without low-rank additions that it takes up. Raises
    CheckpointError."""
    if start is not None and start.native and resumes(config, start):
        return native.open_weights(start.path).stored
    if start is not None:
        return start.weights(config.model)
    if config.checkpoint.init_from_hf is not None:
        return _hf_weights(config, config.checkpoint.init_from_hf)
    return InitialWeights.of(config)


def _hf_weights(config: Config, folder: str) -> WeightSource:
    weights = hf_weights(folder, ignored=config.checkpoint.ignore_hf_config_fields)
    return weights_of(weights, config.model, config.training.seed)


def digest_of(config: Config, source: WeightSource, world: Axis) -> str:
    """Return the digest of the weights as the model of this run. Collective."""
    # Other runs compute with at most fp32.
    dtype = torch.float64 if config.training.fp64 else torch.float32
    return model_digest(source, config.model, model_fields(config.model), world, dtype=dtype)


def model_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of a model that change what its weights compute, for JSON, without those
    that are off: a new field of a later version does not change the digest of models without it."""
    fields = asdict(replace(model, rope_scaling=normal_rope(model.rope_scaling)))
    ignored = without_effect(model, model)
    return {name: value for name, value in fields.items() if value and name not in ignored}


def with_references(
    inputs: Ready,
    reference: Reference,
    options: AlignConfig,
    mesh: Mesh,
    *,
    template: str,
    train_file: Path,
    valid_file: Path | None = None,
) -> Ready:
    """Return the inputs of a run with the reference's scores of all samples, which are
    ``ReferencedSamples``: read from their files, or else computed with the first weights of the
    run, and written. ``template`` identifies chat template and tokenizer; the files of scores lie
    beside the first file of the samples, unless --reference-scores says otherwise. Rank 0 prints
    the progress. Collective. Raises UserError, the same on every rank."""
    opened = open_scores(
        inputs,
        reference,
        options,
        mesh.world,
        template=template,
        train_file=train_file,
        valid_file=valid_file,
    )
    by_part = dict(opened.samples)
    for part, path in opened.read.items():
        _say(mesh, f"reference scores of {part}: {path}")
    if opened.weights is not None:
        config = inputs.config
        samples = len(inputs.training)
        with reference_runtime(config, mesh, opened.weights, samples=samples) as runtime:
            for part, (path, scored) in opened.missing.items():
                scores = _computed(config, runtime, by_part[part], part, mesh)
                on_rank0(partial(_write, path, scored, scores), mesh.world)
                _say(mesh, f"reference scores of {part}: written to {path}")
                by_part[part] = by_part[part].with_scores(scores)
        # The engine's hooks and handles are cycles, which would keep its memory until they are
        # collected.
        del runtime
        gc.collect()
    return replace(inputs, training=by_part["training"], validation=by_part.get("validation"))


@dataclass(frozen=True)
class OpenedScores:
    """The existing scores of a run's reference. All by part, training or validation."""

    samples: Mapping[str, ReferencedSamples]
    """The samples with the existing scores."""
    read: Mapping[str, Path]
    missing: Mapping[str, tuple[Path, Scored]]
    """The scores to compute, with their files."""
    weights: WeightSource | None
    """The weights for that; None if nothing is missing."""


def open_scores(
    inputs: Ready,
    reference: Reference,
    options: AlignConfig,
    world: Axis,
    *,
    template: str,
    train_file: Path,
    valid_file: Path | None = None,
) -> OpenedScores:
    """Read the existing scores, and open the weights for missing ones: all refusals of
    ``with_references`` come here, before anything is computed. Collective. Raises UserError, the
    same on every rank."""
    _refuse_url(options)
    by_part = dict[str, ReferencedSamples]()
    read = dict[str, Path]()
    missing = dict[str, tuple[Path, Scored]]()
    parts = {"training": (inputs.training, train_file)}
    if inputs.validation is not None:
        parts["validation"] = (inputs.validation, valid_file or train_file)
    for part, (samples, file) in parts.items():
        assert isinstance(samples, ReferencedSamples)
        scored = Scored.of(samples, template=template, dtype=compute_dtype(inputs.config))
        path = scores_path(options, scored, file, part)
        scores = on_rank0(partial(_read, path, scored), world)
        if scores is None:
            missing[part] = path, scored
            by_part[part] = samples
        else:
            read[part] = path
            by_part[part] = samples.with_scores(scores)
    weights = None
    if missing:
        with raise_on_all_ranks(world):
            for path, _ in missing.values():
                if world.rank == 0:
                    require_writable(path.parent)
        weights = _weights(inputs, reference, missing, world)
    return OpenedScores(by_part, read, missing, weights)


def scores_path(options: AlignConfig, scored: Scored, file: Path, part: str) -> Path:
    """Return the file of the scores of the training or validation samples, whose first file is
    ``file``."""
    if options.reference_scores is None:
        return scored.path_beside(file)
    path = Path(options.reference_scores)
    return path if part == "training" else path.with_name(f"{path.stem}.{part}{path.suffix}")


def _refuse_url(options: AlignConfig) -> None:
    if options.reference_scores is not None and "://" in options.reference_scores:
        raise ConfigError(
            f"{FLAG} {options.reference_scores}",
            got="a URL",
            expected="a path: scores are small and are read at every start",
            do="give a file on a disk",
        )


def _read(path: Path, scored: Scored) -> Scores | None:
    return read_scores(path, scored) if path.exists() else None


def _write(path: Path, scored: Scored, scores: Scores) -> None:
    with writing(path):
        write_scores(path, scored, scores)


def _say(mesh: Mesh, line: str) -> None:
    if mesh.rank == 0:
        print(f" {line}", flush=True)


def _weights(
    inputs: Ready, reference: Reference, missing: Mapping[str, tuple[Path, Scored]], world: Axis
) -> WeightSource:
    """Open the reference's weights. A resumed run has them only if --init-from-hf still names its
    first folder. Collective. Raises DataError otherwise."""
    config = inputs.config
    if not reference.resumed:
        with raise_on_all_ranks(world):
            return first_weights(config, inputs.start)
    folder = config.checkpoint.init_from_hf
    mismatch = ""
    if folder is not None:
        with raise_on_all_ranks(world):
            weights = _hf_weights(config, folder)
        digest = digest_of(config, weights, world)
        if digest == reference.digest:
            return weights
        mismatch = f" ({folder} has other weights: {digest[:SHOWN]})"
    raise DataError(
        ", ".join(str(path) for path, _ in missing.values()),
        got=f"no such file{mismatch}",
        expected=f"the scores of the reference {reference.digest[:SHOWN]}, with which "
        "the checkpoint's run began",
        do="restore the file, or compute it with --only-reference-scores, the options of that run "
        "and the weights that it began with (--init-from-hf or --load, without its checkpoints)",
    )


@contextmanager
def reference_runtime(
    config: Config, mesh: Mesh, weights: WeightSource, *, samples: int
) -> Iterator[PipelineRuntime]:
    """Yield the run's own model and engine with these weights, its low-rank additions off. The
    section takes the memory of a run and gives it back. ``samples``: the number for the run's
    training. Collective. Raises UserError."""
    stages = build_stages(config, mesh)
    steps_per_epoch = -(-samples // config.training.global_batch_size)
    optimizer = build_optimizer(config, stages.values(), mesh, steps_per_epoch=steps_per_epoch)
    with closing(optimizer), additions_off(stages.values()):
        runtime = PipelineRuntime(stages, optimizer, mesh, config, dtype=compute_dtype(config))
        with mesh.recorder.outside_steps("loading the reference's weights"):
            optimizer.load_weights(WithAdapters(weights, config.training.seed))
        yield runtime
        optimizer.settle()


def _computed(
    config: Config, runtime: PipelineRuntime, samples: ReferencedSamples, part: str, mesh: Mesh
) -> Scores:
    training = config.training
    unit = training.micro_batch_size * mesh.data_size
    return reference_scores(
        partial(completion_logps, runtime),
        samples.samples,
        mesh,
        micro_batch_size=training.micro_batch_size,
        microbatches=max(1, training.global_batch_size // unit),
        say=lambda line: _say(mesh, f"{part}: {line}"),
    )
