"""``convert``: a model folder in another format."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_llama.commands.common.configs import ConvertConfig
from megatron_llama.config.parse import Parsed, flag
from megatron_llama.errors import CheckpointError, ConfigError, describe, listing
from megatron_llama.plans.memory import sized
from megatron_llama.plans.params import split_layers

if TYPE_CHECKING:
    from megatron_llama.config.schema import ModelConfig
    from megatron_llama.convert.formats import ModelWriter

MEGATRONS = ("megatron", "megatron-llama")
ONLY_WITH = (
    ("tensor_model_parallel_size", (*MEGATRONS, "meta")),
    ("pipeline_model_parallel_size", MEGATRONS),
    ("pipeline_layer_split", MEGATRONS),
    ("make_vocab_size_divisible_by", MEGATRONS),
    ("megatron_layout", ("megatron",)),
    ("max_shard_bytes", ("hf",)),
)
"""Options that only some formats know."""


def convert(parsed: Parsed) -> None:
    """Convert and say what was written, and what the target's own program will not use."""
    options = parsed.get(ConvertConfig)
    _check(options, parsed.explicit)
    import torch

    from megatron_llama.checkpoint.checkpoint_dir import TOKENIZER
    from megatron_llama.convert.convert import convert as run
    from megatron_llama.convert.convert import require_free, require_sound
    from megatron_llama.convert.formats import open_model
    from megatron_llama.convert.tokenizer_files import misfits, tokenizer_in, with_end_tokens

    start = time.perf_counter()
    target_folder = Path(options.dst)
    require_free(target_folder.resolve(), Path(options.src).resolve(), overwrite=options.overwrite)
    source = open_model(
        options.src,
        format=options.source_format,
        config=options.hf_config,
        vocab_size=options.vocab_size,
        ignored=options.ignore_hf_config_fields,
    )
    require_sound(options.src, options.workers)
    model = replace(source.model, make_vocab_size_divisible_by=options.make_vocab_size_divisible_by)
    misfit: list[str] = []
    try:
        tokenizer = tokenizer_in(source.tokenizer_files)
    except CheckpointError as error:
        tokenizer = None
        misfit = [f"the tokenizer is copied as it is, though it cannot be read: {error}"]
    if tokenizer is not None:
        model = with_end_tokens(model, tokenizer)
        misfit = list(misfits(model, source.extra, tokenizer))
    target = _target(options, model)
    problems = list(target.problems(model))
    if problems:
        raise ConfigError(listing("The model cannot be written like this:", problems))
    dtype = source.dtype if options.dtype == "auto" else options.dtype
    size = run(
        source,
        target_folder,
        target,
        model,
        getattr(torch, dtype),
        tokenizer_files=TOKENIZER if options.to == "native" and tokenizer is not None else "",
        workers=options.workers,
        overwrite=options.overwrite,
    )
    for note in (*source.notes, *misfit, *_losses(options, model)):
        print(f"note: {note}")
    seconds = time.perf_counter() - start
    print(
        f"converted {source.format} {source.folder} to {options.to} {options.dst} "
        f"({dtype}, {sized(size)}, {seconds:.1f} s)"
    )


def _check(options: ConvertConfig, explicit: frozenset[str]) -> None:
    problems = [
        describe(
            flag(name),
            got=getattr(options, name),
            expected=f"--to {' or '.join(formats)}",
            do="leave it out",
        )
        for name, formats in ONLY_WITH
        if name in explicit and options.to not in formats
    ]
    least_one = (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "make_vocab_size_divisible_by",
        "workers",
        "max_shard_bytes",
    )
    for name in least_one:
        if getattr(options, name) < 1:
            problems.append(
                describe(
                    flag(name), got=getattr(options, name), expected="at least 1", do="correct it"
                )
            )
    if options.vocab_size < 0:
        problems.append(
            describe("--vocab-size", got=options.vocab_size, expected="0 or more", do="correct it")
        )
    if problems:
        raise ConfigError(listing("These options cannot be used:", problems))


def _target(options: ConvertConfig, model: ModelConfig) -> ModelWriter:
    from megatron_llama.convert.hf.writer import HFWriter
    from megatron_llama.convert.megatron.writer import MegatronWriter
    from megatron_llama.convert.meta.writer import MetaWriter
    from megatron_llama.convert.native.writer import NativeWriter

    if options.to == "hf":
        return HFWriter(options.max_shard_bytes)
    if options.to == "native":
        return NativeWriter(options.workers)
    if options.to == "meta":
        return MetaWriter(options.tensor_model_parallel_size)
    split = _split(options, model.num_hidden_layers)
    return MegatronWriter(
        options.to, options.tensor_model_parallel_size, split, options.megatron_layout
    )


def _split(options: ConvertConfig, layers: int) -> tuple[int, ...]:
    """Blocks of each pipeline stage. Raises ConfigError unless they are all the blocks there
    are."""
    pp = options.pipeline_model_parallel_size
    given = options.pipeline_layer_split
    where = "--pipeline-layer-split"
    do = f"give {pp} numbers whose sum is {layers}"
    if given:
        if len(given) != pp or sum(given) != layers or min(given) < 1:
            got = f"{' '.join(map(str, given))} for {pp} stages"
            raise ConfigError(
                describe(
                    where,
                    got=got,
                    expected=f"{pp} numbers above 0 whose sum is {layers}",
                    do="correct them",
                )
            )
        return given
    if layers % pp:
        got = f"{layers} blocks for {pp} stages"
        raise ConfigError(
            describe(
                "--pipeline-model-parallel-size",
                got=got,
                expected="a divisor of the blocks",
                do=f"or {do}: {where}",
            )
        )
    return tuple(len(share) for share in split_layers(layers, pp))


def _losses(options: ConvertConfig, model: ModelConfig) -> Iterator[str]:
    """What the target's own program cannot express."""
    from megatron_llama.convert.megatron import args as megatron_args
    from megatron_llama.convert.meta import names as meta_names

    fields: Iterator[str] = iter(())
    if options.to in MEGATRONS:
        fields = megatron_args.lost_fields(
            model, options.to, _split(options, model.num_hidden_layers)
        )
    elif options.to == "meta":
        fields = meta_names.lost_fields(model)
    for name in fields:
        yield (
            f"{name}: the program of format {options.to} does not know it and will not use it; "
            "it is kept for converting back"
        )
