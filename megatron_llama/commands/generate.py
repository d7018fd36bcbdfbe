"""``generate``: continue prompts with a model folder of any format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_llama.commands.common.configs import GenerateConfig, ModelFolderConfig, SamplingConfig
from megatron_llama.config.parse import Parsed
from megatron_llama.errors import ConfigError, DataError, describe, listing

if TYPE_CHECKING:
    from megatron_llama.commands.common.trained import Trained
    from megatron_llama.model.generate import Sampling

SECTIONS = (ModelFolderConfig, GenerateConfig, SamplingConfig)


def generate(parsed: Parsed) -> None:
    """Print each prompt with its continuation, in the order of the prompts, as the tokens come."""
    from megatron_llama.commands.common.trained import open_trained, sampling_of

    options = parsed.get(GenerateConfig)
    sampling = parsed.get(SamplingConfig)
    drawing = sampling_of(sampling)
    texts = _prompt_texts(options, parsed)
    if options.batch_size < 1:
        raise ConfigError(
            describe("--batch-size", got=options.batch_size, expected="1 or more", do="correct it")
        )
    model = open_trained(parsed.get(ModelFolderConfig))
    prompts = _tokens(model, texts)
    for start in range(0, len(prompts), options.batch_size):
        batch = prompts[start : start + options.batch_size]
        for text in continued(model, batch, drawing, sampling.seed):
            print(text, end="", flush=True)


def _prompt_texts(options: GenerateConfig, parsed: Parsed) -> Sequence[str]:
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


def _tokens(model: Trained, texts: Sequence[str]) -> list[list[int]]:
    """Encode the prompts. Raises DataError naming all that cannot be continued."""
    bos = model.tokenizer.bos_id
    problems = []
    prompts = []
    for number, text in enumerate(texts, 1):
        prompt = [*([bos] if bos is not None else []), *model.tokenizer.encode(text)]
        where = "--prompt" if len(texts) == 1 else f"prompt {number}"
        if not prompt:
            expected = "some text, since this tokenizer has no begin token"
            problems.append(describe(where, got="no token", expected=expected, do="give a prompt"))
        elif len(prompt) >= model.longest:
            expected = f"at most {model.longest - 1}, the model's max_position_embeddings less one"
            problems.append(
                describe(
                    where, got=f"{len(prompt)} tokens", expected=expected, do="shorten the prompt"
                )
            )
        prompts.append(prompt)
    if problems:
        raise DataError(
            problems[0]
            if len(problems) == 1
            else listing("These prompts cannot be continued:", problems)
        )
    return prompts


def continued(
    model: Trained, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int
) -> Iterator[str]:
    """Yield the prompts with their continuations, each with a newline at its end, piece by piece.

    All prompts grow at the same time, but a terminal shows one after the other: the first that is
    not done is shown as its tokens come, the others when those before them are done."""
    from megatron_llama.model.generate import generate_batch
    from megatron_llama.tokenizer.stream import TextStream

    streams = [TextStream(model.tokenizer, prompt) for prompt in prompts]
    first, *others = (model.tokenizer.decode(prompt) for prompt in prompts)
    yield first
    waiting = ["", *others]
    done = set[int]()
    front = 0
    for number, token in generate_batch(
        model.stage, prompts, sampling, stops=model.stops, seed=seed
    ):
        if token is None:
            waiting[number] += streams[number].rest() + "\n"
            done.add(number)
        else:
            waiting[number] += streams[number].add(token)
        while front < len(prompts):
            text = waiting[front]
            waiting[front] = ""
            if text:
                yield text
            if front not in done:
                break
            front += 1
