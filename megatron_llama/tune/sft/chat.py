"""A tokenizer with its chat template: conversations to token ids, and the mask of those in the
loss."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_llama.data.tokenizer.base import Token, Tokenizer
from megatron_llama.data.tokenizer.chat_templates import (
    DEFAULT,
    read_chat_templates,
    replace_templates_in_config,
    write_chat_templates,
)
from megatron_llama.data.tokenizer.files import read_json_object, to_json
from megatron_llama.data.tokenizer.hf import as_hf_tokenizer
from megatron_llama.errors import DataError, counted, describe
from megatron_llama.files import replace_file
from megatron_llama.tune.sft.built_in_templates import BUILT_IN
from megatron_llama.tune.sft.families import family_of
from megatron_llama.tune.sft.formats import ASSISTANT, Conversation, Example, Passage
from megatron_llama.tune.sft.marks import LossOn, refuse_contradictions
from megatron_llama.tune.sft.problems import UnusableError
from megatron_llama.tune.sft.template import ChatTemplate, Rendered, find_template, own_template
from megatron_llama.tune.sft.unrendered import refuse_unrendered

GENERATION_FILE = "generation_config.json"
_SOMETHING = "an answer"


@dataclass(frozen=True)
class Encoded:
    """An example as tokens."""

    text: str
    """The rendered conversation."""
    ids: list[int]
    loss_mask: list[bool]
    """Whether each token is in the loss."""


class ChatTokenizer:
    """A Tokenizer that also encodes conversations.

    Only a ``tokenizer.json`` reads special tokens in a text, so any other tokenizer is converted to
    one. Raises DataError if this is impossible, or if there is no end token."""

    def __init__(
        self, tokenizer: Tokenizer, wanted: str | None = None, *, now: datetime | None = None
    ) -> None:
        """``wanted``: a template's file or name, instead of the tokenizer's own. ``now``: the day
        for a template that writes it into the text."""
        self._tokenizer = tokenizer
        self._wanted = wanted
        self._built_in = wanted if wanted in BUILT_IN else None
        self._now = now
        self.vocab_size = tokenizer.vocab_size
        self.base_vocab_size = tokenizer.base_vocab_size
        self.bos_id = tokenizer.bos_id
        self.eos_id = tokenizer.eos_id
        self._reader = as_hf_tokenizer(tokenizer)
        path: Path | None = getattr(tokenizer, "path", None)
        self._folder = path.parent if path is not None else None
        self.template = find_template(wanted, self._folder, self._reader.special_names(), now)
        if self.eos_id is None and not self._reader.frame[1]:
            where = str(path or "the tokenizer")
            raise DataError(
                describe(
                    where,
                    got="no end token",
                    expected="one, which ends answers",
                    do="use another tokenizer",
                )
            )

    def identity(self) -> dict[str, Any]:
        """Return everything here on which the tokens of examples depend, for JSON, except the day
        that a template may write into the text."""
        return {
            "the tokenizer": [self._reader.identity(), self.bos_id, self.eos_id, self.vocab_size],
            "the chat template": [self.template.name, *self.template.sources],
        }

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def encode_prompt(self, text: str) -> list[int]:
        return self._tokenizer.encode_prompt(text)

    def encode_packed(self, texts: Sequence[str]) -> list[bytes]:
        return self._tokenizer.encode_packed(texts)

    def encode_long(self, text: str) -> Iterator[bytes]:
        return self._tokenizer.encode_long(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def tokens(self) -> list[Token]:
        return self._tokenizer.tokens()

    def token(self, id: int) -> str | None:
        return self._tokenizer.token(id)

    def save_hf(self, folder: str | Path) -> None:
        """Write the tokenizer and the chat template, with the token that ends an answer among those
        that end generation.

        A given template replaces all templates of the tokenizer, which are kept otherwise. They are
        also kept if the given one renders last answers as the tokenizer's own does: the own one
        also renders prompts, which training does not need."""
        self._tokenizer.save_hf(folder)
        own = self._own_templates
        if self._wanted is None or (self._built_in and self._family == self._built_in):
            templates = own or {DEFAULT: self.template.source}
        else:
            templates = {DEFAULT: self.template.source}
        write_chat_templates(Path(folder), templates)
        if templates != own:
            replace_templates_in_config(Path(folder), templates)
        path = Path(folder) / GENERATION_FILE
        config = read_json_object(path) if path.is_file() else {"bos_token_id": self.bos_id}
        given = config.get("eos_token_id", self.eos_id)
        known = given if isinstance(given, list) else [] if given is None else [given]
        with suppress(UnusableError):  # a template that renders no usual conversation
            more = sorted(self.ends().difference(known))
            if more:
                replace_file(path, to_json({**config, "eos_token_id": [*known, *more]}))

    def spelt(self, ids: Sequence[int]) -> list[str]:
        """Return a text for each token: the token decoded alone, or its name if that is empty."""
        return [self._reader.decode([id]) or self._reader.token(id) or f"<{id}>" for id in ids]

    def prompt(self, text: str) -> list[int]:
        """Encode a user's message and the beginning of an answer. Raises DataError if the template
        cannot render it."""
        try:
            return self.continued([{"role": "user", "content": text}])
        except UnusableError as problem:
            raise DataError(str(problem.at(f"prompt {text[:40]!r}"))) from problem

    def continued(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Encode messages and the beginning of an answer. Raises UnusableError if the template
        cannot render them, or a message contains a special token."""
        for message in messages:
            self._refuse_special(message["content"])
        return self._reader.encode(self.template.render(messages, prompt=True).text)

    def ends(self) -> frozenset[int]:
        """Return the token with which the template ends an answer, special or the end token; empty
        if there is none. Raises UnusableError if the template renders no usual conversation."""
        return self._ends(self._behind_answer())

    def require_end(self) -> tuple[str, ...]:
        """Check that answers end with a token at which a trained model can stop. Return a warning,
        if any: a template of the user's own may end answers by text. Raises DataError for a
        built-in template whose marker the tokenizer lacks."""
        try:
            behind = self._behind_answer()
        except UnusableError:  # its examples say why
            return ()
        if self._ends(behind):
            return ()
        marker = behind.strip()
        path = getattr(self._tokenizer, "path", "the tokenizer")
        count = counted(len(self._reader.encode(marker)), "ordinary token")
        got = f"answers that end with {marker!r}, which {path} spells with {count}"
        said = describe(
            f"--chat-template {self._built_in}" if self._built_in else self.template.name,
            got=got if marker else "answers that end with no token",
            expected="a special token or the end token, else the model never stops",
            do="choose a template whose markers the tokenizer has (plain needs only an end token), "
            "or add the marker to the tokenizer as a special token and give --resize-embeddings",
        )
        if self._built_in:
            raise DataError(said)
        return (f"warning: {said}",)

    def _behind_answer(self) -> str:
        """Return the text that the template writes after an answer."""
        before = [{"role": "user", "content": "?"}]
        text = self.template.render([*before, {"role": ASSISTANT, "content": _SOMETHING}]).text
        return text.rpartition(_SOMETHING)[2]

    def _ends(self, behind: str) -> frozenset[int]:
        # A built-in template's marker has no other use, even as a token that is not special. A
        # user's may be any word, which answers contain too.
        ends = {*self._reader.special_texts, *([behind.strip()] if self._built_in else [])}
        for id in self._reader.encode(behind):
            if id == self.eos_id or self._reader.token(id) in ends:
                return frozenset({id})
        return frozenset()

    def read(self, example: Example, loss_on: LossOn) -> Encoded:
        """Encode an example. Raises UnusableError if no token of it would be in the loss, or if the
        answers cannot be told from the rest."""
        if isinstance(example, Passage):
            return self._passage(example, loss_on)
        for text in example.texts:
            self._refuse_special(text)
        refuse_contradictions(example, loss_on)
        template = self.template.of(example.tools)
        whole = _rendered(template, example)
        refuse_unrendered(template, example, whole, loss_on)
        ids, places = self._reader.encode_with_places(whole.text)
        if loss_on == "all":
            left_out = _overlapping(places, [*self._left_out(template, example, whole.text)])
            return _useful(whole.text, ids, [not out for out in left_out])
        answers = self._answers(template, example, whole, loss_on)
        return _useful(whole.text, ids, _overlapping(places, answers))

    def read_prompt(self, prompt: Conversation | Passage) -> Encoded:
        """Encode the text before an answer: messages with the beginning of an answer, or the prompt
        of a passage with the tokenizer's first tokens. Nothing of it is in the loss. Raises
        UnusableError if the template cannot render it."""
        if isinstance(prompt, Passage):
            text = prompt.prompt
            ids = self._reader.encode(text)
            before, _ = self._reader.frame
            if ids[: len(before)] != before:
                ids = [*before, *ids]
        else:
            text = _rendered(self.template.of(prompt.tools), prompt, prompt=True).text
            ids = self._reader.encode(text)
        return Encoded(text, ids, [False] * len(ids))

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """A pattern of texts that no message may spell: special tokens, and tokens that the
        template writes around messages, though the tokenizer does not call them special. A token of
        only letters and digits is a word, which messages may have."""
        around = ""
        with suppress(UnusableError):  # a template that renders no usual conversation
            around = self.template.render([{"role": "user", "content": "?"}]).text
            around += self._behind_answer()
        markers = [
            text
            for text in self._reader.added_texts
            if text in around and not text.isalnum() and not text.isspace()
        ]
        texts = sorted({*self._reader.special_texts, *markers}, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    def _refuse_special(self, text: str) -> None:
        if (match := self._special.search(text)) is not None:
            got = f"the special token {match[0]!r} at character {match.start()}"
            do = "reword the message: the model would take it for the end of one"
            raise UnusableError("special token in a message", got=got, expected="text", do=do)

    def _passage(self, example: Passage, loss_on: LossOn) -> Encoded:
        """Encode plain text with the tokenizer's first and last tokens, and with an end token; a
        begin or end token of the text itself is not repeated."""
        text = example.prompt + example.completion
        ids, places = self._reader.encode_with_places(text)
        loss_mask = (
            [True] * len(ids)
            if loss_on == "all"
            else _overlapping(places, [(len(example.prompt), len(text))])
        )
        before, behind = self._reader.frame
        if ids[: len(before)] != before:
            ids = [*before, *ids]
            loss_mask = [*[loss_on == "all"] * len(before), *loss_mask]
        if self.eos_id is not None and behind[-1:] != [self.eos_id]:
            behind = [*behind, self.eos_id]
        if ids[len(ids) - len(behind) :] != behind:
            ids = [*ids, *behind]
            loss_mask = [*loss_mask, *[True] * len(behind)]
        return _useful(text, ids, loss_mask)

    def _answers(
        self, template: ChatTemplate, example: Conversation, whole: Rendered, loss_on: LossOn
    ) -> Sequence[tuple[int, int]]:
        """Return the ranges of the text's characters that are in the loss."""
        if loss_on == "last":
            # It was checked that the answer is to be learned.
            return self._last_answer(template, example, whole)
        unlearned = example.unlearned | example.answers_in_prompt
        if template.marks_answers and not unlearned:
            return whole.answers
        by_message = (
            self._marked_answers(template, example, whole)
            if template.marks_answers
            else self._differences(template, example, whole.text)
        )
        return [(start, stop) for index, start, stop in by_message if index not in unlearned]

    def _last_answer(
        self, template: ChatTemplate, example: Conversation, whole: Rendered
    ) -> Sequence[tuple[int, int]]:
        """Return the characters of the last answer, however the template renders earlier ones."""
        before = _rendered(template, example, len(example.messages) - 1, prompt=True)
        earlier = before.answer_texts()
        if template.marks_answers:
            if whole.answer_texts()[: len(earlier)] == earlier:
                return whole.answers[len(earlier) :]
        elif whole.text.startswith(before.text):
            return [(len(before.text), len(whole.text))]
        got = "a template that renders the messages before the last answer differently without it"
        raise self._inseparable(template, got, "all")

    def _marked_answers(
        self, template: ChatTemplate, example: Conversation, whole: Rendered
    ) -> Iterator[tuple[int, int, int]]:
        """Yield the ranges in ``{% generation %}``, each after the number of the message with which
        it appears."""
        known = 0
        last = len(example.messages) - 1
        for index, message in enumerate(example.messages):
            if message["role"] != ASSISTANT:
                continue
            count = len(whole.answers)
            if index < last:
                # Without a prompt after it, some templates end the last answer by another token.
                until = _rendered(template, example, index + 1, prompt=True)
                starts = [start for start, _ in until.answers]
                count = len(starts)
                if (
                    count < known
                    or starts != [start for start, _ in whole.answers[:count]]
                    or not whole.text.startswith(until.text[: starts[-1] if starts else 0])
                ):
                    raise self._changing(template, index + 1)
            for start, stop in whole.answers[known:count]:
                yield index, start, stop
            known = count

    def _left_out(
        self, template: ChatTemplate, example: Conversation, whole: str
    ) -> Iterator[tuple[int, int]]:
        """Yield the characters that each message marked as not to be learned adds to the text."""
        for index in sorted(example.unlearned):
            before = _rendered(template, example, index).text if index else ""
            until = _rendered(template, example, index + 1).text
            if not (until.startswith(before) and whole.startswith(until)):
                raise self._changing(template, index + 1, "assistant or last")
            yield len(before), len(until)

    def _differences(
        self, template: ChatTemplate, example: Conversation, whole: str
    ) -> Iterator[tuple[int, int, int]]:
        """Yield the number of each answer's message, and the characters that it adds to the text of
        earlier messages."""
        for index, message in enumerate(example.messages):
            if message["role"] != ASSISTANT:
                continue
            before = _rendered(template, example, index, prompt=True).text
            until = _rendered(template, example, index + 1).text
            if not (until.startswith(before) and whole.startswith(until)):
                raise self._changing(template, index + 1)
            yield index, len(before), len(until)

    def _changing(
        self, template: ChatTemplate, count: int, others: str = "last or all"
    ) -> UnusableError:
        """Return the error of a template that changes the first ``count`` messages when others
        follow; ``others`` are values of --loss-on that may work."""
        got = f"a template that renders messages[:{count}] differently when others follow"
        return self._inseparable(template, got, others)

    def _inseparable(self, template: ChatTemplate, got: str, others: str) -> UnusableError:
        do = f"mark the answers in {template.name}, or give --chat-template or --loss-on {others}"
        if self._family is not None:
            do = (
                f"give --chat-template {self._family}, which renders each answer as this one "
                f"renders a last one, or --loss-on {others}"
            )
        return UnusableError(
            "answers cannot be told apart",
            got=got,
            expected="{% generation %} around answers, or a text that only grows with each message",
            do=do,
        )

    @cached_property
    def _own_templates(self) -> dict[str, str]:
        """Return the templates of the tokenizer by name; none if there are none, or if they cannot
        be read."""
        if self._folder is None:
            return {}
        with suppress(DataError):
            return {name: entry.text for name, entry in read_chat_templates(self._folder).items()}
        return {}

    @cached_property
    def _family(self) -> str | None:
        """The built-in template that renders last answers like the tokenizer's own template."""
        if self._folder is None:
            return None
        names = self._reader.special_names()
        with suppress(DataError):
            own = own_template(self._folder, names, self._now)
            return None if own is None else family_of(own, names, self._now)
        return None


def _rendered(
    template: ChatTemplate, example: Conversation, count: int | None = None, *, prompt: bool = False
) -> Rendered:
    """Render the first ``count`` messages of a conversation; None: all of them."""
    return template.render(
        example.messages[:count], example.tools, prompt=prompt, variables=example.variables
    )


def _overlapping(places: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """Return whether each token stands for a character of a span. Both are in the order of the
    text."""
    begins = [begin for begin, _ in places]
    # A token without a character of its own, such as a space put in front, stands for the next one.
    ends = [end if end > begin else begin + 1 for begin, end in places]
    loss_mask = [False] * len(places)
    for start, stop in spans:
        first, behind = bisect_right(ends, start), bisect_left(begins, stop)
        loss_mask[first:behind] = [True] * (behind - first)
    return loss_mask


def _useful(text: str, ids: list[int], loss_mask: list[bool]) -> Encoded:
    if not any(loss_mask[1:]):
        do = "leave the example out, or mend the template: nothing of it would be learned"
        raise UnusableError(
            "zero target tokens",
            got=f"{len(ids)} tokens, none of an answer",
            expected="one or more to learn",
            do=do,
        )
    return Encoded(text, ids, loss_mask)
