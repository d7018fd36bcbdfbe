"""Everything that can be wrong with a file of preferences has a message of its own, with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from megatron_llama.data.tokenizer.hf import HFTokenizer
from megatron_llama.errors import DataError
from megatron_llama.tune.preference.align_config import AlignConfig
from megatron_llama.tune.preference.dataset import Pairs, PairSamples, read_pairs
from megatron_llama.tune.preference.pairs import is_preference
from megatron_llama.tune.sft.chat import ChatTokenizer
from megatron_llama.tune.sft.sft_config import SFTConfig

SEQ_LENGTH = 96
ASKED = {"role": "user", "content": "Why?"}
YES = {"role": "assistant", "content": "Because."}
NO = {"role": "assistant", "content": "Who knows?"}
LONG = {"role": "assistant", "content": "on and on " * 60}
GIVEN: dict[str, dict[str, Any]] = {
    "trl": {"prompt": [ASKED], "chosen": [YES], "rejected": [NO]},
    "openai": {"input": {"messages": [ASKED]}, "preferred_output": [YES], "non_preferred_output": [NO]},
    "alpaca": {"instruction": "Why?", "chosen": "Because.", "rejected": "Who knows?"},
    "sharegpt": {"conversations": [{"from": "human", "value": "Why?"}], "chosen": {"from": "gpt", "value": "Because."}, "rejected": {"from": "gpt", "value": "Who knows?"}},
    "ultrafeedback": {"prompt": "Why?", "chosen": [ASKED, YES], "rejected": [ASKED, NO]},
    "completion_label": {"prompt": [ASKED], "completion": [YES], "label": True},
}  # fmt: skip
TEXTS = {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}


def turn(role: Any, content: Any = "text") -> dict[str, Any]:
    return {"role": role, "content": content}


def changed(kind: str, without: tuple[str, ...] = (), **fields: Any) -> str:
    record = {**GIVEN[kind], **fields}
    return json.dumps({name: value for name, value in record.items() if name not in without})


# The format of the file, what stands on its second line, the reason under which it is counted, and part of the message.
CASES: dict[str, tuple[str, str, str, str]] = {
    "cut off": ("trl", '{"prompt": [', "invalid JSON", "invalid JSON (Expecting value, column 13)"),
    "an array": ("trl", "[1]", "not an object", "got a JSON array, expected a JSON object"),
    "a repeated key": ("trl", '{"chosen": "a", "chosen": "b"}', "repeated key", "field 'chosen': got the key twice"),
    "no chosen": ("trl", changed("trl", ("chosen",)), "missing field chosen", "field 'chosen': got no such field (fields: 'prompt', 'rejected')"),
    "no rejected": ("trl", changed("trl", ("rejected",)), "missing field rejected", "field 'rejected': got no such field"),
    "text and messages": ("trl", changed("trl", chosen="Because."), "halves differ in kind", "got prompt a JSON array, chosen a JSON string, rejected a JSON array"),
    "null": ("trl", changed("trl", rejected=None), "halves differ in kind", "rejected a JSON null, expected all text or all messages"),
    "numbers": ("trl", json.dumps({"prompt": 1, "chosen": 2, "rejected": 3}), "no string", "field 'chosen': got a JSON number, expected a string"),
    "no messages": ("trl", changed("trl", chosen=[]), "no messages", "field 'chosen': got an empty array"),
    "no prompt": ("trl", changed("trl", prompt=[]), "no messages", "field 'prompt': got an empty array"),
    "a system message alone": ("trl", changed("trl", prompt=[turn("system")]), "no prompt", "field 'chosen[0]': got an answer without a question"),
    "an unknown role": ("trl", changed("trl", chosen=[turn("narrator")]), "unknown role", "field 'chosen[0].role': got 'narrator'"),
    "a question as answer": ("trl", changed("trl", rejected=[ASKED]), "completion is no answer", "field 'rejected[0]': got a message of role user, expected assistant"),
    "an answered prompt": ("trl", changed("trl", prompt=[ASKED, YES]), "wrong role order", "field 'chosen[0]': got assistant after assistant"),
    "an unanswered end": ("trl", changed("trl", chosen=[YES, ASKED]), "no answer at the end", "field 'chosen[1]': got a last message of role user"),
    "an empty answer": ("trl", changed("trl", rejected=[turn("assistant", " \n")]), "empty answer", "field 'rejected[0]': got nothing but spaces"),
    "an empty question": ("trl", changed("trl", prompt=[turn("user", "")]), "empty question", "field 'prompt[0]': got nothing but spaces"),
    "an image": ("trl", changed("trl", prompt=[turn("user", [{"type": "image_url"}])]), "content is no text", "'prompt[0].content[0]': got a part of type 'image_url'"),
    "a column of images": ("trl", changed("trl", images=["a.png"]), "unknown meaning", "field 'images': got a value, expected no such field; leave the example out"),
    "a margin": ("trl", changed("trl", margin=0.5), "unknown meaning", "field 'margin': got a value, expected no such field"),
    "scores of a reference": ("trl", changed("trl", ref_chosen_logps=-3.0), "unknown meaning", "field 'ref_chosen_logps': got a value"),
    "variables of a template": ("trl", changed("trl", chat_template_kwargs={"tools": []}), "unknown meaning", "field 'chat_template_kwargs.tools': got a value, expected variables"),
    "the same twice": ("trl", changed("trl", rejected=[YES]), "identical completions", "got the same chosen and rejected, expected two different completions"),
    "the same when rendered": ("trl", changed("trl", rejected=[turn("assistant", " Because. ")]), "identical completions", "got the same tokens for chosen and rejected"),
    "a label": ("trl", changed("trl", label=True), "a pair with a label", "field 'label': got a label beside chosen and rejected"),
    "broken tools": ("trl", changed("trl", tools="[{"), "tools are no array", "field 'tools': got a text that is no JSON"),
    "tools that are none": ("trl", changed("trl", tools=3), "tools are no array", "field 'tools': got a JSON number, expected an array"),
    "a special token": ("trl", changed("trl", chosen=[turn("assistant", "x<|eot_id|>")]), "special token in a message", "'<|eot_id|>' at character 1"),
    "half a pair": ("trl", changed("trl", chosen=[turn("assistant", "\ud83d")]), "half a surrogate pair", "'chosen[0].content': got half a surrogate pair"),
    "no beginning in common": ("trl", changed("trl", ("prompt",), chosen=[ASKED, YES], rejected=[turn("user", "How?"), NO]), "differing prompts", "field 'rejected[0]': got another first message than that of chosen"),
    "other questions later": ("trl", changed("trl", ("prompt",), chosen=[ASKED, YES, ASKED, YES], rejected=[ASKED, YES, turn("user", "How?"), NO]), "differing prompts", "field 'chosen[2]': got a user message that the other half has not"),
    "one begins the other": ("trl", changed("trl", ("prompt",), chosen=[ASKED, YES], rejected=[ASKED, YES, ASKED, NO]), "no telling where the prompt ends", "field 'chosen': got a conversation with which the other one begins"),
    "empty text": ("trl", json.dumps({**TEXTS, "rejected": " "}), "empty rejected", "field 'rejected': got nothing but spaces"),
    "text with a system prompt": ("trl", json.dumps({**TEXTS, "system": "Be kind."}), "unknown meaning", "field 'system': got a value beside texts that no template touches"),
    "a question beside texts": ("trl", json.dumps({"question": "Why?", "chosen": "The end.", "rejected": "The start."}), "unknown meaning", "field 'question': got a value beside texts"),
    "texts without a prompt": ("trl", json.dumps({"chosen": "blue", "rejected": "green"}), "differing prompts", "field 'chosen': got texts that share no beginning"),
    "a text that goes on": ("trl", json.dumps({"chosen": "The sky", "rejected": "The sky is green."}), "no telling where the prompt ends", "got one text that begins with the other"),
    "nothing before": ("trl", json.dumps({**TEXTS, "prompt": ""}), "nothing before the completion", "got a completion that begins with the first token"),
    "no input": ("openai", changed("openai", ("input",)), "missing field input", "field 'input': got no such field"),
    "input is text": ("openai", changed("openai", input="Why?"), "input is no object", "field 'input': got a JSON string, expected an object with 'messages'"),
    "no messages in the input": ("openai", changed("openai", input={}), "missing field messages", "field 'input.messages': got no such field"),
    "more in the input": ("openai", changed("openai", input={"messages": [ASKED], "functions": []}), "unknown meaning", "field 'input.functions': got a value"),
    "output is text": ("openai", changed("openai", preferred_output="Because."), "messages are no array", "field 'preferred_output': got a JSON string"),
    "no other output": ("openai", changed("openai", ("non_preferred_output",)), "missing field non_preferred_output", "field 'non_preferred_output'"),
    "tools of the input": ("openai", changed("openai", input={"messages": [ASKED], "tools": 1}), "tools are no array", "field 'input.tools': got a JSON number"),
    "an empty instruction": ("alpaca", changed("alpaca", instruction=""), "empty instruction", "field 'instruction': got nothing but spaces"),
    "an empty rejected": ("alpaca", changed("alpaca", rejected=" "), "empty rejected", "field 'rejected': got nothing but spaces, expected text"),
    "chosen is a list": ("alpaca", changed("alpaca", chosen=["a"]), "no string", "field 'chosen': got a JSON array, expected a string"),
    "broken history": ("alpaca", changed("alpaca", history=["x"]), "broken history", "field 'history': got ['x']"),
    "chosen is text": ("sharegpt", changed("sharegpt", chosen="Because."), "message is no object", "field 'chosen': got a JSON string"),
    "chosen without a role": ("sharegpt", changed("sharegpt", chosen={"value": "x"}), "message without role", "field 'chosen': got 'value', expected a field 'from'"),
    "chosen from the human": ("sharegpt", changed("sharegpt", chosen={"from": "human", "value": "x"}), "completion is no answer", "field 'chosen': got a message of role user"),
    "no conversations": ("sharegpt", changed("sharegpt", ("conversations",)), "missing field conversations", "field 'conversations': got no such field"),
    "another prompt": ("ultrafeedback", changed("ultrafeedback", prompt="How?"), "differing prompts", "field 'prompt': got 'How?', which no question of the conversations is"),
    "a contradiction": ("ultrafeedback", changed("ultrafeedback", score_chosen=3, score_rejected=7.5), "scores contradict the pair", "field 'score_chosen': got 3, less than score_rejected, 7.5"),
    "a score in words": ("ultrafeedback", changed("ultrafeedback", score_chosen="good"), "score is no number", "field 'score_chosen': got a JSON string"),
    "chosen is no conversation": ("ultrafeedback", changed("ultrafeedback", chosen="Because."), "messages are no array", "field 'chosen': got a JSON string, expected an array"),
    "no label": ("completion_label", changed("completion_label", ("label",)), "missing field label", "field 'label': got no such field"),
    "a label in words": ("completion_label", changed("completion_label", label="true"), "label is no boolean", "field 'label': got 'true', a JSON string, expected true (good) or false (bad)"),
    "a label of 1": ("completion_label", changed("completion_label", label=1), "label is no boolean", "field 'label': got 1, a JSON number"),
    "two labels": ("completion_label", changed("completion_label", kto_tag=True), "two labels", "field 'label': got label and kto_tag"),
    "a pair": ("completion_label", changed("completion_label", chosen=[YES]), "a pair with a label", "field 'chosen': got a pair in a file of single completions"),
    "no completion": ("completion_label", changed("completion_label", ("completion",)), "missing field completion", "field 'completion': got no such field"),
    "an empty completion": ("completion_label", json.dumps({"prompt": "The sky is", "completion": "", "label": True}), "empty completion", "field 'completion': got nothing but"),
    "a question judged": ("completion_label", json.dumps({"messages": [ASKED], "label": True}), "no answer at the end", "field 'messages[0]': got a last message of role user"),
    "no output": ("completion_label", json.dumps({"instruction": "Why?", "kto_tag": True}), "missing field output", "field 'output': got no such field"),
    "a text with messages": ("completion_label", changed("completion_label", completion="Because."), "halves differ in kind", "got prompt a JSON array, completion a JSON string"),
    "a user's calls": ("ultrafeedback", json.dumps({"prompt": "x", **{half: [{"role": "user", "content": None, "tool_calls": [{"function": {}}]}, answer] for half, answer in (("chosen", YES), ("rejected", NO))}}), "broken tool calls", "field 'chosen[0].tool_calls': got calls in a message of role user"),
    "no known field": ("auto", json.dumps({"question": "x", "best": "y"}), "unknown format", "got the fields 'question', 'best', expected chosen and rejected, preferred_output"),
    "one half alone": ("auto", json.dumps({"prompt": "x", "chosen": "y"}), "unknown format", "got the fields 'prompt', 'chosen'"),
}  # fmt: skip


def read(
    folder: Path, content: str, tokenizer: ChatTokenizer, kind: str = "auto", method: str = "dpo", **options: Any
) -> tuple[Path, Pairs]:
    path = folder / "data.jsonl"
    path.write_text(content)
    align = AlignConfig(method=method, preference_format=kind)  # type: ignore[arg-type]
    return path, read_pairs([path], tokenizer, SFTConfig(**options), align, SEQ_LENGTH)


def test_each_has_its_message(tmp_path: Path, chat: ChatTokenizer) -> None:
    others = ({"prompt": "x", "completion": "y"}, {"messages": [ASKED, YES], "label": 3}, {"text": "x"})
    assert all(map(is_preference, GIVEN.values())) and not any(map(is_preference, others))
    for kind, bad, reason, words in CASES.values():
        good = json.dumps(GIVEN[kind]) if kind != "auto" else ""
        method = "kto" if kind == "completion_label" else "dpo"
        path, pairs = read(tmp_path, "\n".join([good, bad, good]), chat, kind, method)
        [problem] = pairs.problems
        assert problem.where == f"{path}:2" and problem.reason == reason, (words, str(problem))
        assert str(problem).startswith(f"{path}:2: ") and words in str(problem), str(problem)
        assert len(pairs) == (2 if good else 0) and len(pairs.ids) == len(pairs) * pairs.per_example
    path, pairs = read(tmp_path, json.dumps(GIVEN["completion_label"]), chat)
    assert [str(problem).split(",")[0] for problem in pairs.problems] == [f"{path}:1: got a single completion with a label"]
    assert str(pairs.problems[0]).endswith("give --method kto, which learns from single completions")


def test_long_pairs(tmp_path: Path, chat: ChatTokenizer) -> None:
    """A pair is cut, left out or refused as a whole."""
    rows = [{**GIVEN["trl"], **{half: [LONG] for half in halves}} for halves in ((), ("chosen",), ("rejected",))]
    content = "\n".join(map(json.dumps, rows))
    _, cut = read(tmp_path, content, chat)
    assert (len(cut), cut.truncated, cut.dropped, cut.problems) == (3, 2, 0, [])
    assert [len(cut.ids[2 * k]) + len(cut.ids[2 * k + 1]) - 2 for k in (1, 2)] == [SEQ_LENGTH] * 2, "all places are used"
    assert len(cut.ids[3]) == len(cut.ids[1]), "the short half is whole"
    _, left = read(tmp_path, content, chat, on_long_sample="drop")
    assert (len(left), left.truncated, left.dropped, left.problems, left.numbers) == (1, 0, 2, [], [0])
    path, stopped = read(tmp_path, content, chat, on_long_sample="stop")
    assert [problem.where for problem in stopped.problems] == [f"{path}:2", f"{path}:3"]
    assert f"expected at most {SEQ_LENGTH} (seq_length) for both halves together" in str(stopped.problems[0])
    _, judged = read(tmp_path, content, chat, method="kto")
    assert (len(judged), judged.truncated, max(map(len, judged.ids))) == (6, 2, SEQ_LENGTH + 1)
    _, same = read(tmp_path, json.dumps(GIVEN["trl"]), chat, method="kto")
    with pytest.raises(DataError, match="--method kto: got 2 of 2 completions in a row with one prompt, expected at most half"):
        PairSamples(same, range(2), SEQ_LENGTH, packing=True, method="kto")
    _, scored = read(tmp_path, content, chat, method="reward")
    assert [len(scored.ids[2 * k]) + len(scored.ids[2 * k + 1]) for k in (1, 2)] == [SEQ_LENGTH] * 2


def test_what_truncation_leaves(tmp_path: Path, chat: ChatTokenizer) -> None:
    asked = {**GIVEN["trl"], "prompt": [turn("user", "why? " * 80)]}
    same = {**GIVEN["trl"], "chosen": [LONG], "rejected": [turn("assistant", LONG["content"] + "!")]}
    usual = {**GIVEN["trl"], "chosen": [LONG]}
    _, pairs = read(tmp_path, "\n".join(map(json.dumps, [asked, usual, same])), chat)
    assert (len(pairs), pairs.numbers, pairs.truncated, pairs.dropped, pairs.problems) == (1, [1], 1, 2, [])
    assert "too long: 1 examples truncated, 2 dropped (2 of them since the cut leaves no answer to learn)" in list(pairs.report())
    _, judged = read(tmp_path, json.dumps(asked), chat, method="kto")
    assert (len(judged), judged.truncated, judged.dropped) == (0, 0, 2)


def test_templates_that_change_the_prompt(tmp_path: Path, llama3: Path) -> None:
    cases = {
        "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}": ("prompt rendered differently", "from character 0 on when an answer follows ('1Why?' becomes '2Why?"),
        "{{ raise_exception('no') }}": ("template error", "got no (from"),
        "Q{% for m in messages %}{{ m.role }}{% endfor %}{% if add_generation_prompt %}assistant{% endif %}": ("content not rendered", "got content of message 1 of 2 (user)"),
    }  # fmt: skip
    for number, (source, (reason, words)) in enumerate(cases.items()):
        file = tmp_path / f"{number}.jinja"
        file.write_text(source)
        tokenizer = ChatTokenizer(HFTokenizer(llama3 / "tokenizer.json"), str(file))
        path, pairs = read(tmp_path, json.dumps(GIVEN["trl"]), tokenizer)
        [problem] = pairs.problems
        assert (problem.reason, problem.where) == (reason, f"{path}:1") and words in str(problem), str(problem)
