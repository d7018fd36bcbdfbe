"""A model with its low-rank additions as plain HuggingFace weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch

from megatron_llama.checkpoint.adapters import saved_lora
from megatron_llama.checkpoint.listed_files import ListedFilesCheck
from megatron_llama.checkpoint.model_folders.formats import ModelReader, open_model
from megatron_llama.checkpoint.model_folders.hf.writer import HFWriter
from megatron_llama.checkpoint.model_folders.peft.adapter import MergedReader, PeftAdapter
from megatron_llama.checkpoint.native import read_meta
from megatron_llama.converter.api.convert import DTYPES
from megatron_llama.converter.convert import convert, require_free, require_sound
from megatron_llama.data.tokenizer.fingerprint import require_same_ids
from megatron_llama.data.tokenizer.load import has_tokenizer, load_tokenizer
from megatron_llama.errors import ConfigError, describe
from megatron_llama.train.api.common.trained import tokenizer_folder


@dataclass(frozen=True)
class Merged:
    """Result of ``merge``."""

    source: Path
    """The folder that was read; of a folder of checkpoints, the checkpoint that was chosen."""
    additions: str
    """Source of the additions and their rank, in words."""
    target: Path
    dtype: str
    """``float32``, ``bfloat16`` or ``float16``: the dtype of the written weights."""
    bytes: int
    """Bytes of the written weights."""


def merge(
    src: str | Path,
    dst: str | Path,
    *,
    adapter: str | Path | None = None,
    ignore_hf_config_fields: Sequence[str] = (),
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    max_shard_bytes: int = 5_000_000_000,
    workers: int = 2,
    overwrite: bool = False,
) -> Merged:
    """Write W + alpha / rank * B A for every weight of the model ``src`` that has a low-rank
    addition, and everything else as it is, as the HuggingFace folder ``dst``, which appears whole
    or not at all. It works in one process without a GPU.

    ``src`` is a folder of any format, with the additions of ``adapter``, a folder of HuggingFace's
    PEFT; or the checkpoint of a run with ``lora_rank``, with its own. The other arguments are those
    of ``convert``.

    ```python
    import megatron_llama as ml

    tuned = ml.sft(
        train_data=["data/talks.jsonl"],
        load="runs/small",
        finetune=True,
        lora_rank=4,
        split="100,0,0",
        chat_template="plain",
        seq_length=64,
        global_batch_size=3,
        train_iters=2,
        lr=1e-3,
        save="runs/small-lora",
    )
    merged = ml.merge("runs/small-lora", "runs/small-merged")
    print(merged.additions, merged.dtype)
    ```

    Raises ConfigError for arguments that cannot be used, and CheckpointError for a folder that
    cannot be read or written."""
    if dtype not in DTYPES:
        raise ConfigError(
            describe("--dtype", got=dtype, expected=f"one of {', '.join(DTYPES)}", do="correct it")
        )
    target = Path(dst)
    require_free(target.resolve(), Path(src).resolve(), overwrite=overwrite)
    source = open_model(src, ignored=ignore_hf_config_fields)
    require_sound(source, workers)
    if adapter is not None:
        peft = _adapter_of(source, adapter, workers)
        additions = f"{adapter} (rank {peft.lora.lora_rank})"
        source = cast(ModelReader, MergedReader(source, peft))
    else:
        lora = saved_lora(read_meta(source.folder).config) if source.format == "native" else None
        if lora is None or not lora.lora_rank:
            do = "give --adapter FOLDER, one of PEFT, or the checkpoint of a run with --lora-rank"
            raise ConfigError(
                describe(
                    str(src),
                    got="a model without low-rank additions",
                    expected="some to merge",
                    do=do,
                )
            )
        additions = f"its additions (rank {lora.lora_rank})"
    written = source.dtype if dtype == "auto" else dtype
    size = convert(
        source,
        target,
        HFWriter(max_shard_bytes),
        source.model,
        getattr(torch, written),
        tokenizer_files="",
        workers=workers,
        overwrite=overwrite,
    )
    return Merged(source.folder, additions, target, written, size)


def _adapter_of(source: ModelReader, folder: str | Path, workers: int) -> PeftAdapter:
    """Open the additions of a model. Raises CheckpointError for a folder that is damaged, and
    DataError for one whose tokenizer is not the model's."""
    adapter = PeftAdapter(folder, source.model)
    with ListedFilesCheck(adapter.folder, workers=workers) as check:
        check.require()
    own = tokenizer_folder(source)
    if has_tokenizer(adapter.folder) and has_tokenizer(own):
        require_same_ids(
            load_tokenizer(adapter.folder),
            load_tokenizer(own),
            where=str(folder),
            owner=own,
            do="give the model that the adapter was trained on",
        )
    return adapter
