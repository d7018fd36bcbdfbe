"""Continuations of prompts by a trained model."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_llama.data.tokenizer.stream import StopStrings, TextStream
from megatron_llama.errors import DataError, describe, listing
from megatron_llama.model.generate import FinishReason, Sampling, generate_batch
from megatron_llama.train.api.common.configs import GenerateConfig, SamplingConfig
from megatron_llama.train.api.common.trained import Trained
from megatron_llama.train.api.load import load
from megatron_llama.train.setup.checks.ranges import refuse_values


@dataclass(frozen=True)
class Generated:
    """A prompt and its continuation."""

    prompt: str
    text: str
    """The continuation alone."""
    token_ids: tuple[int, ...]
    """Its tokens; where a stop text has ended it, those of the stop text too."""
    finish_reason: FinishReason
    """``"stop"``: by an end token or a stop text; ``"length"``: by ``max_new_tokens`` or the
    model's longest sequence."""


def generate(
    model: str | Path | Trained,
    prompts: str | Sequence[str],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 0.95,
    seed: int = 1234,
    stop: Sequence[str] = (),
    batch_size: int = 8,
    bf16: bool = False,
) -> list[Generated]:
    """Continue ``prompts``, one or several, and return the results in their order. It works in one
    process.

    ``model`` is a model folder of any format, which is read in fp32, or in bfloat16 with ``bf16``;
    for several calls give what ``load(folder, "trained")`` returns. Tokens are drawn from the
    ``top_k`` most probable ones (0: no limit), and of these from the most probable ones that
    together have the probability ``top_p``, at ``temperature`` (0: always the most probable token).
    The same ``seed`` gives the same texts, whatever else is generated beside them. ``stop`` texts
    end a continuation as the end token does, and are no part of it. ``batch_size`` prompts are
    continued side by side.

    ```python
    import megatron_llama as ml

    model = ml.load("runs/hf", "trained", device="cpu")
    for result in ml.generate(model, ["The import statement", "A class"], max_new_tokens=8):
        print(result.prompt + result.text, result.finish_reason)
    ```

    A prompt that begins with the begin token, which the tokenizer adds, is a warning. Raises
    ConfigError for arguments that cannot be used, DataError for prompts that cannot be continued,
    and what ``load`` raises."""
    drawn = SamplingConfig(max_new_tokens, temperature, top_k, top_p, seed)
    refuse_values(GenerateConfig(batch_size=batch_size, stop=tuple(stop)), drawn)
    trained = (
        model
        if isinstance(model, Trained)
        else load(model, "trained", dtype="bfloat16" if bf16 else "float32")
    )
    whole = [prompts] if isinstance(prompts, str) else list(prompts)
    if not whole:
        return []
    ids, said = prompt_ids(trained, whole)
    for line in said:
        warnings.warn(line, stacklevel=2)
    texts = [Text(trained, *pair, stop) for pair in zip(whole, ids, strict=True)]
    results = []
    for batch, steps in batches(trained, texts, sampling_of(drawn), seed, batch_size):
        results += [text.whole(steps) for text in batch]
    return results


def sampling_of(options: SamplingConfig) -> Sampling:
    """Return the engine's settings for the drawing of tokens."""
    return Sampling(options.max_new_tokens, options.temperature, options.top_k, options.top_p)


def prompt_ids(model: Trained, texts: Sequence[str]) -> tuple[list[list[int]], list[str]]:
    """Encode the prompts. Returns the tokens of each, and a warning for each with two begin tokens.
    Raises DataError naming all that cannot be continued."""
    problems = []
    prompts = []
    said = []
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
            got = f"{len(prompt)} tokens"
            do = "shorten the prompt"
            problems.append(describe(where, got=got, expected=model.longest_prompt, do=do))
        elif adds_bos and prompt[:2] == [bos, bos]:
            got = f"the begin token {model.tokenizer.token(prompt[0])!r} twice"
            do = "leave it out of the prompt, since the tokenizer adds it"
            said.append(describe(where, got=got, expected="it once", do=do))
        prompts.append(prompt)
    if problems:
        raise DataError(
            problems[0]
            if len(problems) == 1
            else listing("These prompts cannot be continued:", problems)
        )
    return prompts, said


def batches(
    model: Trained, texts: Sequence[Text], sampling: Sampling, seed: int, batch_size: int
) -> Iterator[tuple[Sequence[Text], Iterator[None]]]:
    """Yield the texts that are continued side by side, and the steps by which they grow."""
    for start in range(0, len(texts), batch_size):
        batch = texts[start : start + batch_size]
        yield batch, grow(model, batch, sampling, seed)


class Text:
    """A prompt and its continuation so far."""

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

    def whole(self, steps: Iterator[None]) -> Generated:
        """Return the finished text, after the remaining ``steps``."""
        while self.finish_reason is None:
            next(steps)
        return Generated(self._prompt, self._text, tuple(self._token_ids), self.finish_reason)

    def as_json(self, steps: Iterator[None]) -> str:
        """Return the finished text as a JSON object, after the remaining ``steps``."""
        return json.dumps(asdict(self.whole(steps)))


def grow(model: Trained, texts: Sequence[Text], sampling: Sampling, seed: int) -> Iterator[None]:
    """Continue all texts at the same time until all are finished. Each step adds a token to a text
    or finishes it."""
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
