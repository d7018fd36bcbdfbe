"""``export``: a checkpoint as a HuggingFace folder."""

from __future__ import annotations

from pathlib import Path

from megatron_llama.commands.options import ExportConfig
from megatron_llama.errors import ConfigError, describe
from megatron_llama.options import Parsed


def export(parsed: Parsed) -> None:
    """Stream the weights tensor by tensor; the target appears whole or not at all."""
    import torch

    from megatron_llama.checkpoint import native
    from megatron_llama.checkpoint.hf import export_hf
    from megatron_llama.tokenizer.load import load_tokenizer
    from megatron_llama.vocabulary import FOLDER

    options = parsed.get(ExportConfig)
    missing = [describe(f"--{name}", got="nothing", expected="a folder", do=f"give --{name} FOLDER") for name in ("load", "output") if not getattr(options, name)]
    if missing:
        raise ConfigError("; ".join(missing))
    path = native.find(Path(options.load))
    meta = native.read_meta(path)
    dtype = options.dtype
    if dtype == "auto":
        dtype = "bfloat16" if meta.config["training"]["bf16"] else "float32"
    beside = Path(options.load) / FOLDER
    chosen = options.tokenizer_model or (beside if beside.is_dir() else None)
    tokenizer = load_tokenizer(chosen) if chosen is not None else None
    export_hf(options.output, meta.model, native.open_weights(path), getattr(torch, dtype), tokenizer)
    print(f"exported {path} to {options.output} ({dtype})")
    if tokenizer is None:
        print("warning: no tokenizer is known for this checkpoint; give --tokenizer-model to export one with it")
