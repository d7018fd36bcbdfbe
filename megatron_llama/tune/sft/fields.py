"""Fields of records and messages beside those of a format: fields without an effect on the
training, marks of whether a message is learned, and fields that cannot be obeyed here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from megatron_llama.tune.sft.problems import UnusableError

LOSS_MARKS = ("weight", "loss_weight", "train", "training", "trainable", "loss")
"""Names of marks for whether a message is learned. The first one is OpenAI's; here it replaces all,
with true or false, until ``formats.checked`` takes it off."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of an answer's reasoning, in the order in which ``transformers`` looks for it."""
NO_LEARNING = ("image", "images", "video", "videos", "audio", "audios")
"""Fields of content that a language model of text cannot learn."""
MESSAGE_PARTS = ("role", "content", "from", "value")
"""The fields of messages."""
_RECORD_WEIGHTS = (*LOSS_MARKS, "weights", "sample_weight")
_PREFERENCE = "give the file to align (--method kto), or --ignore-keys {} to learn every answer"
_SCORES = "remove the field: align scores the reference itself (--reference-scores)"
_REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(NO_LEARNING, "leave the example out: images and sound cannot be learned"),
        "functions": "write them as tools, each {'type': 'function', 'function': {...}}",
        "function_call": "write it as tool_calls, an array of {'type': 'function', 'function': "
        "{...}}",
        "label": _PREFERENCE.format("label"),
        "kto_tag": _PREFERENCE.format("kto_tag"),
        **dict.fromkeys(
            (
                "ref_chosen_logps",
                "ref_rejected_logps",
                "reference_chosen_logps",
                "reference_rejected_logps",
                "ref_logps",
                "ref_KL_logps",
            ),
            _SCORES,
        ),
        "margin": "remove the field: no method of align has a margin for each pair",
    }
)
"""The remedies for fields on which other programs act."""
_HARMLESS = (
    # names of a record
    "id _id idx index uid uuid guid hash key example_id sample_id row_id record_id doc_id task_id "
    "question_id prompt_id message_id parent_id conversation_id conversation_hash chat_id "
    "session_id user_id parent_message_id __index_level_0__ "
    # its source
    "source sources source_id data_source source_dataset dataset dataset_name dataset_source "
    "subset split origin provenance url urls link file filename file_name file_path line dump repo "
    "license licence copyright author authors creator annotator annotator_id worker_id "
    "model model_name models chosen_model rejected_model generator generator_model engine "
    "timestamp date time created created_at create_time updated_at update_time version "
    # its subject
    "language languages lang langdetect locale country language_score category categories "
    "subcategory topic topics subject subjects domain domains task task_name task_type type kind "
    "tag tags keyword keywords title difficulty level comment comments note notes "
    "metadata meta meta_data info "
    # counts and judgements
    "num_turns n_turns turn turns num_messages num_tokens n_tokens token_count tokens_count length "
    "conversation_tokens views "
    "quality quality_score score scores int_score rating ratings reward_model_score "
    "chosen_rating rejected_rating rating_chosen rating_rejected chosen_score rejected_score "
    "toxic toxicity moderation openai_moderation detoxify_moderation redacted "
    # instructions to a service, without an effect on the present answers
    "parallel_tool_calls"
)
HARMLESS = frozenset(_HARMLESS.split())
"""Fields for people about a record or a message, without an effect on its training."""
_REPEATING = (
    "prompt question query problem instruction system_prompt response answer solution completion"
)
REPEATING = tuple(_REPEATING.split())
"""Fields beside messages that repeat one of them in many files."""


