"""HuggingFace ``config.json`` <-> ``ModelConfig``, in the spelling of transformers 4 and of
transformers 5.

transformers 4: ``rope_theta``, ``rope_scaling`` (``rope_type``, earlier ``type``), ``torch_dtype``.
transformers 5: ``rope_parameters`` (rope_type, rope_theta, factor, ...), ``dtype``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_llama.config.fields import shown
from megatron_llama.config.json_file import read_json_object
from megatron_llama.config.limits import LARGEST_LAYERS
from megatron_llama.config.schema import ModelConfig
from megatron_llama.errors import CheckpointError, listing
from megatron_llama.model.families import FAMILIES
from megatron_llama.model.families.family import Family
from megatron_llama.model.families.reader import COPY, ConfigReader
from megatron_llama.model.hf_fields import field_problems
from megatron_llama.model.rope import ORIGINAL, ROPE_FIELDS, normal_rope, rope_problems
from megatron_llama.model.windows import FULL, SLIDING


def read_hf_config(folder: str | Path, *, ignored: Collection[str] = ()) -> ModelConfig:
    """Return the model of a HuggingFace folder, as ``model_config_from_hf`` reads it. Raises
    CheckpointError when ``config.json`` is missing, damaged or of no known family."""
    path = Path(folder) / "config.json"
    return model_config_from_hf(read_config_json(path), where=str(path), ignored=ignored)


def read_config_json(path: str | Path) -> dict[str, Any]:
    """Read a ``config.json``, of a LLaMA 4 that also sees pictures the part of its text model.
    Raises CheckpointError when it is missing or damaged."""
    if not Path(path).is_file():
        do = "give a HuggingFace folder (config.json, *.safetensors)"
        raise CheckpointError(
            path, got="No such file or directory", expected="a readable file", do=do
        )
    content = read_json_object(path)
    if content.get("model_type") != "llama4":
        return content
    from megatron_llama.model.families.llama4 import text_fields  # which few folders need

    return text_fields(content, str(path))


ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_pytorch_tanh"}
)
"""Activations of the gated MLP: transformers' names -> ours."""
_UNUSABLE = "{} is no model that can be used here:"
ADAPTED = ("llama3", "yarn", "longrope")
"""Rotary scalings that have the length of the first training."""


