"""``verify``: whether two model folders hold the same model."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from megatron_llama.commands.common.configs import VerifyConfig
from megatron_llama.config.parse import Parsed
from megatron_llama.errors import ConfigError, describe

if TYPE_CHECKING:
    from megatron_llama.conversion.formats import ModelReader
    from megatron_llama.conversion.verify.logits import LogitDeviation
    from megatron_llama.conversion.verify.prompt import Prompt
    from megatron_llama.engine.optimizer import WeightSource

LISTED = 10
"""Differing weights that are listed one by one."""
CHECKSUM_WORKERS = 2
RANDOM_SEED = 1234
RANDOM_STD = 0.1
"""Weights of std 0.02 make attention so flat that a dropped rotary scaling changes logits by less
than rounding does."""


def verify(parsed: Parsed) -> int:
    """Print what was compared, every difference, and one verdict. Return the exit status: 0 if the
    models are equal, 1 if they differ."""
    from megatron_llama.conversion.convert import require_sound
    from megatron_llama.conversion.formats import open_model
    from megatron_llama.conversion.verify.fields import field_differences

    options = parsed.get(VerifyConfig)
    if options.prompt_tokens < 0:
        raise ConfigError(
            describe(
                "--prompt-tokens", got=options.prompt_tokens, expected="0 or more", do="correct it"
            )
        )
    first = open_model(
        options.a,
        format=options.from_a,
        config=options.hf_config_a,
        vocab_size=options.vocab_size,
        ignored=options.ignore_hf_config_fields,
    )
    second = open_model(
        options.b,
        format=options.from_b,
        config=options.hf_config_b,
        vocab_size=options.vocab_size,
        ignored=options.ignore_hf_config_fields,
    )
    for name, source, folder in zip("AB", (first, second), (options.a, options.b), strict=True):
        _say(f"{name}: {source.format} {source.folder} ({source.dtype})")
        require_sound(folder, CHECKSUM_WORKERS)
    different = [] if _compare_weights(first, second) else ["weights"]
    fields = field_differences(first.model, second.model)
    for field in fields:
        _say(f"config {field}" if field.matters else f"note: config {field}: computes the same")
    if not any(field.matters for field in fields):
        _say("config: equal")
    different += [f"config {field.name}" for field in fields if field.matters]
    if not _compare_logits(first, second, options.prompt_tokens):
        different.append("logits")
    _say(f"verdict: {'different: ' + ', '.join(different) if different else 'equal'}")
    return 1 if different else 0


def _say(line: str) -> None:
    print(line, flush=True)


def _compare_weights(first: ModelReader, second: ModelReader) -> bool:
    """Compare every tensor in the narrower of its two dtypes, and return whether all are equal."""
    from megatron_llama.conversion.verify.weights import (
        common_dtype,
        stored_dtype,
        weight_differences,
    )
    from megatron_llama.plans.params import hf_shapes, parameter_count

    common = common_dtype(first, second)
    stored = (stored_dtype(first), stored_dtype(second))
    lines = weight_differences(first, second)
    shown = list(islice(lines, LISTED))
    more = sum(1 for _ in lines)
    for line in shown:
        _say(f"weights {line}")
    if more:
        _say(f"weights of {more} more tensors differ")
    if stored != (common, common):
        _say(
            f"note: weights are {stored[0]} in A, {stored[1]} in B: compared after "
            f"rounding to {common}"
        )
    if not shown:
        _say(
            f"weights: equal bit for bit: {len(hf_shapes(first.model))} tensors, "
            f"{parameter_count(first.model):,} elements of {common}"
        )
    return not shown


def _compare_logits(first: ModelReader, second: ModelReader, asked: int) -> bool:
    """Compare the logits of a text of ``asked`` tokens (0: as many as a wrong rotary scaling needs
    to show), and return whether they agree within rounding."""
    from megatron_llama.conversion.verify.prompt import BEYOND, PLAIN, make_prompt, original_context
    from megatron_llama.data.corpus import python_documentation

    models = first.model, second.model
    if models[0].vocab_size != models[1].vocab_size:
        _say("logits: not compared, the vocabularies have different sizes")
        return True
    context = original_context(models)
    length = asked or (context + BEYOND if context else PLAIN)
    prompt = make_prompt((first, second), models[0].vocab_size, length, python_documentation)
    _say(
        f"logits: of {length:,} tokens ({prompt.made_of}), in fp32, one layer of weights at a time"
    )
    if length <= context:
        _say(
            "note: a wrong rotary scaling may stay unseen: the prompt is no longer than "
            f"original_max_position_embeddings {context:,}"
        )
    # Both are run and printed, whatever the first one finds.
    same = _compare_with_each_other(first, second, prompt)
    return _compare_with_transformers(first, second, prompt) and same


def _compare_with_each_other(first: ModelReader, second: ModelReader, prompt: Prompt) -> bool:
    """Whether the two models compute the same logits, with random weights and with their own."""
    import torch

    from megatron_llama.conversion.verify.logits import StreamedModel, logit_deviation
    from megatron_llama.conversion.verify.weights import RoundedSource, common_dtype
    from megatron_llama.model.init import InitialWeights

    drawn = InitialWeights(RANDOM_SEED, RANDOM_STD)
    common = getattr(torch, common_dtype(first, second))
    own: tuple[WeightSource, WeightSource] = (
        RoundedSource(first, common),
        RoundedSource(second, common),
    )
    found = []
    for name, (ours, theirs) in (
        (f"random weights (std {RANDOM_STD})", (drawn, drawn)),
        ("these weights", own),
    ):
        outputs = (
            StreamedModel(first.model, ours, prompt.tokens),
            StreamedModel(second.model, theirs, prompt.tokens),
        )
        found.append(
            _report(f"logits on {name}", logit_deviation(*outputs, first.model.vocab_size))
        )
    return all(found)


def _compare_with_transformers(first: ModelReader, second: ModelReader, prompt: Prompt) -> bool:
    """Whether HuggingFace's own implementation computes the same logits for each side that it can
    read."""
    from megatron_llama.conversion.verify.logits import StreamedModel, logit_deviation
    from megatron_llama.conversion.verify.reference import TransformersModel, obstacle
    from megatron_llama.model.init import InitialWeights

    found = []
    drawn = InitialWeights(RANDOM_SEED, RANDOM_STD)
    for side, source in zip("AB", (first, second), strict=True):
        if source.format != "hf":
            continue
        where = f"logits of {side} in transformers"
        if (reason := obstacle(source.model)) is not None:
            _say(f"{where}: not compared, {reason}")
            continue
        reference = TransformersModel(source.folder)
        both: tuple[tuple[str, WeightSource], ...] = (
            ("these weights", source),
            (f"random weights (std {RANDOM_STD})", drawn),
        )
        for name, weights in both:
            if weights is drawn:
                reference.fill(drawn)
            reference.run(prompt.tokens)
            ours = StreamedModel(source.model, weights, prompt.tokens)
            found.append(
                _report(
                    f"{where} on {name}", logit_deviation(ours, reference, source.model.vocab_size)
                )
            )
    return all(found)


def _report(what: str, deviation: LogitDeviation) -> bool:
    _say(f"{what}: {'equal' if deviation.within else 'different'}, {deviation}")
    return deviation.within
