"""Writes a model folder in another format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from megatron_llama.checkpoint.carried import changed_fields
from megatron_llama.checkpoint.checkpoint_dir import TOKENIZER
from megatron_llama.checkpoint.model_folders.formats import FORMATS, ModelWriter, open_model
from megatron_llama.checkpoint.model_folders.hf.reader import HFReader
from megatron_llama.checkpoint.model_folders.hf.writer import HFWriter
from megatron_llama.checkpoint.model_folders.model_fields import OPTIMIZER_LEFT_OUT
from megatron_llama.checkpoint.model_folders.native.reader import NativeReader
from megatron_llama.checkpoint.model_folders.optimizer_state import OptimizerState
from megatron_llama.checkpoint.model_folders.tokenizer_files import (
    misfits,
    tokenizer_in,
    unknown_tokens,
    with_end_tokens,
)
from megatron_llama.config.parse import flag
from megatron_llama.converter.convert import convert as write
from megatron_llama.converter.convert import require_free, require_sound
from megatron_llama.converter.megatron import args as megatron_args
from megatron_llama.converter.megatron.writer import MegatronWriter
from megatron_llama.converter.meta import names as meta_names
from megatron_llama.converter.meta.writer import MetaWriter
from megatron_llama.converter.native import optimizer as native_optimizer
from megatron_llama.converter.native.writer import NativeWriter
from megatron_llama.converter.torch_dist.optimizer import has_optimizer, open_optimizer
from megatron_llama.converter.torch_dist.reader import TorchDistReader
from megatron_llama.converter.torch_dist.run_state import SAME_ROUTER_LOSSES
from megatron_llama.converter.torch_dist.writer import TorchDistWriter
from megatron_llama.errors import CheckpointError, ConfigError, describe, listing
from megatron_llama.model.hf import carried_config
from megatron_llama.model.plan.params import split_layers

Format: TypeAlias = Literal["hf", "native", "megatron", "megatron-llama", "meta", "torch_dist"]
MEGATRONS = ("megatron", "megatron-llama")
PADDED = (*MEGATRONS, "torch_dist")
DTYPES = ("auto", "float32", "bfloat16", "float16")
LAYOUTS = ("transformer_engine", "local", "legacy")


@dataclass(frozen=True)
class Converted:
    """Result of ``convert``."""

    source: Path
    """The folder that was read; of a folder of checkpoints, the checkpoint that was chosen."""
    source_format: str
    target: Path
    dtype: str
    """``float32``, ``bfloat16`` or ``float16``: the dtype of the written weights."""
    bytes: int
    """Bytes of the written weights."""
    notes: tuple[str, ...]
    """Notes for the user: files that were not read, contradictions, and fields that the target's
    own program will not use."""


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    to: Format,
    source_format: Format | None = None,
    hf_config: str | Path | None = None,
    ignore_hf_config_fields: Sequence[str] = (),
    vocab_size: int = 0,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    tensor_model_parallel_size: int | None = None,
    pipeline_model_parallel_size: int | None = None,
    pipeline_layer_split: Sequence[int] | None = None,
    expert_model_parallel_size: int | None = None,
    make_vocab_size_divisible_by: int | None = None,
    megatron_layout: Literal["transformer_engine", "local", "legacy"] | None = None,
    max_shard_bytes: int | None = None,
    workers: int = 2,
    overwrite: bool = False,
) -> Converted:
    """Write the model folder ``src``, of any format, as ``dst`` in the format ``to``: weights,
    configuration, tokenizer. It works in one process without a GPU, tensor by tensor, so the model
    need not fit into memory. ``dst`` appears whole or not at all.

    ``source_format`` is found from the content of ``src`` unless it is given. ``hf_config`` is a
    ``config.json`` of HuggingFace for what ``src`` does not say of its model; its fields named in
    ``ignore_hf_config_fields`` are not refused if they are unknown. ``vocab_size`` is the number of
    token ids where ``src`` stores a padded vocabulary only. ``dtype="auto"`` keeps the dtype.

    ``native`` and ``torch_dist`` take the optimizer's state of a checkpoint of the other along,
    with which a run goes on there; to the other formats weights alone are written.

    These may be given with the formats that know them only: ``tensor_model_parallel_size`` (1;
    ``megatron``, ``megatron-llama``, ``torch_dist`` for the padding of its vocabulary, and ``meta``
    for its number of files),
    ``pipeline_model_parallel_size`` (1), ``pipeline_layer_split`` (blocks of each stage; equal
    shares; the two ``megatron`` formats), ``make_vocab_size_divisible_by`` (128; these and
    ``torch_dist``), ``expert_model_parallel_size`` (1; ``torch_dist``: that of the run which goes
    on, since above 1 Megatron has an optimizer of its own for experts),
    ``megatron_layout`` (``"transformer_engine"``; the names that ``megatron`` has),
    ``max_shard_bytes`` (5e9; ``hf``).

    ``workers`` files are written at the same time. ``overwrite`` replaces an earlier conversion in
    ``dst``; anything else there is refused all the same.

    ```python
    import megatron_llama as ml

    done = ml.convert("runs/hf", "runs/megatron", to="megatron", tensor_model_parallel_size=2)
    print(done.source_format, done.dtype, done.bytes, *done.notes)
    ```

    Raises ConfigError for arguments that cannot be used, and CheckpointError for a model that
    cannot be read or written."""
    only_with = (
        ("tensor_model_parallel_size", tensor_model_parallel_size, (*PADDED, "meta")),
        ("pipeline_model_parallel_size", pipeline_model_parallel_size, MEGATRONS),
        ("pipeline_layer_split", pipeline_layer_split, MEGATRONS),
        ("expert_model_parallel_size", expert_model_parallel_size, ("torch_dist",)),
        ("make_vocab_size_divisible_by", make_vocab_size_divisible_by, PADDED),
        ("megatron_layout", megatron_layout, ("megatron",)),
        ("max_shard_bytes", max_shard_bytes, ("hf",)),
    )
    problems = [
        describe(flag(name), got=value, expected=f"--to {' or '.join(formats)}", do="leave it out")
        for name, value, formats in only_with
        if value is not None and to not in formats
    ]
    tp = 1 if tensor_model_parallel_size is None else tensor_model_parallel_size
    pp = 1 if pipeline_model_parallel_size is None else pipeline_model_parallel_size
    ep = 1 if expert_model_parallel_size is None else expert_model_parallel_size
    multiple = 128 if make_vocab_size_divisible_by is None else make_vocab_size_divisible_by
    shard_bytes = 5_000_000_000 if max_shard_bytes is None else max_shard_bytes
    layout = "transformer_engine" if megatron_layout is None else megatron_layout
    problems += [
        describe(flag(name), got=value, expected=f"at least {least}", do="correct it")
        for name, value, least in (
            ("tensor_model_parallel_size", tp, 1),
            ("pipeline_model_parallel_size", pp, 1),
            ("expert_model_parallel_size", ep, 1),
            ("make_vocab_size_divisible_by", multiple, 1),
            ("workers", workers, 1),
            ("max_shard_bytes", shard_bytes, 1),
        )
        if value < least
    ]
    if vocab_size < 0:
        problems.append(
            describe("--vocab-size", got=vocab_size, expected="0 or more", do="correct it")
        )
    # On a command line the parser has refused any other word for one of these.
    problems += [
        describe(flag(name), got=value, expected=f"one of {', '.join(known)}", do="correct it")
        for name, value, known in (
            ("to", to, FORMATS),
            ("dtype", dtype, DTYPES),
            ("megatron_layout", layout, LAYOUTS),
        )
        if value not in known
    ]
    if problems:
        raise ConfigError(listing("These options cannot be used:", problems))

    target_folder = Path(dst)
    require_free(target_folder.resolve(), Path(src).resolve(), overwrite=overwrite)
    source = open_model(
        src,
        format=source_format,
        config=hf_config,
        vocab_size=vocab_size,
        ignored=ignore_hf_config_fields,
    )
    require_sound(source, workers)
    model = replace(source.model, make_vocab_size_divisible_by=multiple)
    misfit: list[str] = []
    try:
        tokenizer = tokenizer_in(source.tokenizer_files)
    except CheckpointError as error:
        tokenizer = None
        misfit = [f"the tokenizer is copied as it is, though it cannot be read: {error}"]
    if tokenizer is not None:
        model = with_end_tokens(model, source.extra, tokenizer)
        misfit = list(misfits(model, source.extra, tokenizer))
    try:
        misfit += unknown_tokens(model, source.extra, source.tokenizer_files)
    except CheckpointError as error:
        misfit.append(f"copied as it is, though it cannot be read: {error}")

    state: OptimizerState | None = None
    left_out: list[str] = []
    carries = to in ("native", "torch_dist")
    if carries and isinstance(source, TorchDistReader) and has_optimizer(source.checkpoint):
        state = open_optimizer(source)
    elif to == "torch_dist" and isinstance(source, NativeReader):
        state, left_out = _native_state(source)
    writer: ModelWriter
    lost: Iterator[str] = iter(())
    if to == "hf":
        writer = HFWriter(shard_bytes)
    elif to == "native":
        writer = NativeWriter(workers, state)
    elif to == "meta":
        writer = MetaWriter(tp)
        lost = meta_names.lost_fields(model)
    elif to == "torch_dist":
        writer = TorchDistWriter(workers, tp, state, ep)
        lost = megatron_args.lost_fields(model, "megatron", (model.num_hidden_layers,))
        if state is not None and model.num_experts and expert_model_parallel_size is None:
            left_out.append(
                "the optimizer is written for a run without expert parallelism: for another give "
                "--expert-model-parallel-size, since Megatron-LM cannot change it later"
            )
    else:
        split = _split(pp, pipeline_layer_split or (), model.num_hidden_layers)
        writer = MegatronWriter(to, tp, split, layout)
        lost = megatron_args.lost_fields(model, to, split)
    obstacles = list(writer.problems(model))
    if obstacles:
        raise ConfigError(listing("The model cannot be written like this:", obstacles))
    written = source.dtype if dtype == "auto" else dtype
    size = write(
        source,
        target_folder,
        writer,
        model,
        getattr(torch, written),
        tokenizer_files=TOKENIZER if to == "native" and tokenizer is not None else "",
        workers=workers,
        overwrite=overwrite,
    )
    losses = (
        f"{name}: the program of format {to} does not know it and will not use it; it is kept for "
        "converting back"
        for name in lost
    )
    carried = carried_config(model, source.extra, dtype=written)
    left_out += changed_fields(source.extra, carried, "config.json")
    if isinstance(source, HFReader) and (files := source.files_left_out()):
        left_out.append(f"left out, as no files of a model: {', '.join(files)}")
    source_notes = (note for note in source.notes if state is None or note != OPTIMIZER_LEFT_OUT)
    notes = (*source_notes, *left_out, *misfit, *losses)
    return Converted(source.folder, source.format, target_folder, written, size, notes)


def _native_state(source: NativeReader) -> tuple[OptimizerState | None, list[str]]:
    """Return the optimizer's state of a native checkpoint, or the reasons why Megatron cannot go on
    with it."""
    meta = source.weights.meta
    if not meta.optimizer_step:
        return None, []
    reasons = list(native_optimizer.optimizer_problems(meta))
    if reasons:
        return None, [f"Megatron-LM has no optimizer for this state: {why}" for why in reasons]
    state = native_optimizer.open_optimizer(source)
    kind = state.config.training.moe_router_load_balancing_type
    if kind in SAME_ROUTER_LOSSES:
        return state, []
    return state, [f"Megatron-LM has no such loss: --moe-router-load-balancing-type {kind}"]


def _split(pp: int, given: Sequence[int], layers: int) -> tuple[int, ...]:
    """Return the blocks of each pipeline stage. Raises ConfigError unless they add up to all
    blocks."""
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
        return tuple(given)
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
