"""Mistral's own tokenizers, of the package mistral-common: the ids are those of its code, and after an export those of transformers. Run by
``tests/mistral.sh``."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from megatron_llama.data.tokenizer.fingerprint import difference
from megatron_llama.data.tokenizer.load import load_tokenizer
from megatron_llama.data.tokenizer.packed import unpack
from transformers import AutoTokenizer

from tests.data.tokenizer.test_tiktoken import library, random_characters, runs

pytestmark = pytest.mark.mistral
SPELT = ["[REF]", "[/REF]", "[REFERENCE_DOC_0]", "[REFERENCE_DOC_11]", " ", "a", "\n", "[", "  ", "é", "ref", "[INST]", "[/INST]", "</s>", "<s>"]
SYMBOLS = SPELT[:4]


@pytest.fixture(scope="module")
def data() -> Path:
    import mistral_common

    return Path(mistral_common.__file__).parent / "data"


@pytest.fixture(scope="module")
def documents(chunks: list[str]) -> list[str]:
    draw = random.Random(0)
    spelt = ["".join(draw.choices(SPELT, k=draw.randrange(2, 9))) for _ in range(2000)]
    return [*chunks[::4], *(source[:4000] for source in library()), *random_characters(300), *runs(400), *spelt]


def without_control(documents: list[str]) -> list[str]:
    """Texts that spell no special token: ``tokenizers`` reads one as the token."""
    return [text for text in documents if not any(token in text for token in ("[INST]", "[/INST]", "<s>", "</s>"))]


@pytest.mark.parametrize("name", ["tokenizer.model.v1", "240216.model.v2", "240323.model.v3", "241114.model.v7", "241114.model.v7m1"])
def test_sentencepiece(name: str, data: Path, documents: list[str], tmp_path: Path) -> None:
    file = data / (name if name.startswith("tokenizer") else f"mistral_instruct_tokenizer_{name}")
    own, ours = sentencepiece.SentencePieceProcessor(model_file=str(file)), load_tokenizer(file)
    assert [*map(unpack, ours.encode_packed(documents))] == own.encode(documents)
    ours.save_hf(tmp_path)
    auto, again = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    texts = [text for text in without_control(documents) if text not in SYMBOLS]
    ids = own.encode(texts)
    assert [auto(text, add_special_tokens=False)["input_ids"] for text in texts] == [again.encode(text) for text in texts] == ids
    assert [ours.encode_prompt(text) for text in documents] == auto(documents)["input_ids"]
    assert (auto.bos_token_id, auto.eos_token_id, len(auto)) == (own.bos_id(), own.eos_id(), own.get_piece_size())
    assert difference(again, ours) == ""
    for text in SYMBOLS:  # a text that is one symbol gets no space in front
        if own.piece_to_id(text) != own.unk_id():
            assert ours.encode(text) == own.encode(text) and again.encode(text) == own.encode(text)[1:]


@pytest.mark.parametrize("name", ["tekken_240718.json", "tekken_240911.json"])
def test_tekken(name: str, data: Path, documents: list[str], tmp_path: Path) -> None:
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    own: Any = Tekkenizer.from_file(data / name)
    ours = load_tokenizer(data / name)
    ids = [own.encode(text, bos=False, eos=False) for text in documents]
    assert [*map(unpack, ours.encode_packed(documents))] == [ours.encode(text) for text in documents] == ids
    assert [ours.decode(line) for line in ids] == [own.decode(line) for line in ids]
    assert (ours.vocab_size, ours.bos_id, ours.eos_id) == (own.n_words, own.bos_id, own.eos_id)
    assert [ours.token(id) for id in range(1000)] == [own.id_to_piece(id) for id in range(1000)]
    ours.save_hf(tmp_path)
    # As the export of a model, whose folders transformers reads with mistral-common where they hold a tekken.json.
    (tmp_path / "config.json").write_text('{"model_type": "mistral", "architectures": ["MistralForCausalLM"]}')
    auto, again = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    texts = without_control(documents)
    assert [auto(text)["input_ids"] for text in texts] == [own.encode(text, bos=True, eos=False) for text in texts]
    assert [ours.encode_prompt(text) for text in documents] == [auto(text)["input_ids"] for text in documents]
    assert difference(again, ours) == ""


@pytest.mark.parametrize("name", ["mistral_instruct_tokenizer_240323.model.v3", "tekken_240718.json"])
def test_a_prompt_of_mistral_common(name: str, data: Path) -> None:
    """A conversation as its tokenizer of instructions puts it together, and as text here."""
    from mistral_common.protocol.instruct.messages import AssistantMessage, UserMessage
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    own = MistralTokenizer.from_file(str(data / name))
    talk = [UserMessage(content="What is a statement?"), AssistantMessage(content="A line."), UserMessage(content="And then?")]
    encoded = own.encode_chat_completion(ChatCompletionRequest(messages=talk))
    plain = load_tokenizer(data / name)
    first, answer, second = (plain.encode(text) for text in ("What is a statement?", "A line.", "And then?"))
    assert encoded.tokens == [1, 3, *first, 4, *answer, 2, 3, *second, 4]
    if "tekken" in name:  # sentencepiece puts a space in front of each part
        text = "[INST]What is a statement?[/INST]A line.</s>[INST]And then?[/INST]"
        assert plain.encode_prompt(text) == encoded.tokens
