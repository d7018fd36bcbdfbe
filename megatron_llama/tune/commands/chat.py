"""``chat``: a conversation with a trained model, through its tokenizer's chat template."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING

from megatron_llama.config.parse import Parsed
from megatron_llama.errors import DataError, UserError, describe
from megatron_llama.train.api.common.configs import ModelFolderConfig, SamplingConfig
from megatron_llama.tune.chat_config import ChatConfig

if TYPE_CHECKING:
    from megatron_llama.model.generate import Sampling
    from megatron_llama.train.api.common.trained import Trained
    from megatron_llama.tune.sft.chat import ChatTokenizer

SECTIONS = (ModelFolderConfig, ChatConfig, SamplingConfig)
COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "/help": "show this list",
        "/reset": "forget the conversation, but not --system",
        "/quit": "end, as the end of the input does",
    }
)
HELP = "\n".join(
    [
        *(f"  {name:8}{meaning}" for name, meaning in COMMANDS.items()),
        "Every other line is a message; one that begins with / needs a space before it.",
    ]
)


def chat(parsed: Parsed) -> None:
    """Read messages line by line, from a terminal or a pipe, and print each answer as its tokens
    come. Raises DataError if the template can render no conversation."""
    from megatron_llama.train.api.generate import sampling_of
    from megatron_llama.train.commands.common.trained import open_trained
    from megatron_llama.train.setup.checks.ranges import refuse_values
    from megatron_llama.tune.sft.chat import ChatTokenizer
    from megatron_llama.tune.sft.problems import UnusableError

    options = parsed.get(ChatConfig)
    drawn = parsed.get(SamplingConfig)
    refuse_values(drawn)
    model = open_trained(parsed.get(ModelFolderConfig))
    speaker = ChatTokenizer(model.tokenizer, options.chat_template)
    try:
        talk = Talk(model, speaker, sampling_of(drawn), seed=drawn.seed, system=options.system)
    except UnusableError as error:
        raise DataError(str(error.at("--chat-template"))) from error
    print(f" {speaker.template.name}; /help lists the commands", file=sys.stderr, flush=True)
    for line in lines():
        if line == "/quit":
            return
        if line == "/reset":
            talk.reset()
        elif line.startswith("/"):
            unknown = "" if line == "/help" else f"error: {line.split()[0]} is no command\n"
            print(f"{unknown}{HELP}", file=sys.stderr, flush=True)
        else:
            try:
                for piece in talk.answer(line.strip()):
                    print(piece, end="", flush=True)
                print(flush=True)
            except (UserError, UnusableError) as error:  # the next message may fit
                said = error.at("the message") if isinstance(error, UnusableError) else error
                print(f"error: {said}", file=sys.stderr, flush=True)


def lines() -> Iterator[str]:
    """Yield the lines of the standard input that are not empty. On a terminal they can be edited,
    and the arrow keys bring back earlier lines."""
    asked = sys.stdin.isatty()
    edited = asked and sys.stdout.isatty()
    if edited:
        with suppress(ImportError):  # it is no part of every Python
            import readline  # noqa: F401  # input() edits with it once it is imported
    while True:
        if asked and not edited:
            print("> ", end="", file=sys.stderr, flush=True)  # the answers alone go to stdout
        try:
            line = input("> " if edited else "").rstrip()
        except EOFError:
            if asked:
                print(file=sys.stderr)
            return
        if line:
            yield line


class Talk:
    """A conversation. The model keeps the tokens that it has read: with each message it reads only
    new ones, unless the template now renders earlier messages differently."""

    def __init__(
        self,
        model: Trained,
        speaker: ChatTokenizer,
        sampling: Sampling,
        *,
        seed: int,
        system: str | None,
    ) -> None:
        self._model = model
        self._speaker = speaker
        self._sampling = sampling
        self._seed = seed
        self._opening = [{"role": "system", "content": system}] if system is not None else []
        self._stops = model.stops | speaker.ends()
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        import torch

        from megatron_llama.model.generate import Reader

        self._reader = Reader(self._model.stage)
        self._read = list[int]()
        self._said: list[dict[str, str]] = []
        self._generator = torch.Generator().manual_seed(self._seed)

    def answer(self, message: str) -> Iterator[str]:
        """Yield the answer piece by piece. Raises DataError or UnusableError, and forgets the
        message, if it is too long or the template cannot render it.

        When the conversation gets longer than the model's longest sequence, the oldest messages are
        forgotten."""
        from megatron_llama.data.tokenizer.stream import TextStream
        from megatron_llama.model.generate import continue_sequence

        said, ids = self._fitting([*self._said, {"role": "user", "content": message}])
        known = next(
            (at for at, (old, new) in enumerate(zip(self._read, ids, strict=False)) if old != new),
            min(len(self._read), len(ids)),
        )
        known = min(known, len(ids) - 1)  # something has to be read, for its logits
        self._reader.truncate(known)
        stream = TextStream(self._model.tokenizer)
        new = list[int]()
        answer = continue_sequence(
            self._reader,
            ids[known:],
            self._sampling,
            stops=self._stops,
            generator=self._generator,
            longest=self._model.longest,
        )
        for token in answer:
            new.append(token)
            yield stream.add(token)
        yield stream.rest()
        [length] = self._reader.lengths
        self._read = [*ids, *new][:length]
        self._said = [*said, {"role": "assistant", "content": self._model.tokenizer.decode(new)}]

    def _fitting(self, said: list[dict[str, str]]) -> tuple[list[dict[str, str]], list[int]]:
        """Return as many of the newest messages as fit, and their tokens."""
        while True:
            ids = self._speaker.continued([*self._opening, *said])
            if (beyond := self._model.beyond("the message", ids)) is not None:
                raise DataError(beyond)
            if len(ids) < self._model.longest:
                return said, ids
            if len(said) <= 2:
                got = f"{len(ids)} tokens"
                expected = self._model.longest_prompt
                raise DataError(
                    describe("the message", got=got, expected=expected, do="shorten it")
                )
            said = said[2:]
