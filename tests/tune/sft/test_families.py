"""Templates that render every answer as the model's own template renders a last one: against TRL's, and against the model's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from megatron_llama.cli import main
from megatron_llama.data.tokenizer.hf import HFTokenizer
from megatron_llama.tune.sft.built_in_templates import BUILT_IN
from megatron_llama.tune.sft.chat import ChatTokenizer, Encoded
from megatron_llama.tune.sft.families import family_of
from megatron_llama.tune.sft.formats import Conversation
from megatron_llama.tune.sft.problems import UnusableError
from megatron_llama.tune.sft.template import ChatTemplate
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.tune.sft.test_template_matrix import CONVERSATIONS, OWN, SHIPPED, Message, Reference

FAMILIES = {"llama3": ["llama3"], "qwen2.5": ["qwen2_5"], "qwen3": ["qwen3"], "phi3": ["phi3", "phi3_5"], "gemma": ["gemma"], "gemma3": ["gemma3"]}
"""The templates of models that TRL ships, each with one for training, by the name that ours has."""
PAIRS = [(name, own) for name, many in FAMILIES.items() for own in many]
TOKENS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
QUESTION, ANSWER = {"role": "user", "content": "How is the weather?"}, {"role": "assistant", "content": "Dry."}


@pytest.fixture(scope="module")
def theirs(llama3: Path) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(llama3)
    return tokenizer


def chat(llama3: Path, wanted: str | None = None) -> ChatTokenizer:
    return ChatTokenizer(HFTokenizer(llama3 / "tokenizer.json"), wanted)


def own_folder(llama3: Path, folder: Path, source: str) -> Path:
    """The tokenizer with a template."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((llama3 / name).read_bytes())
    (folder / "chat_template.jinja").write_text(source)
    return folder


@pytest.mark.parametrize(("name", "own"), PAIRS)
def test_text_and_loss_are_those_of_trls_template(name: str, own: str, llama3: Path, theirs: PreTrainedTokenizerBase) -> None:
    reference, ours = Reference(theirs, SHIPPED[f"{own}_training"].read_text()), chat(llama3, name)
    trained = 0
    for title, (messages, tools) in CONVERSATIONS.items():
        try:
            encoded = ours.read(Conversation(tuple(messages), tools and tuple(tools)), "assistant")
        except UnusableError:
            continue  # the matrix says when
        ids, mask = reference.encoded(messages, tools)
        if name == "qwen2.5":  # TRL's mark begins before the end of the line that begins an answer
            mask = [one and (mask[at - 1] or ours.spelt([id]) != ["\n"]) for at, (id, one) in enumerate(zip(ids, mask, strict=True))]
        assert (encoded.ids, encoded.loss_mask) == (ids, mask), title
        trained += 1
    assert trained >= 2


@pytest.mark.parametrize(("name", "own"), PAIRS)
def test_last_answers_are_those_of_the_models_template(name: str, own: str, llama3: Path, theirs: PreTrainedTokenizerBase) -> None:
    """Of every answer in turn: what the model's template adds to the beginning of an answer where it is the last one."""
    reference, ours = Reference(theirs, SHIPPED[own].read_text()), chat(llama3, name)
    compared = 0
    for messages, tools in CONVERSATIONS.values():
        for index in range(len(messages)):
            turns = messages[: index + 1]
            before, whole = reference.text(messages[:index], tools, True) if index else None, reference.text(turns, tools)
            if turns[-1]["role"] != "assistant" or not turns[-1]["content"] or before is None or whole is None:
                continue
            try:
                encoded = ours.read(Conversation(tuple(turns), tools and tuple(tools)), "last")
            except UnusableError as error:
                assert error.reason.endswith("not rendered") or (name, error.reason) == ("llama3", "template error")
                continue
            assert learnt(encoded, ours) == whole.removeprefix(before)
            compared += 1
    assert compared >= 3


def learnt(encoded: Encoded, tokenizer: ChatTokenizer) -> str:
    ids = [id for id, one in zip(encoded.ids, encoded.loss_mask, strict=True) if one]
    return "".join(tokenizer.spelt(ids))