def is_empty(value: Any) -> bool:
    """Whether a field is empty, as a column of a table is for most rows."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def is_harmless(name: str) -> bool:
    """Whether a field is only for people, without an effect on the training."""
    return name.lower().replace("-", "_") in HARMLESS


def without_keys(record: Mapping[str, Any], ignored: Collection[str]) -> Mapping[str, Any]:
    """Return a record without ignored fields, in its messages too."""
    if not ignored:
        return record

    def bare(value: Any) -> Any:
        if isinstance(value, list):
            return [bare(element) if isinstance(element, dict) else element for element in value]
        if isinstance(value, dict):
            inner = {key: content for key, content in value.items() if key not in ignored}
            # OpenAI's pairs have their prompt one level deeper.
            return inner | {"messages": bare(inner["messages"])} if "messages" in inner else inner
        return value

    return {
        name: value if name in ("tools", "chat_template_kwargs") else bare(value)
        for name, value in record.items()
        if name not in ignored
    }


def refuse_unknown(record: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise UnusableError for a field with a value that would be ignored although it may change
    what is to be learned."""
    given = {
        name: value
        for name, value in record.items()
        if name not in known and not is_empty(value) and not is_harmless(name)
    }
    unread = [
        name for name in given if name not in _RECORD_WEIGHTS and not _has_remedy(name, given)
    ]
    for name, value in given.items():
        if name in _RECORD_WEIGHTS:
            if not _is_one(value):
                raise UnusableError(
                    "weight of an example",
                    field=name,
                    got=f"{value!r:.40}",
                    expected="1, or no such field: all examples weigh the same",
                    do="leave out what is not to be learned, or mark its messages",
                )
        elif name not in unread:
            raise UnusableError(
                "unknown meaning",
                field=name,
                got="a value",
                expected="no such field",
                do=_REMEDIES[name],
            )
    if unread:
        fields = ", ".join(sorted(known))
        single = len(unread) == 1
        do = f"remove or rename the field{'' if single else 's'}"
        if not set(unread) & set(MESSAGE_PARTS):
            meaning = "it changes" if single else "they change"
            do += f", or give --ignore-keys {' '.join(unread)} if {meaning} nothing"
        raise UnusableError(
            "unknown meaning",
            field=unread[0],
            got="a value in a field that is not read"
            + (f", and in {', '.join(unread[1:])}" if unread[1:] else ""),
            expected=f"the fields {fields}",
            do=do,
        )


def _has_remedy(name: str, record: Mapping[str, Any]) -> bool:
    # A label of many parts tells the subject of an example, and not whether it is good.
    return name in _REMEDIES and not (name == "label" and isinstance(record[name], list | dict))


def refuse_unobeyed(message: Mapping[str, Any], name: str) -> None:
    """Raise UnusableError for fields of a message that no template can render."""
    for key in ("role", "content", "functions", "function_call", *NO_LEARNING):
        if is_empty(message.get(key)):
            continue
        raise UnusableError(
            "unknown meaning",
            field=f"{name}.{key}",
            got="a value",
            expected="no such field",
            do=_REMEDIES.get(key, "remove it: the message has another field for that"),
        )


def take_mark(message: dict[str, Any], name: str) -> bool | None:
    """Take the marks of whether it is learned off a message, and return their value; None if there
    are none. Raises UnusableError for another value, and for two marks that differ."""
    marks: dict[str, bool] = {}
    for key in LOSS_MARKS:
        if (value := message.pop(key, None)) is None:
            continue
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise UnusableError(
                "a weight that is neither 0 nor 1",
                field=f"{name}.{key}",
                got=f"{value!r:.40}",
                expected="0 or false (not learned), 1 or true",
                do="choose one: all tokens in the loss weigh the same",
            )
        marks[key] = bool(value)
    if len(set(marks.values())) > 1:
        raise UnusableError(
            "marks that contradict each other",
            field=name,
            got=", ".join(f"{key} {str(value).lower()}" for key, value in marks.items()),
            expected="marks that say the same",
            do="remove the wrong one, or give --ignore-keys with its name",
        )
    return next(iter(marks.values()), None)


def check_reasoning(message: Mapping[str, Any], name: str) -> None:
    """Raise UnusableError for reasoning that is no text, or that differs between its names."""
    given = {key: message[key] for key in REASONING if message.get(key) is not None}
    for key, value in given.items():
        if not isinstance(value, str):
            raise UnusableError(
                "reasoning is no string",
                field=f"{name}.{key}",
                got=f"a value of type {type(value).__name__}",
                expected="a string",
                do="mend the example",
            )
    if len(set(given.values())) > 1:
        raise UnusableError(
            "two reasonings",
            field=name,
            got=f"different texts in {' and '.join(given)}",
            expected="one text, or the same in each",
            do="remove one",
        )


def _is_one(value: Any) -> bool:
    return isinstance(value, bool | int | float) and value == 1
