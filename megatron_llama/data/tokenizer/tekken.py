"""Mistral's ``tekken.json``: ranks as in ``tiktoken``, with the expression that cuts a text and the
special tokens in the file."""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex

from megatron_llama.config.fields import read_fields
from megatron_llama.config.limits import LARGEST_TOKENIZER_FILE, LARGEST_VOCABULARY
from megatron_llama.data.tokenizer.files import read_json_object
from megatron_llama.data.tokenizer.library import foreign_reader
from megatron_llama.data.tokenizer.tiktoken import Ranks, TiktokenTokenizer
from megatron_llama.errors import DataError

BOS = "<s>"
EOS = "</s>"
UNNAMED = (
    *("<unk>", BOS, EOS, "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
"""Special tokens of files up to version 7 that do not list them."""
LAST_UNNAMED = 7
COPY = "copy the file again, or give the model's tokenizer.json"


class TekkenTokenizer(TiktokenTokenizer):
    """A ``tekken.json``. Ids are those of mistral-common's ``Tekkenizer``: special tokens come
    first, and a literal ``[INST]`` in a text stays text."""

    def read_ranks(self) -> Ranks:
        content = read_json_object(self.path, limit=LARGEST_TOKENIZER_FILE)
        try:
            ranks = _ranks(content)
        except DataError as error:
            raise DataError(f"{self.path} {error}") from error
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            got = f"a missing {error}" if isinstance(error, KeyError) else error
            raise self._damaged(got) from error
        with foreign_reader(self.path, expected="an expression in config pattern", do=COPY):
            Regex(ranks.split)
        if problem := _problem(ranks):
            raise self._damaged(problem)
        return ranks

    def save_beside(self, folder: Path) -> None:
        """Write nothing more: beside a tekken.json transformers would not read a tokenizer.json if
        mistral-common is installed."""

    def _damaged(self, got: object) -> DataError:
        return DataError(
            self.path, got=got, expected="a tekken.json as Mistral's models have it", do=COPY
        )


def _ranks(content: Mapping[str, Any]) -> Ranks:
    """Return the ranks. Raises KeyError, TypeError or ValueError if it is no tekken.json."""
    config = content["config"]
    with read_fields(config, "config", do=COPY, error=DataError) as fields:
        number = fields.integer("default_num_special_tokens", high=LARGEST_VOCABULARY)
        count = fields.integer("default_vocab_size", high=LARGEST_VOCABULARY) - number
        split = fields.text("pattern")
    entries = content["vocab"][: max(count, 0)]
    if [entry["rank"] for entry in entries] != [*range(count)]:
        raise ValueError(f"vocab without some of the ranks up to {count - 1}, or in another order")
    return Ranks(
        tokens=[b64decode(entry["token_bytes"], validate=True) for entry in entries],
        special=_special_tokens(content, number),
        split=split,
        bos=BOS,
        eos=EOS,
        special_first=True,
    )


def _special_tokens(content: Mapping[str, Any], number: int) -> list[str]:
    listed = content.get("special_tokens")
    if listed is None:
        version = re.fullmatch(r"v(\d+)", str(content["config"]["version"]))
        if version is None or int(version[1]) > LAST_UNNAMED:
            raise ValueError(f"no special_tokens, in version {content['config']['version']}")
        named = [*UNNAMED]
    else:
        if [entry["rank"] for entry in listed] != [*range(len(listed))]:
            raise ValueError("special_tokens whose ranks are not 0, 1, 2 and so on")
        named = [entry["token_str"] for entry in listed]
    if len(named) > number:
        raise ValueError(f"{len(named)} special_tokens, default_num_special_tokens is {number}")
    return [*named, *(f"<SPECIAL_{id}>" for id in range(len(named), number))]


def _problem(ranks: Ranks) -> str:
    """Return the reason why the tokens are no vocabulary, or an empty text."""
    tokens = frozenset(ranks.tokens)
    if len(tokens) != len(ranks.tokens) or len({*ranks.special}) != len(ranks.special):
        return "a token that comes twice"
    lacking = [byte for byte in range(256) if bytes([byte]) not in tokens]
    if lacking:
        return f"no token for the byte {lacking[0]:#04x}"
    both = [text for text in ranks.special if text.encode() in tokens]
    if both:
        return f"{both[0]!r} as a special token and as a usual one"
    absent = [text for text in (ranks.bos, ranks.eos) if text not in ranks.special]
    return f"no special token {absent[0]!r}" if absent else ""