def test_mistrals_format() -> None:
    turns = [QUESTION, ANSWER, {**QUESTION, "content": "And now?"}, {**ANSWER, "content": "Wet."}]
    rendered = ChatTemplate(BUILT_IN["mistral"], "mistral", {"bos_token": "<s>", "eos_token": "</s>"}).render(turns)
    assert rendered.text == "<s>[INST] How is the weather? [/INST]Dry.</s>[INST] And now? [/INST]Wet.</s>"
    assert rendered.answer_texts() == ["Dry.</s>", "Wet.</s>"]


@pytest.mark.long
def test_a_family_is_told_by_what_its_template_renders() -> None:
    expected = {own: name for name, own in PAIRS}
    others = dict.fromkeys(("llama3_1", "gemma4", "qwen2_5_vl", "qwen3_instruct_2507", "qwen3_5_think", "deepseekv3"))
    found = {name: family_of(ChatTemplate(SHIPPED[name].read_text(), name, TOKENS), TOKENS) for name in (*expected, *others)}
    assert found == {**expected, **others}
    assert family_of(ChatTemplate(OWN["llama3_chat"], "own", TOKENS), TOKENS) == "llama3"
    assert {family_of(ChatTemplate(source, "own", TOKENS), TOKENS) for name, source in OWN.items() if name != "llama3_chat"} == {None}


@pytest.mark.few(3)
@pytest.mark.parametrize(("own", "family"), [("qwen3", "qwen3"), ("phi3", "phi3"), ("phi3_5", "phi3"), ("deepseekv3", None)])
def test_the_template_of_the_family_is_what_a_refusal_names(
    own: str, family: str | None, llama3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With file and line; and with it every answer is learnt, while the exported tokenizer keeps the model's template."""
    folder = own_folder(llama3, tmp_path / "own", SHIPPED[own].read_text())
    turns = [QUESTION, ANSWER, QUESTION, {**ANSWER, "content": "Still dry."}]
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    command = ["data", "check", str(tmp_path / "data.jsonl"), "--tokenizer-model", str(folder)]
    assert main(command) == 1
    said = capsys.readouterr()
    assert f"{tmp_path}/data.jsonl:1: got a template that renders messages[:2] differently when others follow" in said.out + said.err
    advice = f"give --chat-template {family}, which renders each answer as this one renders a last one"
    assert (advice in said.out + said.err) == (family is not None)
    if family is None:
        return
    trained = chat(folder, family)
    encoded = trained.read(Conversation(tuple(turns)), "assistant")
    words = learnt(encoded, trained)
    assert "Dry." in words and "Still dry." in words and "weather" not in words
    trained.save_hf(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == SHIPPED[own].read_text()
    chat(folder, "mistral").save_hf(tmp_path / "other")
    assert AutoTokenizer.from_pretrained(tmp_path / "other").chat_template == BUILT_IN["mistral"]


@pytest.mark.parametrize("own", ["qwen3", "phi3", "phi3_training", "qwen3_training", "lfm2_2_5"])
def test_the_last_answer_alone(own: str, llama3: Path, theirs: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Whatever becomes of earlier ones: it is what follows the beginning of an answer. Phi-3's has marks around two parts of it."""
    folder = own_folder(llama3, tmp_path / "own", SHIPPED[own].read_text())
    reference, ours = Reference(theirs, SHIPPED[own].read_text()), chat(folder)
    thought = {**ANSWER, "content": "<think>\nI look.\n</think>\n\nDry."}
    turns: Sequence[Message] = [QUESTION, thought, QUESTION, {**ANSWER, "content": "Still dry."}]
    encoded = ours.read(Conversation(tuple(turns)), "last")
    before, whole = reference.text(turns[:-1], None, True), reference.text(turns, None)
    assert before is not None and whole is not None and whole.startswith(before)
    assert (encoded.text, learnt(encoded, ours)) == (whole, whole.removeprefix(before))
