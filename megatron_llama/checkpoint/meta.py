"""``meta.json``: the content of a checkpoint besides tensors. Here it is written, read, and
compared with the model of a run."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from megatron_llama.checkpoint.bounds import largest_meta
from megatron_llama.checkpoint.checksums import ANOTHER_COPY, read_listed
from megatron_llama.checkpoint.finite import NotFinite, read_not_finite
from megatron_llama.checkpoint.folders import REPLACED
from megatron_llama.checkpoint.history import NO_HISTORY, History, read_history
from megatron_llama.config.fields import Fields, read_fields, shown
from megatron_llama.config.json_file import parse_json_object
from megatron_llama.config.limits import LARGEST_INTEGER
from megatron_llama.config.parse import flag, strip_optional
from megatron_llama.config.schema import MODEL_SHAPE, Config, ModelConfig
from megatron_llama.errors import CheckpointError, describe
from megatron_llama.model.hf import TOKEN_IDS, hf_config_from_model, model_config_from_hf
from megatron_llama.model.rope import normal_rope, reads_max_positions

META = "meta.json"
NOT_FINITE = "not_finite"
"""Field with the tensors that have infinite values or NaN: empty if all values are finite. It is
missing if no save has checked them: in checkpoints of earlier versions, and in converted ones."""
FORMAT_VERSION = 1
PARTED_VERSION = 2
"""That of checkpoints whose index is in parts, which earlier programs cannot read."""
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
"""Model fields that do not change the computation of the weights: a run may resume with others.
Some rotary scalings read max_position_embeddings."""
EPSILON = "rms_norm_eps"
"""A run may have another epsilon, with a warning: launch scripts of Megatron-LLaMA give LLaMA 2
that of LLaMA 1."""
NUMBERED = re.compile(rf"iter_([0-9]{{7,19}})(?:{re.escape(REPLACED)})?")
"""Names of checkpoints. More digits are no iteration that a run can have."""
PLACE_NUMBERS = 4
"""Number of integers in the place of a lane."""


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
    """Identity of the training samples (``Samples.identity``); None if it is not known."""
    places: Sequence[Sequence[Sequence[int]]] | None = None
    """Place of each lane of each streamed text (``TextStream.rows``); None in a run of counted
    samples."""
    hf_config: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The ``config.json`` that the model came with, which is no position; empty if there was
    none."""
    callbacks: Mapping[str, Any] = field(default_factory=dict)
    """State of the users' callbacks, by their names."""


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
    """Scale, steps without overflow, overflows in a row. Only with --fp16 does it have a meaning;
    in a converted checkpoint it is 1, 0, 0."""
    model: ModelConfig
    seed: int
    tokenizer_model: str | None
    torch_version: str
    config: dict[str, Any]
    """Configuration of the run that saved it, section by section."""
    not_finite: tuple[NotFinite, ...] | None = None
    """The tensors with infinite values or NaN, as the save found them; None if no save has
    checked."""


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
        **({"callbacks": dict(state.callbacks)} if state.callbacks else {}),
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


def read_meta_json(folder: Path, content: bytes | None = None) -> dict[str, Any]:
    """Return the content of ``meta.json`` of one checkpoint, after a comparison with its checksum.
    Its fields are not checked. Raises CheckpointError naming the file."""
    if content is None:
        content = read_listed(folder, META, largest=largest_meta)
    return parse_json_object(content, folder / META, do=ANOTHER_COPY)


def marked_meta(
    content: bytes, not_finite: Sequence[NotFinite], version: int = FORMAT_VERSION
) -> bytes:
    """Return the content of the file for a checkpoint whose values have been checked, and whose
    files are of this version of the format."""
    entries = [entry.entry() for entry in not_finite]
    marked = {**json.loads(content), "format_version": version, NOT_FINITE: entries}
    return (json.dumps(marked, indent=2) + "\n").encode()


def parse_meta(folder: Path, listed: bytes | None = None) -> CheckpointMeta:
    """Read ``meta.json`` of one checkpoint, whose bytes may have been ``listed`` (``read_listed``)
    already. Raises CheckpointError naming the file, with all invalid fields."""
    path = folder / META
    content = read_meta_json(folder, listed)
    version = content.get("format_version")
    if type(version) is not int or version not in (FORMAT_VERSION, PARTED_VERSION):
        do = (
            "load it with the version of this program that saved it,"
            " and export it to HuggingFace format"
        )
        expected = f"{FORMAT_VERSION} or {PARTED_VERSION}"
        raise CheckpointError(f"{path} format_version", got=version, expected=expected, do=do)
    with read_fields(content, path, do=ANOTHER_COPY) as fields:
        iteration = fields.integer("iteration")
        named = NUMBERED.fullmatch(folder.name)
        if named is not None and int(named[1]) != iteration:
            fields.problem("iteration", iteration, f"{int(named[1])}, as in the folder's name")
        scale = fields.sequence("loss_scale", float, length=3)
        if scale and (scale[0] <= 0 or min(scale) < 0):
            fields.problem("loss_scale", scale, "a scale above 0, and two counts")
        saved_model = fields.mapping("model")
        meta = CheckpointMeta(
            folder=folder,
            state=TrainState(
                iteration,
                fields.integer("consumed_samples"),
                # Older files have neither a history nor the identity of the training data.
                read_history(fields.inner("history", default=NO_HISTORY.entry())),
                fields.mapping("training_data", default=None, null=True),
                _stream_places(fields),
                fields.mapping("hf_config", default=None, null=True) or _listed_ids(saved_model),
                fields.mapping("callbacks", default=None, null=True) or {},
            ),
            optimizer_step=fields.integer("optimizer_step"),
            weight_sum=fields.number("weight_sum", low=0, default=0.0),
            loss_scale=[float(number) for number in scale],
            model=ModelConfig(),
            seed=fields.integer("seed", low=-LARGEST_INTEGER),
            tokenizer_model=fields.text("tokenizer_model", null=True),
            torch_version=fields.text("torch_version"),
            config=_sections(fields.inner("config")),
            not_finite=_not_finite(fields),
        )
    # Older files do not name the padding token of a language model, which had no meaning.
    saved_model = {"pad_token_id": None, **saved_model}
    return dataclasses.replace(meta, model=model_config_from_hf(saved_model, where=f"{path} model"))


