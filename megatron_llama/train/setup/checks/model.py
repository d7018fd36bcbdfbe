"""Checks of the model: its sizes and its computation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_llama.config.parse import flag
from megatron_llama.config.schema import MODEL_SIZES, Config, ModelConfig
from megatron_llama.errors import ConfigError, describe, nearest_divisors, nearest_multiples
from megatron_llama.model.families import FAMILIES
from megatron_llama.model.hf import ACTIVATIONS, unheld_fields, unlistable_fields
from megatron_llama.model.presets import PRESETS
from megatron_llama.model.rope import rope_problems
from megatron_llama.model.windows import CHUNKED, LAYER_TYPES, SLIDING


def require_language_model(model: ModelConfig, what: str) -> None:
    """Raise ConfigError if ``what`` needs an output head and the model has a score instead."""
    if model.num_labels:
        raise ConfigError(
            what,
            got="a reward model (num_labels 1), which has a score in the place of the output head",
            expected="a language model",
            do="align --method reward trains it; export and convert write it",
        )


def reward_problems(config: Config) -> Iterator[str]:
    """Yield options that need an output head, which a reward model does not have."""
    if not config.model.num_labels:
        return
    needing = (
        ("z_loss_weight", config.training.z_loss_weight, 0.0),
        ("sample_interval", config.log.sample_interval, 0),
    )
    for name, value, off in needing:
        if value != off:
            yield describe(
                flag(name),
                got=value,
                expected=f"{off}: a reward model has no logits of tokens",
                do=f"leave {flag(name)} out",
            )


def missing_model_problems(config: Config) -> Iterator[str]:
    """Yield one sentence with the missing sizes."""
    missing = [name for name in MODEL_SIZES if getattr(config.model, name) == 0]
    if (
        config.model.vocab_size == 0
        and config.data.tokenizer_model is None
        and not config.data.data_path
    ):
        missing.append("vocab_size")
    if missing:
        remedy = (
            f"give --model NAME (such as {next(iter(PRESETS))}), --init-from-hf FOLDER, or "
            f"{' '.join(map(flag, missing))}"
        )
        yield describe(
            "model", got=f"no {', '.join(missing)}", expected="the shape of a model", do=remedy
        )


def model_problems(model: ModelConfig) -> Iterator[str]:
    """Yield sizes that do not fit each other, unknown names, and values that the family cannot
    hold."""
    problems = [
        *_shape_problems(model),
        *_kind_problems(model),
        *_rotary_problems(model),
        *token_problems(model),
        *_label_problems(model),
    ]
    if model.num_experts:
        from megatron_llama.train.setup.checks.experts import routing_problems  # of few models

        problems += routing_problems(model)
    yield from problems
    # The checks of the fields report numbers out of range.
    numbers = [
        value
        for name, value in vars(model).items()
        if isinstance(value, int | float) and name != "pad_token_id"  # may count from the end
    ]
    sizes = (*MODEL_SIZES, "num_key_value_heads", "head_dim", "max_position_embeddings")
    others = ("rms_norm_eps", "rope_theta", "partial_rotary_factor", "decoder_sparse_step")
    positive = (*sizes, *others)
    in_range = min(numbers) >= 0 and min(getattr(model, name) for name in positive) > 0
    in_range = in_range and not unlistable_fields(model)
    if in_range and not problems:
        yield from _family_problems(replace(model, vocab_size=max(model.vocab_size, 1)))


def _shape_problems(model: ModelConfig) -> Iterator[str]:
    heads = model.num_attention_heads
    groups = model.num_key_value_heads
    if model.hidden_size > 0 and heads > 0 and model.head_dim == 0:
        do = "change one of them or give --head-dim"
        yield describe(
            "--hidden-size",
            got=model.hidden_size,
            expected=f"a multiple of num_attention_heads {heads}",
            do=do,
        )
    if model.head_dim > 0 and model.head_dim % 2:
        do = "rotary embeddings turn pairs: change --head-dim or --num-attention-heads"
        yield describe("--head-dim", got=model.head_dim, expected="an even number", do=do)
    if heads > 0 and groups > 0 and heads % groups:
        do = f"choose {nearest_divisors(heads, groups)}"
        yield describe(
            "--num-key-value-heads",
            got=groups,
            expected=f"a divisor of num_attention_heads {heads}",
            do=do,
        )


def _kind_problems(model: ModelConfig) -> Iterator[str]:
    """Yield unknown names."""
    for name, known in (("model_type", FAMILIES), ("hidden_act", ACTIVATIONS.values())):
        if getattr(model, name) not in known:
            expected = f"one of {', '.join(dict.fromkeys(known))}"
            do = "models of other kinds are not supported"
            yield describe(flag(name), got=getattr(model, name), expected=expected, do=do)
    strange = [kind for kind in model.layer_types if kind not in LAYER_TYPES]
    layers = model.num_hidden_layers
    if strange or (model.layer_types and layers > 0 and len(model.layer_types) != layers):
        got = " ".join(strange) or f"{len(model.layer_types)} layers"
        expected = f"{' or '.join(LAYER_TYPES)} for each of {layers} layers"
        yield describe("--layer-types", got=got, expected=expected, do="name each layer's kind")
    elif SLIDING in model.layer_types and not model.sliding_window:
        expected = "a window for the layers that slide"
        do = "give --sliding-window N"
        got = " ".join(model.layer_types)
        yield describe("--layer-types", got=got, expected=expected, do=do)
    elif model.attention_chunk_size and model.layer_types and CHUNKED not in model.layer_types:
        expected = f"{CHUNKED} for some of them, with --attention-chunk-size"
        got = " ".join(model.layer_types)
        yield describe("--layer-types", got=got, expected=expected, do="name these layers")


def _rotary_problems(model: ModelConfig) -> Iterator[str]:
    rotated = int(model.head_dim * model.partial_rotary_factor)
    # The check of the field reports a share that is not positive.
    fits = rotated % 2 == 0 and 0 < rotated <= model.head_dim
    if model.head_dim > 0 and model.partial_rotary_factor > 0 and not fits:
        do = "choose another --partial-rotary-factor"
        expected = f"an even number of dims up to head_dim {model.head_dim}"
        got = f"{model.partial_rotary_factor}, {rotated} dims"
        if model.head_dim % 2 == 0:
            yield describe("--partial-rotary-factor", got=got, expected=expected, do=do)
    if model.rope_scaling is not None:
        yield from rope_problems("rope_scaling", model.rope_scaling, frequencies=rotated // 2)


def token_problems(model: ModelConfig) -> Iterator[str]:
    """Yield special tokens outside of a vocabulary of known size."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token = getattr(model, name)
        if token is not None and token >= model.vocab_size > 0:
            do = f"give {flag(name)} of your tokenizer"
            yield describe(
                flag(name), got=token, expected=f"an id below vocab_size {model.vocab_size}", do=do
            )
    padding = model.pad_token_id
    if padding is not None and padding < -model.vocab_size < 0:
        yield describe(
            flag("pad_token_id"),
            got=padding,
            expected=f"an id, or a negative one that counts the {model.vocab_size} rows of the "
            "embedding from the end, as in transformers",
            do="give --pad-token-id of your tokenizer, or null",
        )


