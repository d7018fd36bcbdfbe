"""The model that --load or --init-from-hf names."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from megatron_llama.errors import ConfigError, describe
from megatron_llama.train.api.common.configs import ModelFolderConfig

if TYPE_CHECKING:
    from megatron_llama.train.api.common.trained import Trained


def open_trained(options: ModelFolderConfig) -> Trained:
    """Read the model folder that the options name, and print its notes. Raises ConfigError,
    CheckpointError or DataError."""
    from megatron_llama.train.api.load import load

    model = load(
        require_one_folder(options.load, options.init_from_hf),
        "trained",
        dtype="bfloat16" if options.bf16 else "float32",
        tokenizer_model=options.tokenizer_model,
        hf_config=options.hf_config,
        vocab_size=options.vocab_size,
        ignore_hf_config_fields=options.ignore_hf_config_fields,
    )
    for note in model.notes:
        print(f"note: {note}", file=sys.stderr, flush=True)
    return model


def require_one_folder(load: str | None, init_from_hf: str | None) -> str:
    """Return the folder that exactly one of the two names. Raises ConfigError."""
    if (load is None) == (init_from_hf is None):
        got = "neither" if load is None else "both"
        do = "give --load FOLDER or --init-from-hf FOLDER"
        raise ConfigError(
            describe("--load, --init-from-hf", got=got, expected="one of them", do=do)
        )
    return load or init_from_hf or ""