def _not_finite(fields: Fields) -> tuple[NotFinite, ...] | None:
    """Return the tensors that the save found not finite; None if no save has checked."""
    if NOT_FINITE not in fields.content:
        return None
    entries = fields.sequence(NOT_FINITE, dict)
    try:
        return tuple(map(read_not_finite, entries))
    except (KeyError, TypeError, ValueError):
        fields.problem(NOT_FINITE, shown(entries), "name, count, first and value of each tensor")
        return ()


def _stream_places(fields: Fields) -> list[list[list[int]]] | None:
    """Return the place of each lane of each text; None in a run of counted samples."""
    name = "stream_places"
    streams: list[list[list[int]]] | None
    streams = fields.sequence(name, list, default=None, null=True)
    if streams is None:
        return None
    for lane in (lane for lanes in streams for lane in lanes):
        numbers = isinstance(lane, list) and len(lane) == PLACE_NUMBERS
        if not numbers or not all(type(n) is int and 0 <= n <= LARGEST_INTEGER for n in lane):
            expected = f"{PLACE_NUMBERS} numbers that are not negative for each lane"
            fields.problem(name, lane, expected)
            break
    return streams


def _sections(config: Fields) -> dict[str, dict[str, Any]]:
    """Return the sections of a saved configuration, with every section that this version knows.
    Fields of other versions are left as they are; the known ones have to be of their kind."""
    sections: dict[str, dict[str, Any]] = {
        name: section for name, section in config.content.items() if isinstance(section, dict)
    }
    for name, section in get_type_hints(Config).items():
        reader = config.inner(name, default={})
        kinds = get_type_hints(section)
        for option in reader.content:
            if option in kinds:
                _require_kind(reader, option, kinds[option])
        sections[name] = dict(reader.content)
    return sections


def _require_kind(fields: Fields, name: str, annotation: Any) -> None:
    """Note a problem if an option has a value that its annotation does not allow. Choices are not
    checked: other versions have others."""
    kind, null = strip_optional(annotation)
    origin = get_origin(kind)
    if origin is tuple:
        element = get_args(kind)[0]
        fields.sequence(name, str if get_origin(element) is Literal else element, null=null)
    elif origin is dict:
        fields.mapping(name, null=null)
    elif kind is bool and not (null and fields.content[name] is None):
        fields.switch(name)
    elif kind is int:
        fields.integer(name, low=-LARGEST_INTEGER, null=null)
    elif kind is float:
        fields.number(name, null=null)
    elif kind is str or origin is Literal:
        fields.text(name, null=null)


def _listed_ids(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the token ids of which there are several. Conversions by earlier versions have them
    among the fields of the model, and no other part of a ``config.json``."""
    return {name: hf_config[name] for name in TOKEN_IDS if isinstance(hf_config.get(name), list)}


def model_differences(
    where: str, saved: ModelConfig, model: ModelConfig, *, resumes: bool = True
) -> list[str]:
    """Return a line for each field, apart from epsilon, with which saved weights compute something
    else than ``model``. ``where`` names the weights.

    A run that ``resumes`` goes on with its optimizer. A run that only begins with the weights may
    have other rotary positions too, so only the shapes have to agree, and a language model may
    become a reward model, whose score is new."""
    problems = []
    fields = (field.name for field in dataclasses.fields(ModelConfig))
    ignored = without_effect(saved, model)
    names = [name for name in fields if name not in (*ignored, EPSILON)]
    for name in names if resumes else MODEL_SHAPE:
        before = getattr(saved, name)
        expected = getattr(model, name)
        if name == "rope_scaling":
            expected = normal_rope(expected)
        if name == "num_labels" and not before and not resumes:
            continue
        if before != expected:
            do = "take the model fields from the checkpoint, or load another one"
            if name == "vocab_size" and expected > before:
                do += ", or give --resize-embeddings --finetune to begin anew with more rows"
            problems.append(describe(f"{where} {name}", got=before, expected=expected, do=do))
    return problems


def model_changes(where: str, saved: ModelConfig, model: ModelConfig) -> list[str]:
    """Return a warning for each field that a run may change and that changes the computation of its
    loaded weights."""
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
    """Return the fields that may differ: they do not change the computation of the weights."""
    scaled = any(reads_max_positions(normal_rope(config.rope_scaling)) for config in (saved, model))
    return WITHOUT_EFFECT - {"max_position_embeddings"} if scaled else WITHOUT_EFFECT
