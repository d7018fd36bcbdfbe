"""The samples of a --data-path that names text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_llama.config.blend import Blend
from megatron_llama.config.schema import Config, DataConfig
from megatron_llama.data.loader import BlendedSamples, Samples
from megatron_llama.data.readers import require_packages
from megatron_llama.data.shards import Shard, find_shards, shards_of
from megatron_llama.data.stream_places import ENDLESS, StreamedSamples
from megatron_llama.data.text_stream import StreamSettings, TextStream
from megatron_llama.data.tokenizer.base import Tokenizer
from megatron_llama.data.tokenizer.fingerprint import Fingerprint
from megatron_llama.data.words import is_stream
from megatron_llama.engine.comm import device as devices
from megatron_llama.errors import ConfigError, DataError, describe, listing
from megatron_llama.train.setup.inputs import VALIDATION

ASKED_AT_ONCE = 16
"""Remote files whose sizes are requested at the same time."""
NO_SPLIT = "100,0,0"


def text_samples(
    config: Config,
    blend: Blend,
    part: int,
    *,
    eod: int | None,
    tokenizer: Tokenizer | None,
    share: tuple[int, int],
) -> Samples:
    """Open the text of --data-path for training, or its files for validation. A rank's samples
    decide what it reads, whatever its ``share``. Raises ConfigError with every option that excludes
    text, DataError for files and tokenizers that cannot be used."""
    validation = part == VALIDATION
    problems = list(text_problems(config, blend, validation=validation))
    if problems:
        raise ConfigError(
            listing("These options do not go with a text that is streamed:", problems)
        )
    if tokenizer is None or config.data.tokenizer_model is None or tokenizer.eos_id is None:
        missing = "no tokenizer" if tokenizer is None else "a tokenizer without an end token"
        named = tokenizer is None or config.data.tokenizer_model is not None
        raise DataError(
            "--tokenizer-model",
            got=missing if named else "nothing",
            expected="the tokenizer that makes tokens of the text, with an end token",
            do="give its file or folder",
        )
    parts = []
    for number, word in enumerate(blend.prefixes):
        with devices.thread_pool(ASKED_AT_ONCE) as pool:
            shards = find_shards(word, pool)
        chosen = shards_of(shards, validation=validation)
        if not chosen:
            raise _no_split(word, shards, validation=validation)
        require_packages([Path(shard.name) for shard in chosen])
        settings = _settings(config, tokenizer, number, validation=validation)
        training = config.training
        count = training.eval_iters * training.global_batch_size if validation else ENDLESS
        stream = TextStream(word, chosen, settings, samples=count)
        parts.append(StreamedSamples(stream, config.data, eod))
    if len(parts) == 1:
        return parts[0]
    assert blend.weights is not None
    return BlendedSamples(parts, blend.weights)


def text_problems(config: Config, blend: Blend, *, validation: bool) -> Iterator[str]:
    """Yield options of a configuration that exclude streamed text."""
    data = config.data
    training = config.training
    indexed = [word for word in blend.prefixes if not is_stream(word)]
    if indexed:
        yield describe(
            "--data-path",
            got=f"the indexed dataset {indexed[0]} beside text",
            expected="text alone, or indexed datasets alone",
            do="preprocess the text",
        )
    if len(blend.prefixes) > 1 and blend.weights is None:
        yield describe(
            "--data-path",
            got="several texts without weights",
            expected="WEIGHT TEXT WEIGHT TEXT ...: nobody has counted what each has",
            do="give a weight before each",
        )
    if training.epochs:
        yield describe(
            "--epochs",
            got=f"{training.epochs:g}",
            expected="a length in steps or samples: nobody has counted the text",
            do="give --train-iters or --train-samples",
        )
    if data.megatron_data_order:
        yield describe(
            "--megatron-data-order",
            got="given",
            expected="an indexed dataset, whose documents are counted",
            do="leave it out, or preprocess the text",
        )
    if data.split not in (DataConfig.split, NO_SPLIT):
        yield describe(
            "--split",
            got=data.split,
            expected="nothing: files named validation (or valid, val, dev) are for evaluation",
            do="leave it out, and name the files that are held out",
        )
    if (
        config.offload.optimizer_offload == "zenflow"
        and config.zenflow.zenflow_select_strategy != "step"
    ):
        yield describe(
            "--zenflow-select-strategy",
            got=config.zenflow.zenflow_select_strategy,
            expected="step: a text that is streamed has no epochs",
            do="give step",
        )
    for flag, value in (
        ("--stream-window", data.stream_window),
        ("--stream-lanes", data.stream_lanes),
        ("--stream-workers", data.stream_workers),
    ):
        if value < 1:
            yield describe(flag, got=value, expected="1 or more", do="change it")
    if (validation or training.eval_interval) and not training.eval_iters:
        yield describe(
            "--eval-iters",
            got=0,
            expected="a number of batches: nobody has counted the text",
            do="give one, or --eval-interval 0",
        )


def _no_split(word: str, shards: list[Shard], *, validation: bool) -> DataError:
    names = ", ".join(shard.name for shard in shards[:3])
    if validation:
        return DataError(
            f"--data-path {word}",
            got=f"no file for evaluation ({names})",
            expected="files whose names, or those of their folders, have the word validation, "
            "valid, val or dev",
            do="name some so, or give --eval-interval 0",
        )
    return DataError(
        f"--data-path {word}",
        got=f"files that are all held out ({names})",
        expected="files for training",
        do="check their names: validation, valid, val, dev and test are not trained on",
    )


def _settings(
    config: Config, tokenizer: Tokenizer, number: int, *, validation: bool
) -> StreamSettings:
    data = config.data
    training = config.training
    assert data.tokenizer_model is not None and tokenizer.eos_id is not None
    fingerprint = Fingerprint.of(tokenizer, tokenizer.vocab_size)
    return StreamSettings(
        tokenizer=data.tokenizer_model,
        tokenizer_type=data.tokenizer_type,
        key=data.stream_key,
        end=tokenizer.eos_id,
        vocab_size=config.model.vocab_size,
        seq_length=training.seq_length,
        seed=training.seed + (number << 32),
        shuffled=data.data_order == "shuffled" and not validation,
        lanes=data.stream_lanes,
        # An evaluation shuffles nothing, and reads no more than it takes.
        window=0 if validation else data.stream_window,
        workers=1 if validation else data.stream_workers,
        step_samples=training.global_batch_size,
        identity=f"{fingerprint.tokens} {fingerprint.probe}",
    )