def model_config_from_hf(
    config_json: Mapping[str, Any], *, where: str, ignored: Collection[str] = ()
) -> ModelConfig:
    """Return the model fields of a ``config.json``. ``where`` is its path, for messages.

    Absent fields have the defaults of the family in transformers. Sizes have none and must be
    there. The first of several end-of-sequence tokens counts. Raises CheckpointError with every
    field that is wrong or not implemented, and with those that are not known to be harmless, unless
    their names are ``ignored``.
    """
    family = FAMILIES.get(str(config_json.get("model_type", "llama")), FAMILIES["llama"])
    reader = ConfigReader(config_json, where, family.defaults)
    _refuse_other_families(reader, family)
    _refuse_other_architectures(reader, family)
    hidden = reader.size("hidden_size")
    heads = reader.size("num_attention_heads")
    given = reader.size("head_dim", default=0)
    head_dim = given or (hidden // heads if heads else 0)
    if not given and heads and hidden % heads:
        expected = f"a multiple of num_attention_heads {heads}"
        reader.problem("hidden_size", hidden, expected, "or give head_dim")
    elif head_dim % 2:
        do = "rotary embeddings turn pairs: such models are not supported"
        reader.problem("head_dim", head_dim, "an even number", do)
    groups = reader.size("num_key_value_heads", default=heads)
    if groups and heads % groups:
        expected = f"a divisor of num_attention_heads {heads}"
        reader.problem("num_key_value_heads", groups, expected, COPY)
    model = ModelConfig(
        model_type=family.model_type,
        vocab_size=reader.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=reader.size("intermediate_size"),
        num_hidden_layers=reader.size("num_hidden_layers", high=LARGEST_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        max_position_embeddings=reader.size("max_position_embeddings", default=2048),
        rms_norm_eps=reader.positive("rms_norm_eps", reader.value("rms_norm_eps", 1e-6)),
        tie_word_embeddings=reader.switch("tie_word_embeddings"),
        initializer_range=reader.positive(
            "initializer_range", reader.value("initializer_range", 0.02), zero=True
        ),
        hidden_act=_activation(reader, family.spelling.get("hidden_act", "hidden_act")),
        bos_token_id=reader.token("bos_token_id"),
        eos_token_id=reader.token("eos_token_id"),
        num_labels=_labels(reader, family),
    )
    model = replace(model, pad_token_id=_padding_token(reader, model))
    window, types = family.windows.read(reader)
    rope = _rope_fields(reader, family, model)
    model = replace(
        model,
        **{name: _own_field(reader, family, name) for name in family.fields if name not in rope},
        **rope,
        **{
            "sliding_window": window,
            "layer_types": types,
            **(family.experts.read(reader, model) if family.experts else {}),
        },
    )
    problems = [
        *reader.problems,
        *field_problems(
            config_json,
            ignored,
            where=where,
            read=frozenset(reader.seen),
            neutral=family.neutral,
            architecture=_class_of(model, family),
        ),
    ]
    if problems:
        raise CheckpointError(listing(_UNUSABLE.format(where), problems))
    return replace(model, **family.constants(model))


def hf_config_from_model(model: ModelConfig, *, dtype: str) -> dict[str, Any]:
    """Return a ``config.json`` for the family's class that transformers 4 and 5 read alike.

    ``model``: every derived field filled in. ``dtype``: name of the saved weights' dtype, such as
    ``bfloat16``. Fields that the family cannot hold (``unheld_fields``) are lost.
    """
    family = FAMILIES[model.model_type]
    sizes = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    numbers = {
        name: getattr(model, name) for name in (*sizes, "head_dim", "max_position_embeddings")
    }
    assert all(numbers.values()), f"derived fields are not filled in: {numbers}"
    return {
        "architectures": [_class_of(model, family)],
        "model_type": model.model_type,
        **numbers,
        family.spelling.get("hidden_act", "hidden_act"): model.hidden_act,
        "rms_norm_eps": model.rms_norm_eps,
        **_written_rope(model, family),
        "tie_word_embeddings": model.tie_word_embeddings,
        "initializer_range": model.initializer_range,
        "attention_dropout": 0.0,
        **{name: _written_field(family, name, getattr(model, name)) for name in family.fields},
        **family.windows.write(model),
        **(family.experts.write(model) if family.experts else {}),
        "bos_token_id": model.bos_token_id,
        "eos_token_id": model.eos_token_id,
        # Null is written too: without the field some classes use their own default token.
        "pad_token_id": model.pad_token_id,
        **_written_labels(model),
        "use_cache": True,
        "torch_dtype": dtype,
        "dtype": dtype,
    }


TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
WRITTEN_ANEW = ("architectures", "model_type", "torch_dtype", "dtype", "auto_map")
"""Fields whose values a written file does not take over. The code that auto_map names is not
copied."""


def carried_config(
    model: ModelConfig, hf_config: Mapping[str, Any], *, dtype: str
) -> dict[str, Any]:
    """Return a ``config.json`` for the model, as ``hf_config_from_model`` makes it, with those
    fields of ``hf_config``, the model's original file, that do not contradict it: end tokens in a
    list, ids and notes that are no numbers of the model, an older spelling."""
    family = FAMILIES[model.model_type]
    kinds = {name: values[0] for name, values in family.neutral.items() if values}
    written = hf_config_from_model(model, dtype=dtype)
    meant = model_config_from_hf(written, where="config.json")
    for name in TOKEN_IDS if hf_config else ():
        without = {key: value for key, value in written.items() if key != name}
        if name not in hf_config and model_config_from_hf(without, where="config.json") == meant:
            written = without
    for name, value in hf_config.items():
        if name in WRITTEN_ANEW or (name in written and written[name] == value):
            continue
        if name not in TOKEN_IDS:
            # transformers 5 checks kinds: a folder with 4 or null for a switch does not load there.
            value = _as_kind(value, written.get(name), {**kinds, **family.defaults}.get(name))
        changed = {**written, name: value}
        with suppress(CheckpointError):
            if model_config_from_hf(changed, where="config.json") == meant:
                written = changed
    return written


def _as_kind(value: Any, written: Any, default: Any) -> Any:
    """Return a value in the kind of what is written for its field, or of the default of the class
    in transformers, which means the same. Null stays where nothing says that the class has another
    default."""
    if value is None and default is None and not isinstance(written, bool):
        return None
    other = default if written is None else written
    if other is None or type(value) is type(other):
        return value
    return float(value) if type(other) is float and type(value) is int else other


def _written_labels(model: ModelConfig) -> dict[str, Any]:
    """Return the fields that say that a model has a score. transformers counts the names of the
    labels, and reads the kind of the problem only to compute a loss."""
    if not model.num_labels:
        return {}
    names = {str(number): f"LABEL_{number}" for number in range(model.num_labels)}
    return {
        "num_labels": model.num_labels,
        "id2label": names,
        "label2id": {name: int(number) for number, name in names.items()},
    }


def _class_of(model: ModelConfig, family: Family) -> str:
    """Return the class in transformers of a model of the family."""
    return family.classifier if model.num_labels else family.architecture


def _written_field(family: Family, name: str, value: Any) -> Any:
    if name in family.optional and not value:
        return None
    return int(value) if name in family.integers else value


LISTED: Mapping[str, int] = MappingProxyType({"num_labels": 1, "num_hidden_layers": LARGEST_LAYERS})
"""Fields that count items that a ``config.json`` may list, and the most items of each."""


def unlistable_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the fields that count more items than a ``config.json`` may list, with their limits:
    no file is written for such a model, since it would not fit into memory."""
    return {
        name: f"at most {most:,}" for name, most in LISTED.items() if getattr(model, name) > most
    }


def unheld_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the fields that a ``config.json`` of the model's family cannot hold, with the values
    that it implies. Every derived field of ``model`` is filled in."""
    if beyond := unlistable_fields(model):
        return beyond
    family = FAMILIES[model.model_type]
    names = [*family.fields, *(family.experts.names if family.experts else ())]
    needed = {name: getattr(model, name) for name in names if name not in family.optional}
    missing = [name for name, value in needed.items() if value is not False and value == 0]
    if missing:
        return dict.fromkeys(missing, "a positive number")
    written = hf_config_from_model(model, dtype="float32")
    back = model_config_from_hf(written, where="config.json")
    return {
        field.name: getattr(back, field.name)
        for field in fields(ModelConfig)
        if getattr(back, field.name) != getattr(model, field.name)
        and field.name not in ("preset", "make_vocab_size_divisible_by")
    }


def _refuse_other_families(reader: ConfigReader, family: Family) -> None:
    """Raise CheckpointError for an unknown model_type. The meaning of such a model's fields is
    unknown too, so it reports nothing more about them."""
    kind = reader.value("model_type", family.model_type)
    if kind == family.model_type:
        return
    do = "only models of these families can be read"
    if kind == "gemma3":
        do = "save its text model alone, with Gemma3ForCausalLM"
    wanted = " or ".join(repr(name) for name in FAMILIES)
    reader.problem("model_type", repr(kind), wanted, do)
    raise CheckpointError(listing(_UNUSABLE.format(reader.where), reader.problems))


def _refuse_other_architectures(reader: ConfigReader, family: Family) -> None:
    names = reader.value("architectures", None) or [family.architecture]
    known = [name for name in (family.architecture, family.classifier) if name]
    # Conversions of early 2023 write LLaMAForCausalLM.
    if not isinstance(names, list) or [str(name).lower() for name in names] not in [
        [name.lower()] for name in known
    ]:
        wanted = " or ".join(f"['{name}']" for name in known)
        do = "only causal language models and reward models can be read"
        reader.problem("architectures", names, wanted, do)


def _labels(reader: ConfigReader, family: Family) -> int:
    """Return the scores of a reward model; 0 for a language model, whatever labels its file
    names."""
    names = reader.content.get("architectures") or [family.architecture]
    if not isinstance(names, list) or [str(name) for name in names] != [family.classifier]:
        return 0
    labels = reader.content.get("id2label")
    counts = [len(labels)] if isinstance(labels, Mapping) else []
    given = reader.content.get("num_labels")
    # transformers' own default is two labels.
    counts = [*counts, *([] if given is None else [given])] or [2]
    for count in counts:
        if isinstance(count, bool) or count != 1:
            name = "id2label" if labels is not None else "num_labels"
            do = "only models with one score, reward models, can be read"
            reader.problem(name, f"{shown(count)} labels", "1 label", do)
    return 1


def _padding_token(reader: ConfigReader, model: ModelConfig) -> int | None:
    """Return the padding token: lookups do not train its row, and in a reward model it decides
    where the score is read. A class's own default counts if the model has that token."""
    token = reader.token("pad_token_id")
    if "pad_token_id" not in reader.content and token is not None and token >= model.vocab_size:
        return None
    return token


def padding_token(model: ModelConfig) -> int | None:
    """Return the padding token with which a language model becomes a reward model: its own, unless
    it is no token of the model, or ends texts, whose score would then be read one token early."""
    token = model.pad_token_id
    if token is None or token == model.eos_token_id:
        return None
    return token if 0 <= token < model.vocab_size else None


def _activation(reader: ConfigReader, name: str) -> str:
    value = reader.value(name, None) or reader.default(name, "silu")
    if not isinstance(value, str) or value not in ACTIVATIONS:
        wanted = " or ".join(repr(known) for known in ACTIVATIONS)
        reader.problem(name, repr(value), wanted, "such models are not supported")
        return "silu"
    return ACTIVATIONS[value]


def _own_field(reader: ConfigReader, family: Family, name: str) -> Any:
    """Return the value of one of a family's own fields, by the type of ModelConfig's default."""
    default = getattr(ModelConfig(), name)
    if isinstance(default, bool):
        return reader.switch(name)
    value = reader.value(name, default or None)
    if value is None and name in family.optional:
        return default
    return reader.positive(name, value)


def _rope_fields(reader: ConfigReader, family: Family, model: ModelConfig) -> dict[str, Any]:
    """Return the rotary embedding: rope_theta, rope_scaling, and, if the family has them, the share
    of a head and the base of layers with a window. A file that carries both spellings, as ours do,
    must say the same in both."""
    local = "rope_local_base_freq" in family.fields
    partial = "partial_rotary_factor" in family.fields
    embeddings = []
    present = [
        name for name in ("rope_parameters", "rope_scaling") if reader.value(name, None) is not None
    ]
    for name in present:
        raw = reader.content[name]
        if local and name == "rope_parameters":
            raw = _of_full_layers(reader, raw)
        embeddings.append(_rope(reader, family, model, name, raw))
    embeddings = embeddings or [_rope(reader, family, model, "rope_scaling", {})]
    if any(embedding != embeddings[0] for embedding in embeddings):
        reader.problem(
            " and ".join(present),
            " against ".join(str(tuple(embedding.values())) for embedding in embeddings),
            "the same rotary embedding",
            "remove the wrong one",
        )
    fields = embeddings[0]
    if not partial:
        fields.pop("partial_rotary_factor")
    if local:
        fields["rope_local_base_freq"] = _local_base(reader)
    return fields


def _of_full_layers(reader: ConfigReader, raw: Any) -> Any:
    """Return the rope_parameters of layers without a window."""
    if not isinstance(raw, Mapping) or set(raw) != {FULL, SLIDING}:
        expected = f"a mapping with {FULL} and {SLIDING}"
        reader.problem("rope_parameters", raw, expected, COPY)
        return {}
    return raw[FULL] or {}


def _local_base(reader: ConfigReader) -> float:
    """Return the base of layers with a window."""
    outer = reader.value("rope_local_base_freq", None)
    both = reader.content.get("rope_parameters")
    raw = both.get(SLIDING) if isinstance(both, Mapping) else None
    fields = dict(raw) if isinstance(raw, Mapping) else {}
    inner = fields.pop("rope_theta", None)
    name = f"rope_parameters.{SLIDING}"
    if fields.pop("rope_type", "default") != "default" or fields:
        reader.problem(name, raw, "rope_theta alone", "scaled windows are not supported")
    given = reader.content.get("rope_local_base_freq")
    if inner is not None and given is not None and inner != given:
        reader.problem(f"{name}.rope_theta", inner, f"rope_local_base_freq {given}", "remove one")
    return reader.positive("rope_local_base_freq", outer if inner is None else inner)


def _rope(
    reader: ConfigReader, family: Family, model: ModelConfig, name: str, raw: Any
) -> dict[str, Any]:
    """Return rope_theta, rope_scaling and partial_rotary_factor from the field ``name`` and from
    those outside of it."""
    fields = dict(raw) if isinstance(raw, Mapping) else raw
    outer = {key: reader.content.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    # A class that has this field also has a default for it.
    outer[ORIGINAL] = reader.content.get(ORIGINAL, family.defaults.get(ORIGINAL))
    inner: dict[str, Any] = {}
    reader.seen.update(("rope_theta", "partial_rotary_factor"))
    if isinstance(fields, dict):
        inner = {key: fields.pop(key, None) for key in ("rope_theta", "partial_rotary_factor")}
        older = fields.pop("type", "default")
        kind = fields.get("rope_type", older)
        if isinstance(kind, str):
            kind = family.rope_aliases.get(kind, kind)
        fields["rope_type"] = kind
        if kind in ADAPTED:
            inner[ORIGINAL] = fields.get(ORIGINAL)
            reader.seen.add(ORIGINAL)
            given = [value for value in (outer[ORIGINAL], inner[ORIGINAL]) if value is not None]
            original = [*given, model.max_position_embeddings if kind != "llama3" else None][0]
            if original is not None:
                fields[ORIGINAL] = original
        if isinstance(kind, str) and kind in ROPE_FIELDS and kind not in family.rope_types:
            expected = f"one of {', '.join(family.rope_types)}"
            do = f"{family.architecture} has no other"
            reader.problem(f"{name}.rope_type", repr(kind), expected, do)
    if ORIGINAL in family.defaults:
        reader.seen.add(ORIGINAL)
    values = {}
    for key, default in (
        ("rope_theta", family.defaults.get("rope_theta", 10000.0)),
        ("partial_rotary_factor", 1.0),
        (ORIGINAL, None),
    ):
        given = [value for value in (inner.get(key), outer[key]) if value is not None]
        if len(given) == 2 and given[0] != given[1]:
            expected = f"{key} {outer[key]}"
            reader.problem(f"{name}.{key}", inner[key], expected, "remove the wrong key")
        values[key] = given[0] if given else default
    share = reader.positive(f"{name}.partial_rotary_factor", values["partial_rotary_factor"])
    if share != 1.0 and "partial_rotary_factor" not in family.fields:
        do = f"{family.architecture} rotates whole heads"
        reader.problem("partial_rotary_factor", share, "1.0", do)
    rotated = int(model.head_dim * share)
    fits = rotated % 2 == 0 and 0 < rotated <= model.head_dim
    if not fits and model.head_dim > 0 and model.head_dim % 2 == 0:
        got = f"{share}, {rotated} dims"
        expected = f"an even number of dims up to head_dim {model.head_dim}"
        reader.problem("partial_rotary_factor", got, expected, "such models are not supported")
    frequencies = rotated // 2
    problems = rope_problems(f"{reader.where} {name}", fields, frequencies=frequencies)
    reader.problems.extend(problems)
    return {
        "rope_theta": reader.positive(f"{name}.rope_theta", values["rope_theta"]),
        "rope_scaling": None if problems else normal_rope(fields),
        "partial_rotary_factor": share,
    }


def _written_rope(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Return the rotary embedding in both spellings."""
    scaling = normal_rope(model.rope_scaling)
    whole = {"rope_type": "default", **(scaling or {}), "rope_theta": model.rope_theta}
    written: dict[str, Any] = {"rope_theta": model.rope_theta, "rope_scaling": scaling}
    if "partial_rotary_factor" in family.fields:
        whole["partial_rotary_factor"] = model.partial_rotary_factor
    if scaling is not None and scaling["rope_type"] == "longrope":
        # transformers 4 has this length outside, and Phi-3 accepts no further fields within.
        written[ORIGINAL] = scaling[ORIGINAL]
        outside = (ORIGINAL, "rope_type") if ORIGINAL in family.defaults else ()
        within = {name: value for name, value in scaling.items() if name not in outside}
        written["rope_scaling"] = within | ({"type": "longrope"} if outside else {})
    if "rope_local_base_freq" not in family.fields:
        return {**written, "rope_parameters": whole}
    local = {"rope_type": "default", "rope_theta": model.rope_local_base_freq}
    return {**written, "rope_parameters": {FULL: whole, SLIDING: local}}
