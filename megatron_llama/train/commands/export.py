"""``export``: a checkpoint as a HuggingFace folder."""

from __future__ import annotations

from megatron_llama.config.parse import Parsed
from megatron_llama.errors import ConfigError, describe
from megatron_llama.train.commands.common.configs import ExportConfig


def export(parsed: Parsed) -> None:
    """Stream the weights tensor by tensor; the target appears whole or not at all."""
    from megatron_llama.train.api.save_hf import save_hf

    options = parsed.get(ExportConfig)
    missing = [
        f"--{name}"
        for name, value in (("load", options.load), ("output", options.output))
        if not value
    ]
    if missing:
        do = f"give {' FOLDER '.join(missing)} FOLDER"
        raise ConfigError(describe(", ".join(missing), got="nothing", expected="a folder", do=do))
    saved = save_hf(
        options.load,
        options.output,
        dtype=options.dtype,
        tokenizer_model=options.tokenizer_model,
        adapter=options.adapter,
        overwrite=options.overwrite,
    )
    print(f"exported {saved.source} to {options.output} ({saved.dtype})")
    if not saved.has_tokenizer:
        print(
            "warning: no tokenizer is known for this checkpoint; give --tokenizer-model "
            "to export one with it"
        )
