"""``merge``: a model with its low-rank additions as plain HuggingFace weights."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from megatron_llama.config.parse import Parsed
from megatron_llama.converter.configs import MergeConfig
from megatron_llama.errors import ConfigError, describe
from megatron_llama.plans.memory import sized


def merge(parsed: Parsed) -> None:
    """Write W + alpha / rank * B A for every weight that has an addition, and everything else as it
    is."""
    import torch

    from megatron_llama.api.common.trained import tokenizer_folder
    from megatron_llama.checkpoint.adapters import saved_lora
    from megatron_llama.checkpoint.listed_files import ListedFilesCheck
    from megatron_llama.checkpoint.native import read_meta
    from megatron_llama.conversion.formats import ModelReader, open_model
    from megatron_llama.conversion.hf.writer import HFWriter
    from megatron_llama.conversion.peft.adapter import MergedReader, PeftAdapter
    from megatron_llama.converter.convert import convert, require_free, require_sound
    from megatron_llama.tokenizer.fingerprint import require_same_ids
    from megatron_llama.tokenizer.load import has_tokenizer, load_tokenizer

    options = parsed.get(MergeConfig)
    target = Path(options.dst)
    require_free(target.resolve(), Path(options.src).resolve(), overwrite=options.overwrite)
    source = open_model(options.src, ignored=options.ignore_hf_config_fields)
    require_sound(source, options.workers)
    if options.adapter is not None:
        adapter = PeftAdapter(options.adapter, source.model)
        with ListedFilesCheck(adapter.folder, workers=options.workers) as check:
            check.require()
        own = tokenizer_folder(source)
        if has_tokenizer(adapter.folder) and has_tokenizer(own):
            require_same_ids(
                load_tokenizer(adapter.folder),
                load_tokenizer(own),
                where=options.adapter,
                owner=own,
                do="give the model that the adapter was trained on",
            )
        source = cast(ModelReader, MergedReader(source, adapter))
        said = f"{options.adapter} (rank {adapter.lora.lora_rank})"
    else:
        lora = saved_lora(read_meta(source.folder).config) if source.format == "native" else None
        if lora is None or not lora.lora_rank:
            do = "give --adapter FOLDER, one of PEFT, or the checkpoint of a run with --lora-rank"
            raise ConfigError(
                describe(
                    options.src,
                    got="a model without low-rank additions",
                    expected="some to merge",
                    do=do,
                )
            )
        said = f"its additions (rank {lora.lora_rank})"
    dtype = source.dtype if options.dtype == "auto" else options.dtype
    size = convert(
        source,
        target,
        HFWriter(options.max_shard_bytes),
        source.model,
        getattr(torch, dtype),
        tokenizer_files="",
        workers=options.workers,
        overwrite=options.overwrite,
    )
    print(f"merged {source.folder} and {said} into {options.dst} ({dtype}, {sized(size)})")
