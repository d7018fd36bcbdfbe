"""``generate``: continue prompts with a model folder of any format."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_llama.api.common.configs import ModelFolderConfig, SamplingConfig
from megatron_llama.commands.common.configs import GenerateConfig
from megatron_llama.config.parse import Parsed
from megatron_llama.errors import ConfigError, DataError, describe, listing
from megatron_llama.tokenizer.stream import StopStrings, TextStream

if TYPE_CHECKING:
    from megatron_llama.api.common.trained import Trained
    from megatron_llama.model.generate import FinishReason, Sampling

SECTIONS = (ModelFolderConfig, GenerateConfig, SamplingConfig)


def generate(parsed: Parsed) -> None:
    """Print each prompt with its continuation, in the order of the prompts: as the tokens come, or
    as JSON when it is done."""
    from megatron_llama.api.common.trained import open_trained, sampling_of

    options = parsed.get(GenerateConfig)
    sampling = parsed.get(SamplingConfig)
    drawing = sampling_of(sampling)
    prompts = _prompts(options, parsed)
    if options.batch_size < 1:
        raise ConfigError(
            describe("--batch-size", got=options.batch_size, expected="1 or more", do="correct it")
        )
    if "" in options.stop:
        raise ConfigError("--stop", got="an empty text", expected="some text", do="leave it out")
    model = open_trained(parsed.get(ModelFolderConfig))
    ids = _tokens(model, prompts)
    room = model.longest - max(map(len, ids))
    if "max_new_tokens" in parsed.explicit and room < sampling.max_new_tokens:
        cut = describe(
            "--max-new-tokens",
            got=sampling.max_new_tokens,
            expected=f"at most {room} behind the longest prompt",
            do=f"text ends where the model's {model.longest} positions do",
        )
        print(f"warning: {cut}", file=sys.stderr, flush=True)
    texts = [Text(model, *each, options.stop) for each in zip(prompts, ids, strict=True)]
    for start in range(0, len(texts), options.batch_size):
        batch = texts[start : start + options.batch_size]
        steps = grow(model, batch, drawing, sampling.seed)
        for number, text in enumerate(batch, start + 1):
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


def _tokens(model: Trained, texts: Sequence[str]) -> list[list[int]]:
    """Encode the prompts, with a warning where one begins twice. Raises DataError naming all that
    cannot be continued."""
    problems = []
    prompts = []
    bos = model.tokenizer.bos_id
    adds_bos = model.tokenizer.encode_prompt("a")[:1] == [bos]
    for number, text in enumerate(texts, 1):
        prompt = model.tokenizer.encode_prompt(text)
        if not prompt and bos is not None:
            prompt = [bos]  # nothing to continue: a text from its beginning
        where = "--prompt" if len(texts) == 1 else f"prompt {number}"
        if not prompt:
            expected = "some text, since this tokenizer has no begin token"
            problems.append(describe(where, got="no token", expected=expected, do="give a prompt"))
        elif (beyond := model.beyond(where, prompt)) is not None:
            problems.append(beyond)
        elif len(prompt) >= model.longest:
            expected = f"at most {model.longest - 1}, the model's max_position_embeddings less one"
            problems.append(
                describe(
                    where, got=f"{len(prompt)} tokens", expected=expected, do="shorten the prompt"
                )
            )
        elif adds_bos and prompt[:2] == [bos, bos]:
            got = f"the begin token {model.tokenizer.token(prompt[0])!r} twice"
            do = "leave it out of the prompt, since the tokenizer adds it"
            said = describe(where, got=got, expected="it once", do=do)
            print(f"warning: {said}", file=sys.stderr, flush=True)
        prompts.append(prompt)
    if problems:
        raise DataError(
            problems[0]
            if len(problems) == 1
            else listing("These prompts cannot be continued:", problems)
        )
    return prompts


class Text:
    """A prompt and its continuation, as far as it is made."""

    def __init__(
        self, model: Trained, prompt: str, ids: Sequence[int], stop: Sequence[str] = ()
    ) -> None:
        """``ids``: the tokens of the prompt; ``stop``: texts that end the continuation."""
        self.ids = ids
        self.finish_reason: FinishReason | None = None
        """Why the continuation ended, or None as long as it grows."""
        self._prompt = prompt
        self._model = model
        self._stream = TextStream(model.tokenizer, ids)
        self._stop = StopStrings(stop)
        self._token_ids: list[int] = []
        self._text = ""

    def add(self, token: int) -> None:
        """Continue the text by a token, which may end it by a stop text."""
        self._token_ids.append(token)
        self._text += self._stop.add(self._stream.add(token))
        if self._stop.found:
            self.finish_reason = "stop"

    def finish(self, reason: FinishReason) -> None:
        """End the text. The bytes that were no whole character yet may still hold a stop text."""
        self._text += self._stop.add(self._stream.rest()) + self._stop.rest()
        self.finish_reason = "stop" if self._stop.found else reason

    def pieces(self, steps: Iterator[None]) -> Iterator[str]:
        """Yield the prompt, as its tokens are decoded, then the continuation while it grows with
        ``steps``."""
        yield self._model.tokenizer.decode(self.ids)
        shown = 0
        while True:
            if shown < len(self._text):
                yield self._text[shown:]
                shown = len(self._text)
            if self.finish_reason is not None:
                return
            next(steps)

    def as_json(self, steps: Iterator[None]) -> str:
        """Return the whole as a JSON object, when ``steps`` have finished it."""
        while self.finish_reason is None:
            next(steps)
        return json.dumps(
            {
                "prompt": self._prompt,
                "text": self._text,
                "token_ids": self._token_ids,
                "finish_reason": self.finish_reason,
            }
        )


def grow(model: Trained, texts: Sequence[Text], sampling: Sampling, seed: int) -> Iterator[None]:
    """Continue all texts at the same time until all are finished. Each step adds a token to one of
    them or finishes it."""
    from megatron_llama.model.generate import generate_batch

    ended = set[int]()
    prompts = [text.ids for text in texts]
    for number, new in generate_batch(
        model.stage, prompts, sampling, stops=model.stops, seed=seed, ended=ended
    ):
        if isinstance(new, int):
            texts[number].add(new)
        else:
            texts[number].finish(new)
        if texts[number].finish_reason is not None:
            ended.add(number)
        yield
