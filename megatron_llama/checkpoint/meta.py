"""``meta.json``: what a checkpoint holds besides tensors. Here it is written, read, and compared
with the model of a run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_llama.checkpoint.finite import NotFinite, read_not_finite
from megatron_llama.checkpoint.history import NO_HISTORY, History, read_history
from megatron_llama.config.hf import TOKEN_IDS, hf_config_from_model, model_config_from_hf
from megatron_llama.config.parse import flag
from megatron_llama.config.rope import normal_rope, reads_max_positions
from megatron_llama.config.schema import MODEL_SHAPE, Config, ModelConfig
from megatron_llama.errors import CheckpointError, describe

META = "meta.json"
NOT_FINITE = "not_finite"
"""The field with the tensors of which some values are infinite or NaN. Without it all are finite,
or the checkpoint was saved by an earlier version, which did not look."""
FORMAT_VERSION = 1
WITHOUT_EFFECT = frozenset(
    {
        "preset",
        "make_vocab_size_divisible_by",
        "max_position_embeddings",
        "initializer_range",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    }
)
"""Model fields that do not change what the weights compute: a run may resume with others. Some
rotary scalings read max_position_embeddings."""
EPSILON = "rms_norm_eps"
"""A run may have another epsilon, with a warning: launch scripts of Megatron-LLaMA give LLaMA 2
that of LLaMA 1."""
ANOTHER_COPY = "restore the file from a copy, or load an earlier checkpoint"


@dataclass(frozen=True)
class TrainState:
    """The position of a run. The order of the data, and everything drawn at random, follow from it
    and the seed."""

    iteration: int
    """Optimizer steps taken, skipped ones included."""
    consumed_samples: int
    """Samples behind the run, those that bad steps left out included."""
    history: History = NO_HISTORY
    data: Mapping[str, Any] | None = None
    """What identifies the training samples (``Samples.identity``); None if that is not known."""
    places: Sequence[Sequence[Sequence[int]]] | None = None
    """Where each lane of each text that is streamed has come to (``TextStream.rows``); None in a
    run of counted samples."""
    hf_config: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The ``config.json`` that the model came with, which is no position; empty if there was
    none."""


@dataclass(frozen=True)
class CheckpointMeta:
    """The content of ``meta.json``."""

    folder: Path
    """The folder of the checkpoint, ``iter_...``."""
    state: TrainState
    optimizer_step: int
    """The update rule's step count: iterations that were not skipped."""
    weight_sum: float
    """The sum of the weights of all steps in schedule-free AdamW's average; 0 for others."""
    loss_scale: list[float]
    """Scale, steps without overflow, overflows in a row. It says nothing without --fp16, nor in a
    converted checkpoint: there it is 1, 0, 0."""
    model: ModelConfig
    seed: int
    tokenizer_model: str | None
    torch_version: str
    config: dict[str, Any]
    """The configuration of the run that saved it, section by section."""
    not_finite: tuple[NotFinite, ...] = ()
    """The tensors of which some values are infinite or NaN, as the save found them."""


def meta_json(
    state: TrainState,
    optimizer_step: int,
    loss_scale: list[float],
    config: Config,
    validation_loss: float | None = None,
    weight_sum: float = 0.0,
) -> bytes:
    """Return the content of the file. ``config`` has its derived model fields filled in;
    ``validation_loss`` was measured at this very iteration; ``weight_sum``: see
    ``CheckpointMeta``."""
    content = {
        "format_version": FORMAT_VERSION,
        "iteration": state.iteration,
        "consumed_samples": state.consumed_samples,
        "history": state.history.entry(),
        "training_data": state.data,
        **({} if state.places is None else {"stream_places": state.places}),
        **({"hf_config": dict(state.hf_config)} if state.hf_config else {}),
        "optimizer_step": optimizer_step,
        **({"weight_sum": weight_sum} if weight_sum else {}),
        "loss_scale": loss_scale,
        "validation_loss": validation_loss,
        "seed": config.training.seed,
        "tokenizer_model": config.data.tokenizer_model,
        "torch_version": torch.__version__,
        "model": hf_config_from_model(config.model, dtype="float32"),
        "config": dataclasses.asdict(config),
    }
    return (json.dumps(content, indent=2) + "\n").encode()


def marked_meta(content: bytes, not_finite: Sequence[NotFinite]) -> bytes:
    """Return the content of the file for a checkpoint of which some values are not finite."""
    marked = {**json.loads(content), NOT_FINITE: [entry.entry() for entry in not_finite]}
    return (json.dumps(marked, indent=2) + "\n").encode()


