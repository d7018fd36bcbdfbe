"""``export``: a checkpoint as a HuggingFace folder."""

from __future__ import annotations

from megatron_llama.commands.common.configs import ExportConfig
from megatron_llama.config.parse import Parsed
from megatron_llama.errors import ConfigError, describe


def export(parsed: Parsed) -> None:
    """Stream the weights tensor by tensor; the target appears whole or not at all."""
    from megatron_llama.checkpoint import checkpoint_dir
    from megatron_llama.checkpoint.storage_paths import local_copy
    from megatron_llama.conversion.export import export_adapter, export_checkpoint
    from megatron_llama.tokenizer.fingerprint import require_same_ids
    from megatron_llama.tokenizer.load import has_tokenizer, load_tokenizer

    options = parsed.get(ExportConfig)
    missing = [
        f"--{name}"
        for name, value in (("load", options.load), ("output", options.output))
        if not value
    ]
    if missing:
        do = f"give {' FOLDER '.join(missing)} FOLDER"
        raise ConfigError(describe(", ".join(missing), got="nothing", expected="a folder", do=do))
    path = checkpoint_dir.find(options.load)
    with local_copy(path.parent / checkpoint_dir.TOKENIZER) as saved:
        chosen = options.tokenizer_model or (saved if has_tokenizer(saved) else None)
        tokenizer = load_tokenizer(chosen) if chosen is not None else None
        if tokenizer is not None and chosen != saved and has_tokenizer(saved):
            do = "leave --tokenizer-model out, or give a tokenizer that only adds tokens behind"
            where = f"--tokenizer-model {chosen}"
            require_same_ids(tokenizer, load_tokenizer(saved), where=where, owner=saved, do=do)
        if options.adapter:
            dtype = export_adapter(path, options.output, tokenizer, overwrite=options.overwrite)
        else:
            dtype = export_checkpoint(
                path,
                options.output,
                dtype=options.dtype,
                tokenizer=tokenizer,
                overwrite=options.overwrite,
            )
    print(f"exported {path} to {options.output} ({dtype})")
    if tokenizer is None:
        print(
            "warning: no tokenizer is known for this checkpoint; give --tokenizer-model "
            "to export one with it"
        )
