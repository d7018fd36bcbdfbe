"""Compares two model folders: whether they hold the same model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch

from megatron_llama.checkpoint.model_folders.formats import ModelReader, open_model
from megatron_llama.converter.api.convert import Format
from megatron_llama.converter.convert import require_sound
from megatron_llama.converter.verify.fields import field_differences
from megatron_llama.converter.verify.logits import (
    LogitDeviation,
    StreamedModel,
    logit_deviation,
    outputs_of,
)
from megatron_llama.converter.verify.prompt import (
    BEYOND,
    PLAIN,
    Prompt,
    make_prompt,
    telling_context,
)
from megatron_llama.converter.verify.reference import TransformersModel, obstacle
from megatron_llama.converter.verify.weights import (
    RoundedSource,
    common_dtype,
    stored_dtype,
    weight_differences,
)
from megatron_llama.data.corpus import python_documentation
from megatron_llama.engine.optimizer import WeightSource
from megatron_llama.errors import ConfigError, describe
from megatron_llama.model.init import InitialWeights
from megatron_llama.model.plan.params import hf_shapes, parameter_count

Say = Callable[[str], None]
LISTED = 10
"""Number of differing weights that are listed one by one."""
CHECKSUM_WORKERS = 2
RANDOM_SEED = 1234
RANDOM_STD = 0.1
"""With weights of std 0.02 attention is so flat that a dropped rotary scaling would change logits
by less than rounding does."""


@dataclass(frozen=True)
class Verified:
    """Result of ``verify``."""

    different: tuple[str, ...]
    """Names of differences: ``weights``, ``config NAME`` for each field that changes the
    computation, ``logits``."""
    lines: tuple[str, ...]
    """The comparisons and every difference, a line each; the verdict is the last one."""

    @property
    def equal(self) -> bool:
        """Whether both folders hold the same model."""
        return not self.different


def verify(
    a: str | Path,
    b: str | Path,
    *,
    from_a: Format | None = None,
    from_b: Format | None = None,
    hf_config_a: str | Path | None = None,
    hf_config_b: str | Path | None = None,
    ignore_hf_config_fields: Sequence[str] = (),
    vocab_size: int = 0,
    prompt_tokens: int = 0,
    report: Callable[[str], None] | None = None,
) -> Verified:
    """Compare the model folders ``a`` and ``b``, of any formats: weights bit for bit in the
    narrower of their dtypes, configurations field by field, and the logits of a text within
    rounding, also with transformers' own model where it is installed. It works in one process, a
    layer at a time, so the models need not fit into memory.

    ``from_a`` and ``from_b`` are the formats, by default found from the content. ``hf_config_a``,
    ``hf_config_b``, ``ignore_hf_config_fields`` and ``vocab_size`` are those of ``convert``.
    ``prompt_tokens`` is the length of the text (0: as many as a wrong rotary scaling needs to
    show). ``report`` is called with each line as soon as it is known.

    ```python
    import megatron_llama as ml

    result = ml.verify("runs/small", "runs/megatron", prompt_tokens=16)
    assert result.equal, result.lines
    ```

    Raises ConfigError for arguments that cannot be used, and CheckpointError for a folder that
    cannot be read."""
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if report is not None:
            report(line)

    if prompt_tokens < 0:
        raise ConfigError(
            describe("--prompt-tokens", got=prompt_tokens, expected="0 or more", do="correct it")
        )
    first = open_model(
        a, format=from_a, config=hf_config_a, vocab_size=vocab_size, ignored=ignore_hf_config_fields
    )
    second = open_model(
        b, format=from_b, config=hf_config_b, vocab_size=vocab_size, ignored=ignore_hf_config_fields
    )
    for name, source in zip("AB", (first, second), strict=True):
        say(f"{name}: {source.format} {source.folder} ({source.dtype})")
        require_sound(source, CHECKSUM_WORKERS)
    different = [] if _compare_weights(first, second, say) else ["weights"]
    fields = field_differences(first.model, second.model)
    for field in fields:
        say(f"config {field}" if field.matters else f"note: config {field}: computes the same")
    if not any(field.matters for field in fields):
        say("config: equal")
    different += [f"config {field.name}" for field in fields if field.matters]
    if not _compare_logits(first, second, prompt_tokens, say):
        different.append("logits")
    say(f"verdict: {'different: ' + ', '.join(different) if different else 'equal'}")
    return Verified(tuple(different), tuple(lines))


def _compare_weights(first: ModelReader, second: ModelReader, say: Say) -> bool:
    """Compare every tensor in the narrower of its two dtypes, and return whether all are equal."""
    common = common_dtype(first, second)
    stored = (stored_dtype(first), stored_dtype(second))
    lines = weight_differences(first, second)
    shown = list(islice(lines, LISTED))
    more = sum(1 for _ in lines)
    for line in shown:
        say(f"weights {line}")
    if more:
        say(f"weights of {more} more tensors differ")
    if stored != (common, common):
        say(
            f"note: weights are {stored[0]} in A, {stored[1]} in B: compared after "
            f"rounding to {common}"
        )
    if not shown:
        say(
            f"weights: equal bit for bit: {len(hf_shapes(first.model))} tensors, "
            f"{parameter_count(first.model):,} elements of {common}"
        )
    return not shown


def _compare_logits(first: ModelReader, second: ModelReader, asked: int, say: Say) -> bool:
    """Compare the logits of a text of ``asked`` tokens (0: as many as a wrong rotary scaling needs
    to show), and return whether they agree within rounding."""
    models = first.model, second.model
    if models[0].vocab_size != models[1].vocab_size:
        say("logits: not compared, the vocabularies have different sizes")
        return True
    if models[0].num_labels != models[1].num_labels:
        say("logits: not compared, only one of the two is a reward model")
        return True
    context = telling_context(models)
    length = asked or (context + BEYOND if context else PLAIN)
    prompt = make_prompt((first, second), models[0].vocab_size, length, python_documentation)
    say(f"logits: of {length:,} tokens ({prompt.made_of}), in fp32, one layer of weights at a time")
    if length <= context:
        say(
            "note: a wrong rotary scaling or window may stay unseen: the prompt is no longer than "
            f"{context:,}, up to where they change nothing"
        )
    # Both comparisons run and print, whatever the result of the first one.
    same = _compare_with_each_other(first, second, prompt, say)
    return _compare_with_transformers(first, second, prompt, say) and same


def _compare_with_each_other(
    first: ModelReader, second: ModelReader, prompt: Prompt, say: Say
) -> bool:
    """Whether the two models compute the same logits, with random weights and with their own."""
    drawn = InitialWeights(RANDOM_SEED, RANDOM_STD)
    common = getattr(torch, common_dtype(first, second))
    own: tuple[WeightSource, WeightSource] = (
        RoundedSource(first, common),
        RoundedSource(second, common),
    )
    agreements = []
    for name, (ours, theirs) in (
        (f"random weights (std {RANDOM_STD})", (drawn, drawn)),
        ("these weights", own),
    ):
        outputs = (
            StreamedModel(first.model, ours, prompt.tokens),
            StreamedModel(second.model, theirs, prompt.tokens),
        )
        agreements.append(
            _report(f"logits on {name}", logit_deviation(*outputs, outputs_of(first.model)), say)
        )
    return all(agreements)


def _compare_with_transformers(
    first: ModelReader, second: ModelReader, prompt: Prompt, say: Say
) -> bool:
    """Whether HuggingFace's own implementation computes the same logits for each side that it can
    read."""
    agreements = []
    drawn = InitialWeights(RANDOM_SEED, RANDOM_STD)
    for side, source in zip("AB", (first, second), strict=True):
        if source.format != "hf":
            continue
        where = f"logits of {side} in transformers"
        if (reason := obstacle(source.model)) is not None:
            say(f"{where}: not compared, {reason}")
            continue
        reference = TransformersModel(source.folder, source.model)
        weight_sets: tuple[tuple[str, WeightSource], ...] = (
            ("these weights", source),
            (f"random weights (std {RANDOM_STD})", drawn),
        )
        for name, weights in weight_sets:
            if weights is drawn:
                reference.fill(drawn)
            reference.run(prompt.tokens)
            ours = StreamedModel(source.model, weights, prompt.tokens)
            deviation = logit_deviation(ours, reference, outputs_of(source.model))
            agreements.append(_report(f"{where} on {name}", deviation, say))
    return all(agreements)


def _report(what: str, deviation: LogitDeviation, say: Say) -> bool:
    say(f"{what}: {'equal' if deviation.within else 'different'}, {deviation}")
    return deviation.within