def parse_meta(folder: Path) -> CheckpointMeta:
    """Read ``meta.json`` of one checkpoint. Raises CheckpointError naming the file."""
    path = folder / META
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            path, got=error.strerror, expected="a readable file", do=ANOTHER_COPY
        ) from error
    except ValueError as error:
        raise CheckpointError(path, got=error, expected="valid JSON", do=ANOTHER_COPY) from error
    if not isinstance(content, dict):
        got = type(content).__name__
        raise CheckpointError(path, got=got, expected="a JSON object", do=ANOTHER_COPY)
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        do = (
            "load it with the version of this program that saved it,"
            " and export it to HuggingFace format"
        )
        raise CheckpointError(f"{path} format_version", got=version, expected=FORMAT_VERSION, do=do)
    try:
        # Older files have neither a history nor the identity of the training data.
        history = read_history(content["history"]) if "history" in content else NO_HISTORY
        data = content.get("training_data")
        return CheckpointMeta(
            folder=folder,
            state=TrainState(
                int(content["iteration"]),
                int(content["consumed_samples"]),
                history,
                None if data is None else dict(data),
                content.get("stream_places"),
                dict(content.get("hf_config") or _listed_ids(content["model"])),
            ),
            optimizer_step=int(content["optimizer_step"]),
            weight_sum=float(content.get("weight_sum", 0.0)),
            loss_scale=[float(number) for number in content["loss_scale"]],
            # Older files do not name the padding token of a language model, which had no meaning.
            model=model_config_from_hf(
                {"pad_token_id": None, **content["model"]}, where=f"{path} model"
            ),
            seed=int(content["seed"]),
            tokenizer_model=content["tokenizer_model"],
            torch_version=str(content["torch_version"]),
            config=dict(content["config"]),
            not_finite=tuple(map(read_not_finite, content.get(NOT_FINITE, ()))),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        missing = isinstance(error, KeyError)
        got = f"no field {error}" if missing else f"a field that cannot be read ({error})"
        raise CheckpointError(
            path, got=got, expected="the fields that saving writes", do=ANOTHER_COPY
        ) from error


def _listed_ids(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the token ids of which there are several. Conversions by earlier versions have them
    among the fields of the model, and nothing else of a ``config.json``."""
    return {name: hf_config[name] for name in TOKEN_IDS if isinstance(hf_config.get(name), list)}


def model_differences(
    where: str, saved: ModelConfig, model: ModelConfig, *, resumes: bool = True
) -> list[str]:
    """Return a line for each field that makes saved weights compute something else than ``model``,
    epsilon apart. ``where`` names the weights.

    A run that ``resumes`` goes on with its optimizer. One that only begins with the weights may
    have other rotary positions too, so only the shapes have to agree, and a language model may
    become a reward model, whose score is new."""
    problems = []
    fields = (field.name for field in dataclasses.fields(ModelConfig))
    ignored = without_effect(saved, model)
    names = [name for name in fields if name not in (*ignored, EPSILON)]
    for name in names if resumes else MODEL_SHAPE:
        found = getattr(saved, name)
        expected = getattr(model, name)
        if name == "rope_scaling":
            expected = normal_rope(expected)
        if name == "num_labels" and not found and not resumes:
            continue
        if found != expected:
            do = "take the model fields from the checkpoint, or load another one"
            if name == "vocab_size" and expected > found:
                do += ", or give --resize-embeddings --finetune to begin anew with more rows"
            problems.append(describe(f"{where} {name}", got=found, expected=expected, do=do))
    return problems


def model_changes(where: str, saved: ModelConfig, model: ModelConfig) -> list[str]:
    """Return a warning for each field that a run may change, and that changes what its loaded
    weights compute."""
    changes = []
    ignored = without_effect(saved, model)
    fields = (field.name for field in dataclasses.fields(ModelConfig))
    for name in (name for name in fields if name not in (*ignored, *MODEL_SHAPE)):
        before = getattr(saved, name)
        now = getattr(model, name)
        if before != (normal_rope(now) if name == "rope_scaling" else now):
            changes.append(f"{flag(name)} {now}: the weights of {where} were trained with {before}")
    return changes


def without_effect(saved: ModelConfig, model: ModelConfig) -> frozenset[str]:
    """Return the fields that may differ, since they do not change what the weights compute."""
    scaled = any(reads_max_positions(normal_rope(each.rope_scaling)) for each in (saved, model))
    return WITHOUT_EFFECT - {"max_position_embeddings"} if scaled else WITHOUT_EFFECT