def _label_problems(model: ModelConfig) -> Iterator[str]:
    family = FAMILIES.get(model.model_type)
    if model.num_labels == 1 and family is not None and not family.classifier:
        yield describe(
            flag("num_labels"),
            got=model.num_labels,
            expected=f"0: transformers has no reward model of {family.model_type}",
            do="take a model of another family",
        )


def _family_problems(model: ModelConfig) -> Iterator[str]:
    """Yield values that the family's ``config.json`` cannot hold: checkpoints and exports have
    one."""
    family = FAMILIES[model.model_type]
    kind = (model.rope_scaling or {}).get("rope_type", "default")
    if kind not in family.rope_types:
        yield describe(
            "rope_scaling.rope_type",
            got=repr(kind),
            expected=f"one of {', '.join(family.rope_types)}, as in every {family.architecture}",
            do="give another --model-type",
        )
        return
    heads = model.num_attention_heads
    if family.whole_heads and model.hidden_size % heads:
        yield describe(
            "--hidden-size",
            got=model.hidden_size,
            expected=f"a multiple of num_attention_heads {heads}, as transformers wants it of "
            f"every {family.architecture}",
            do=f"choose {nearest_multiples(model.hidden_size, heads)}, or give another "
            "--model-type",
        )
    for name, value in unheld_fields(model).items():
        yield describe(
            flag(name),
            got=getattr(model, name),
            expected=f"{value}, as in the config.json of a {family.architecture}",
            do=f"leave {name} out, or give another --model-type",
        )
