"""``generate``: continue prompts with a model folder of any format."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_llama.config.parse import Parsed
from megatron_llama.errors import ConfigError, DataError, describe
from megatron_llama.train.api.common.configs import (
    GenerateConfig,
    ModelFolderConfig,
    SamplingConfig,
)

SECTIONS = (ModelFolderConfig, GenerateConfig, SamplingConfig)


def generate(parsed: Parsed) -> None:
    """Print each prompt with its continuation, in the order of the prompts: as the tokens come, or
    as JSON when it is done."""
    from megatron_llama.train.api.generate import Text, batches, prompt_ids, sampling_of
    from megatron_llama.train.commands.common.trained import open_trained
    from megatron_llama.train.setup.checks.ranges import refuse_values

    options = parsed.get(GenerateConfig)
    drawn = parsed.get(SamplingConfig)
    refuse_values(options, drawn)
    prompts = _prompts(options, parsed)
    model = open_trained(parsed.get(ModelFolderConfig))
    ids, said = prompt_ids(model, prompts)
    room = model.longest - max(map(len, ids))
    if "max_new_tokens" in parsed.explicit and room < drawn.max_new_tokens:
        cut = describe(
            "--max-new-tokens",
            got=drawn.max_new_tokens,
            expected=f"at most {room} behind the longest prompt",
            do=f"text ends where the model's {model.longest} positions do",
        )
        said.append(cut)
    for line in said:
        print(f"warning: {line}", file=sys.stderr, flush=True)
    texts = [Text(model, *pair, options.stop) for pair in zip(prompts, ids, strict=True)]
    number = 0
    for batch, steps in batches(model, texts, sampling_of(drawn), drawn.seed, options.batch_size):
        for text in batch:
            number += 1
            if options.json:
                print(text.as_json(steps), flush=True)
                continue
            if len(texts) > 1:
                print("\n" * (number > 1) + f"=== prompt {number} ===")
            for piece in text.pieces(steps):
                print(piece, end="", flush=True)
            print(flush=True)


def _prompts(options: GenerateConfig, parsed: Parsed) -> Sequence[str]:
    if options.prompt_file is None:
        return options.prompt
    if "prompt" in parsed.explicit:
        raise ConfigError(
            describe(
                "--prompt, --prompt-file", got="both", expected="one of them", do="leave one out"
            )
        )
    try:
        texts = Path(options.prompt_file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            describe(
                options.prompt_file, got=error, expected="a text file (UTF-8)", do="check the path"
            )
        ) from error
    if not texts:
        raise DataError(
            describe(
                options.prompt_file,
                got="no line",
                expected="a prompt on each line",
                do="give another file",
            )
        )
    return texts
