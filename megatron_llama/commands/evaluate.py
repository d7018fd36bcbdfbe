"""``evaluate``: loss and perplexity of a model, on an indexed dataset or on text."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from megatron_llama.commands import pretrain
from megatron_llama.commands.common.configs import EvaluateConfig
from megatron_llama.config.parse import Parsed, parse
from megatron_llama.config.schema import CheckpointConfig, DataConfig, TrainingConfig
from megatron_llama.errors import ConfigError, describe

SECTIONS = (EvaluateConfig, *pretrain.SECTIONS)
LONGEST = TrainingConfig().seq_length
"""Tokens of a sample of text, unless the model or --seq-length says otherwise."""


def evaluate(parsed: Parsed) -> None:
    """Print loss and perplexity of --load or --init-from-hf."""
    from megatron_llama.checkpoint.storage_paths import local_copy
    from megatron_llama.commands.common.trained import open_folder, tokenizer_folder

    options = parsed.get(EvaluateConfig)
    if not options.text:
        if not parsed.get(DataConfig).data_path:
            do = "give --data-path PREFIX of a dataset, or --text FILE"
            raise ConfigError(
                describe("--data-path, --text", got="neither", expected="one of them", do=do)
            )
        pretrain.evaluate(parsed)
        return
    given = [name for name in ("data_path", "split") if name in parsed.explicit]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(
            describe(
                names, got="given with --text", expected="one or the other", do="leave one out"
            )
        )
    weights = parsed.get(CheckpointConfig)
    source = open_folder(weights.load, weights.init_from_hf)
    # Every process makes its own dataset: the tokens are the same, and machines need not share a
    # disk.
    with tempfile.TemporaryDirectory() as folder, local_copy(tokenizer_folder(source)) as own:
        tokenizer = parsed.get(DataConfig).tokenizer_model or str(own)
        pretrain.evaluate(
            _with_text(
                parsed,
                options.text,
                Path(folder) / "text",
                tokenizer,
                source.model.max_position_embeddings,
            )
        )


def _with_text(
    parsed: Parsed, text: tuple[str, ...], prefix: Path, tokenizer: str, longest: int
) -> Parsed:
    """Return the command line with a dataset of all of the text in it, whose samples are no longer
    than ``longest``."""
    from megatron_llama.data.preprocess import preprocess
    from megatron_llama.data.preprocess_config import PreprocessConfig
    from megatron_llama.tokenizer.load import load_tokenizer

    data = parsed.get(DataConfig)
    training = parsed.get(TrainingConfig)
    kind = data.tokenizer_type
    ends = load_tokenizer(tokenizer, data.tokenizer_type).eos_id is not None
    made = preprocess(
        PreprocessConfig(
            input=text,
            output_prefix=str(prefix),
            tokenizer_model=tokenizer,
            tokenizer_type=kind,
            append_eod=ends,
        )
    )
    all_of_it = parse(
        ("--data-path", str(prefix), "--split", "0,100,0"), [DataConfig], aliases={}
    ).get(DataConfig)
    data = replace(data, data_path=all_of_it.data_path, split=all_of_it.split)
    if "seq_length" not in parsed.explicit:
        training = replace(training, seq_length=max(1, min(LONGEST, longest, made.tokens - 1)))
    return replace(
        parsed, instances={**parsed.instances, DataConfig: data, TrainingConfig: training}
    )
