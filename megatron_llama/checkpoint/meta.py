"""``meta.json``: what a checkpoint holds besides tensors, and whether it belongs to the model at
hand."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_llama.checkpoint.history import NO_HISTORY, History, read_history
from megatron_llama.config.hf import hf_config_from_model, model_config_from_hf, normal_rope
from megatron_llama.config.parse import flag
from megatron_llama.config.schema import MODEL_SHAPE, Config, ModelConfig
from megatron_llama.errors import CheckpointError, describe

META = "meta.json"
FORMAT_VERSION = 1
WITHOUT_EFFECT = frozenset(
    {
        "preset",
        "make_vocab_size_divisible_by",
        "max_position_embeddings",
        "initializer_range",
        "bos_token_id",
        "eos_token_id",
    }
)
"""Model fields that change nothing in what the trained weights compute: a run may resume with other
ones."""
EPSILON = "rms_norm_eps"
"""May be another one, with a warning: launch scripts of Megatron-LLaMA give LLaMA 2 that of LLaMA
1."""
ANOTHER_COPY = "restore the file from a copy, or load an earlier checkpoint"


@dataclass(frozen=True)
class TrainState:
    """Where a run is. The order of the data and everything drawn at random follow from this and the
    seed."""

    iteration: int
    """Optimizer steps taken, skipped ones included."""
    consumed_samples: int
    """Those that bad steps left out included."""
    history: History = NO_HISTORY
    data: Mapping[str, Any] | None = None
    """What the training samples say of themselves (``Samples.identity``). None: not known."""


@dataclass(frozen=True)
class CheckpointMeta:
    """The content of ``meta.json``."""

    folder: Path
    """The checkpoint itself, ``iter_...``."""
    state: TrainState
    optimizer_step: int
    """The update rule's counter: iterations that were not skipped."""
    loss_scale: list[float]
    """Scale, steps without overflow, overflows in a row; 1, 0, 0 without --fp16."""
    model: ModelConfig
    seed: int
    tokenizer_model: str | None
    torch_version: str
    config: dict[str, Any]
    """The whole configuration of the run that saved it, section by section."""


def meta_json(
    state: TrainState,
    optimizer_step: int,
    loss_scale: list[float],
    config: Config,
    validation_loss: float | None = None,
) -> bytes:
    """The file's content. ``config``: derived model fields filled in. ``validation_loss``: of this
    very iteration."""
    content = {
        "format_version": FORMAT_VERSION,
        "iteration": state.iteration,
        "consumed_samples": state.consumed_samples,
        "history": state.history.entry(),
        "training_data": state.data,
        "optimizer_step": optimizer_step,
        "loss_scale": loss_scale,
        "validation_loss": validation_loss,
        "seed": config.training.seed,
        "tokenizer_model": config.data.tokenizer_model,
        "torch_version": torch.__version__,
        "model": hf_config_from_model(config.model, dtype="float32"),
        "config": dataclasses.asdict(config),
    }
    return (json.dumps(content, indent=2) + "\n").encode()


def parse_meta(folder: Path) -> CheckpointMeta:
    """Read ``meta.json`` of one checkpoint. Raises CheckpointError naming the file."""
    path = folder / META
    content = _read_object(path)
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        do = "load it with the version of this program that saved it, and export it to HuggingFace format"
        raise CheckpointError(f"{path} format_version", got=version, expected=FORMAT_VERSION, do=do)
    try:
        return CheckpointMeta(
            folder=folder,
            state=_state(content),
            optimizer_step=int(content["optimizer_step"]),
            loss_scale=[float(number) for number in content["loss_scale"]],
            model=model_config_from_hf(content["model"], where=f"{path} model"),
            seed=int(content["seed"]),
            tokenizer_model=content["tokenizer_model"],
            torch_version=str(content["torch_version"]),
            config=dict(content["config"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        got = (
            f"no field {error}"
            if isinstance(error, KeyError)
            else f"a field that cannot be read ({error})"
        )
        raise CheckpointError(
            path, got=got, expected="the fields that saving writes", do=ANOTHER_COPY
        ) from error


def _state(content: dict[str, Any]) -> TrainState:
    history = (
        read_history(content["history"]) if "history" in content else NO_HISTORY
    )  # older files have none
    data = content.get("training_data")  # nor this
    return TrainState(
        int(content["iteration"]),
        int(content["consumed_samples"]),
        history,
        None if data is None else dict(data),
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            path, got=error.strerror, expected="a readable file", do=ANOTHER_COPY
        ) from error
    except ValueError as error:
        raise CheckpointError(path, got=error, expected="valid JSON", do=ANOTHER_COPY) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            path, got=type(content).__name__, expected="a JSON object", do=ANOTHER_COPY
        )
    return content


def model_differences(
    where: str, saved: ModelConfig, model: ModelConfig, *, resumes: bool = True
) -> list[str]:
    """Every field in which saved weights compute something else than ``model``, epsilon apart.
    ``where`` names them, for messages.

    ``resumes``: the run goes on with its optimizer. A new one that begins with the weights may have
    other positions too."""
    problems = []
    names = [
        field.name
        for field in dataclasses.fields(ModelConfig)
        if field.name not in (*WITHOUT_EFFECT, EPSILON)
    ]
    for name in names if resumes else MODEL_SHAPE:
        found = getattr(saved, name)
        expected = getattr(model, name)
        if name == "rope_scaling":
            expected = normal_rope(expected)
        if found != expected:
            do = "take the model fields from the checkpoint, or load another one"
            problems.append(describe(f"{where} {name}", got=found, expected=expected, do=do))
    return problems


def model_changes(where: str, saved: ModelConfig, model: ModelConfig) -> list[str]:
    """What a run may change in what its loaded weights compute, one warning each."""
    changes = []
    for name in (EPSILON, "rope_theta", "rope_scaling"):
        before = getattr(saved, name)
        now = getattr(model, name)
        if before != (normal_rope(now) if name == "rope_scaling" else now):
            changes.append(f"{flag(name)} {now}: the weights of {where} were trained with {before}")
    return changes
