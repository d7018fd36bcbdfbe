"""The materials of a case: real text, conversations, a tokenizer and drawn initial weights.

They are the same on every machine with the same Python. They are kept as they were before any part
of the trainer has read them, for comparison with the samples that the trainer reads.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from pydoc_data.topics import topics
from types import MappingProxyType
from typing import Any

import numpy as np
from safetensors.torch import load_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library
from torch import Tensor

from megatron_llama.checkpoint.model_folders.hf.stacked_experts import by_file_names
from megatron_llama.checkpoint.model_folders.hf.writer import export_hf
from megatron_llama.config.batch_ramp import BatchSizes
from megatron_llama.config.blend import Blend, is_number, read_blend
from megatron_llama.config.parse import Parsed
from megatron_llama.config.schema import Config, DataConfig, ModelConfig, TrainingConfig
from megatron_llama.data.indexed import IndexedDatasetWriter, token_dtype
from megatron_llama.data.meta import write_meta
from megatron_llama.data.order import BlendedOrder
from megatron_llama.data.tokenizer.fingerprint import Fingerprint
from megatron_llama.data.tokenizer.load import load_tokenizer
from megatron_llama.engine.plan.specs import Rectangle
from megatron_llama.errors import ConfigError
from megatron_llama.model.init import InitialWeights
from megatron_llama.prove.case import STEPS, Case
from megatron_llama.prove.samples import (
    Expected,
    Talk,
    samples_of_examples,
    trained_examples,
    training_share,
)
from megatron_llama.train.api.common.options import read_options
from megatron_llama.train.api.train import SECTIONS
from megatron_llama.train.setup.resolve import assemble, check
from megatron_llama.tune.sft.built_in_templates import BUILT_IN
from megatron_llama.tune.sft.sft_config import SFTConfig

STD = 0.1
"""Standard deviation of all weights around their initial values. At 0.02 attention is so flat that
a wrong norm or bias would hide below rounding."""
WIDTH = 64
"""Width from which weights are smaller, so that products are as large as at this width. Otherwise
attention chooses single keys: with a hidden size of 512 one process in FP8 was 53 % from fp32 in
the gradients of queries and keys, with smaller weights 17 %."""
SPLIT = "85,15,0"
MOST_UNUSABLE = 200
"""After this many conversations in a row without an answer in the sample, no more are tried."""
SPARE = 1.3
"""Data to train on, relative to what a run reads. No sample comes twice, and the samples are no
multiple of a batch."""
UNKNOWN = "<|unknown|>"
BEGIN = "<|begin|>"
END = "<|end|>"
ROLES = ("system", "user", "assistant")
HEADERS = MappingProxyType({role: f"<|{role}|>" for role in ROLES})
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Chat template with a special token before and after every message, so that the ids of a
conversation are the ids of its messages, one after the other."""
MARKERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "chatml": ("<|im_start|>", "<|im_end|>"),
        "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    }
)
"""Special tokens that built-in templates need."""
WITHOUT_TEMPLATE = ("prompt", "text")
"""Formats of examples that are not rendered by a template."""


@dataclass(frozen=True)
class Materials:
    """The data, tokenizer and initial weights of a case."""

    options: Mapping[str, object]
    """Options that are added to those of the case: data, tokenizer, initial weights."""
    model: Path
    """Folder of the weights in HuggingFace's format."""
    tokenizer: Path
    """Folder of the tokenizer in HuggingFace's format."""
    vocab_size: int
    eod: int
    """Id that ends documents and answers: the last one of the vocabulary."""
    documents: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    """Tokens of every document by prefix, in file order, each with ``eod`` at the end. ``split`` of
    ``options`` divides them."""
    talks: tuple[Talk, ...] = ()
    """Examples of ``sft``, in file order."""
    valid_talks: tuple[Talk, ...] = ()
    """Examples for validation, if the case has a file of them."""


def parsed_options(case: Case, **more: object) -> Parsed:
    """Return the options of a case as the command reads them. Raises ConfigError."""
    sections = (SFTConfig, *SECTIONS) if case.sft else SECTIONS
    return read_options(case.options, more, sections)


def make_materials(case: Case, folder: Path, steps: int = STEPS) -> Materials:
    """Write the materials of a run of ``steps`` steps into ``folder`` and return them. Raises
    ConfigError for a case that cannot run."""
    prefixes = _prefixes(case)
    length = {} if case.options.get("train_samples") else {"train_iters": steps, "epochs": 0.0}
    # Every step is saved, as --on-bad-step rollback needs.
    saving = {"save": "checkpoints", "save_interval": 1}
    parsed = parsed_options(case, **length, **saving, **_data(case, prefixes))
    vocab_size = parsed.get(ModelConfig).vocab_size
    config = check(assemble(parsed), case.world_size).config
    words = _text()
    tokenizer_folder = folder / "tokenizer"
    template = parsed.get(SFTConfig).chat_template if case.sft else None
    library = _write_tokenizer(tokenizer_folder, vocab_size, words, MARKERS.get(template or "", ()))
    vocab_size = library.get_vocab_size()
    bos = _id(library, BEGIN)
    eod = _id(library, END)
    model = replace(config.model, vocab_size=vocab_size, bos_token_id=bos, eos_token_id=eod)
    hf = folder / "model"
    export_hf(hf, model, DrawnWeights(model), "float32")
    options: dict[str, object] = {
        "init_from_hf": str(hf),
        "tokenizer_model": str(tokenizer_folder),
        "bos_token_id": bos,
        "eos_token_id": eod,
    }
    materials = Materials(options, hf, tokenizer_folder, vocab_size, eod)
    passes = parsed_options(case).get(TrainingConfig).epochs
    samples = math.ceil(SPARE * steps * config.training.global_batch_size)
    if passes:
        blend = read_blend(("text",) if case.sft else config.data.data_path)
        samples = samples_of_a_pass(passes, BatchSizes.from_training(config.training), steps, blend)
    writer = _Writer(folder, library, words, config, samples, in_passes=passes > 0)
    if not case.sft:
        documents = writer.documents(prefixes, tokenizer_folder)
        own = _data(case, {prefix: str(folder / name) for prefix, name in prefixes.items()})
        named = {str(folder / name): documents[prefix] for prefix, name in prefixes.items()}
        return replace(materials, options={**options, **own}, documents=named)
    sft = parsed.get(SFTConfig)
    built_in = template in BUILT_IN
    render = _renderer(tokenizer_folder, template) if built_in and template else None
    talks = writer.talks("train.jsonl", sft, render, valid=False)
    options |= {
        "train_data": (str(folder / "train.jsonl"),),
        "data_cache_path": str(folder / "cache"),
    }
    options |= {"chat_template": template if built_in else None}
    valid: tuple[Talk, ...] = ()
    if sft.valid_data:
        valid = writer.talks("valid.jsonl", sft, render, valid=True)
        options |= {"valid_data": (str(folder / "valid.jsonl"),)}
    else:
        options |= {"split": SPLIT}
    return replace(materials, options=options, talks=talks, valid_talks=valid)


def samples_of_a_pass(passes: float, sizes: BatchSizes, steps: int, blend: Blend) -> int:
    """Return the number of samples of a pass with which ``passes`` passes end in the last of
    ``steps`` steps or in the step before, with a step that has fewer samples than the others. If
    there is no such number, the passes end as late as possible."""
    best = (0, False, 0)
    best_samples = 1
    for samples in range(1, math.ceil(sizes.samples(steps) / passes) + 1):
        whole, left = sizes.steps(0, max(1, round(passes * samples)))
        taken = whole + (left > 0)
        quality = (min(taken, steps - 1), left > 0, taken)
        if taken <= steps and quality > best and _is_a_pass(blend, samples):
            best = quality
            best_samples = samples
    return best_samples


def _is_a_pass(blend: Blend, samples: int) -> bool:
    """Whether datasets with whole samples can have a pass of ``samples`` samples."""
    parts = samples_of_parts(blend, samples)
    sizes = [parts[prefix] for prefix in blend.prefixes]
    return len(BlendedOrder(blend.weights or sizes, sizes)) == samples


def samples_of_parts(blend: Blend, samples: int) -> dict[str, int]:
    """Return the number of samples of each dataset with which a pass over the blend has
    ``samples``. Without weights each dataset has more than the one before. With weights the dataset
    whose turn is next has no more samples than were read of it; the others have some left."""
    distinct = list(dict.fromkeys(blend.prefixes))
    weights = blend.weights or [1 + distinct.index(prefix) for prefix in blend.prefixes]
    order = BlendedOrder(weights, [1] * len(weights))
    last = blend.prefixes[order.place(samples)[0]]
    counts = order.counts(samples)
    sizes = dict.fromkeys(distinct, 1)
    for prefix, count in zip(blend.prefixes, counts, strict=True):
        spare = 0 if blend.weights is None or prefix == last else 2
        sizes[prefix] = max(sizes[prefix], count + spare)
    return sizes


Render = Callable[[Sequence[tuple[str, str]], bool], str]
"""Renders messages as text, with the beginning of an answer if the second argument is true."""


def _renderer(tokenizer: Path, template: str) -> Render | None:
    """Return transformers' rendering of a built-in template, which is independent of the trainer's.
    None if transformers is not installed."""
    if find_spec("transformers") is None:
        return None
    from transformers import AutoTokenizer

    loaded: Any = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)

    def render(messages: Sequence[tuple[str, str]], prompt: bool) -> str:
        given = [{"role": role, "content": content} for role, content in messages]
        text: str = loaded.apply_chat_template(
            given, chat_template=BUILT_IN[template], tokenize=False, add_generation_prompt=prompt
        )
        return text

    return render


def folder_weights(folder: Path, model: ModelConfig) -> dict[str, Tensor]:
    """Return the weights of a model's HuggingFace folder, each matrix of an expert by itself."""
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    return by_file_names(model, weights)


class DrawnWeights:
    """A source of normally distributed weights: matrices and biases around 0, norms around the
    value that multiplies by 1."""

    def __init__(self, model: ModelConfig) -> None:
        std = STD * math.sqrt(min(1.0, WIDTH / model.hidden_size))
        self._matrices = InitialWeights(1234, std)
        self._one = 0.0 if model.apply_layernorm_1p else 1.0

    def __call__(self, rectangle: Rectangle, out: Tensor) -> None:
        """Write the values of a rectangle into ``out``, a tensor of its size. The values depend on
        the rectangle's name and place alone."""
        if len(rectangle.shape) > 1:
            name = rectangle.name.replace("lora_", "drawn_")
            self._matrices(replace(rectangle, name=name), out)
            return
        column = replace(
            rectangle,
            shape=(*rectangle.shape, 1),
            offset=(*rectangle.offset, 0),
            size=(*rectangle.size, 1),
        )
        self._matrices(column, out.unsqueeze(-1))
        if not rectangle.name.endswith(".bias"):
            out.add_(self._one)


def _data_path(case: Case) -> list[str]:
    """Return the words of --data-path. Its prefixes are only names here."""
    given = parsed_options(case).get(DataConfig).data_path
    return list(given) or ["text"]


def _prefixes(case: Case) -> Mapping[str, str]:
    """Return the datasets of a case, each with the name of the file that replaces it."""
    names = dict.fromkeys(read_blend(_data_path(case)).prefixes)
    return {prefix: f"text-{number}" for number, prefix in enumerate(names)}


def _data(case: Case, prefixes: Mapping[str, str]) -> dict[str, object]:
    """Return the options that name the datasets, with other prefixes than the case's."""
    if case.sft:
        return {"train_data": ("train.jsonl",)}
    words = _data_path(case)
    weighted = len(words) > 1 and any(map(is_number, words))
    path = tuple(
        word if weighted and place % 2 == 0 else prefixes[word] for place, word in enumerate(words)
    )
    return {"data_path": path, "split": SPLIT}


def _text() -> tuple[str, ...]:
    """Return the words of Python's language reference in order, with only ASCII characters."""
    texts = (topics[name].encode("ascii", "ignore").decode() for name in sorted(topics))
    return tuple(word for text in texts for word in text.split())


def _write_tokenizer(
    folder: Path, vocab_size: int, words: Sequence[str], markers: Sequence[str]
) -> Library:
    """Train a byte-level BPE on the text, write it in HuggingFace's format, and return it. The
    special tokens come last, so that the last shard of a divided vocabulary is used."""
    special = (*markers, *HEADERS.values(), BEGIN, END)
    vocab_size = vocab_size or 384
    library = Library(models.BPE(unk_token=UNKNOWN))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    learnt = max(vocab_size - len(special), 2)
    trainer = trainers.BpeTrainer(
        vocab_size=learnt, special_tokens=[UNKNOWN], limit_alphabet=learnt - 1, show_progress=False
    )
    library.train_from_iterator([" ".join(words[:20000])], trainer)
    fill = vocab_size - library.get_vocab_size() - len(special)
    names = [*(f"<|reserved-{number}|>" for number in range(fill)), *special]
    library.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    folder.mkdir(parents=True)
    library.save(str(folder / "tokenizer.json"))
    named = {"bos_token": BEGIN, "eos_token": END, "unk_token": UNKNOWN}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    return library


def _id(library: Library, token: str) -> int:
    number: int | None = library.token_to_id(token)
    assert number is not None, f"{token} is no token"
    return number


class _Writer:
    """Writes text in pieces of drawn lengths, one after the other."""

    def __init__(
        self,
        folder: Path,
        library: Library,
        words: Sequence[str],
        config: Config,
        samples: int,
        *,
        in_passes: bool,
    ) -> None:
        """``samples`` is the least number of training samples. With ``in_passes`` it is the exact
        number, as far as weights of datasets allow."""
        self._samples = samples
        self._in_passes = in_passes
        self._folder = folder
        self._library = library
        self._words = cycle(words)
        self._training = config.training
        self._data_path = config.data.data_path
        self._chance = random.Random(1234)
        self._eod = _id(library, END)

    def documents(
        self, prefixes: Mapping[str, str], tokenizer: Path
    ) -> dict[str, tuple[tuple[int, ...], ...]]:
        """Write a dataset for each prefix and return the documents. The amount of text follows the
        blend's weights; without weights each dataset has more than the one before."""
        blend = read_blend(self._data_path)
        weights = dict.fromkeys(blend.prefixes, 0)
        # One dataset may stand in a blend twice.
        for prefix, weight in zip(
            blend.prefixes, blend.weights or range(1, len(blend.prefixes) + 1), strict=True
        ):
            weights[prefix] += weight
        length = self._training.seq_length
        share = float(SPLIT.partition(",")[0]) / 100
        loaded = load_tokenizer(tokenizer)
        size = self._library.get_vocab_size()
        written = {}
        for prefix, name in prefixes.items():
            share_of_blend = weights[name] / sum(weights.values())
            wanted = (self._samples * share_of_blend + 4) * length / share
            documents: list[tuple[int, ...]] = []
            if self._in_passes:
                documents = self._documents_of(samples_of_parts(blend, self._samples)[name])
            else:
                while sum(map(len, documents)) < wanted:
                    documents.append(self._document(length))
            with IndexedDatasetWriter(self._folder / name, token_dtype(size)) as writer:
                for document in documents:
                    writer.add(np.array(document))
            write_meta(
                str(self._folder / name),
                tokenizer=tokenizer,
                fingerprint=Fingerprint.of(loaded, size),
                vocab_size=size,
                eod=self._eod,
                documents=len(documents),
                tokens=sum(map(len, documents)),
                sums=writer.sums,
            )
            written[prefix] = tuple(documents)
        return written

    def _document(self, length: int) -> tuple[int, ...]:
        """Return text of a tenth to four thirds of a sample, with ``eod`` at the end."""
        return self._of_tokens(self._size(length))

    def _size(self, length: int) -> int:
        return self._chance.randint(max(2, length // 10), max(3, length * 4 // 3))

    def _of_tokens(self, tokens: int) -> tuple[int, ...]:
        """Return text of at most ``tokens`` tokens, with ``eod`` at the end."""
        # A word has one token or more.
        ids = self._library.encode(self._take(tokens)).ids
        return (*ids[: tokens - 1], self._eod)

    def _documents_of(self, samples: int) -> list[tuple[int, ...]]:
        """Return documents with exactly ``samples`` samples for training, and some documents for
        validation."""
        length = self._training.seq_length
        # The last label of a sample is the first token of the next sample. Tokens after the last
        # whole sample are not read.
        left = whole = samples * length + 1 + length // 2
        documents: list[tuple[int, ...]] = []
        while left:
            # The share is rounded. With three documents and one after them the split is right.
            tokens = min(self._size(length), max(2, whole // 3))
            # A document has at least two tokens.
            tokens = left if left - tokens < 2 else tokens
            documents.append(self._of_tokens(tokens))
            left -= tokens
        training = len(documents)
        while len(documents) == training or len(training_share(documents, SPLIT)) < training:
            documents.append(self._of_tokens(2 * length))
        return documents

    def talks(
        self, name: str, sft: SFTConfig, render: Render | None, *, valid: bool
    ) -> tuple[Talk, ...]:
        """Write a file with enough examples for the run, or for its evaluations, and return them.
        ``render`` renders them with a built-in template. It is None if the template is TEMPLATE,
        or if transformers is not installed."""
        length = self._training.seq_length
        wanted = 2 * self._training.global_batch_size if valid else self._samples
        style = "messages" if sft.data_format == "auto" else sft.data_format
        talks: list[Talk] = []
        examples: list[Expected] = []
        tokens = 0
        unusable = 0

        def enough() -> bool:
            if self._in_passes and not valid and all(talk.ids for talk in talks):
                trained = examples if sft.valid_data else training_share(examples, SPLIT)
                return samples_of_examples(trained, sft, length) >= wanted
            return len(talks) >= wanted and not (sft.packing and tokens < wanted * length)

        while not enough():
            # With packing an example has a third of a sample on average. Without, it has up to four
            # thirds, so that some are cut, unless a long example would stop the run.
            most = length // 2 if sft.packing else length * 4 // 3
            if sft.on_long_sample == "stop":
                most = min(most, length * 3 // 4)
            talk = self._talk(style, self._chance.randint(max(8, length // 5), max(9, most)))
            if sft.chat_template in BUILT_IN and style not in WITHOUT_TEMPLATE:
                talk = self._rendered(talk, render)
            trainable = trained_examples((talk,), sft, length) if talk.ids else ()
            if talk.ids and not trainable and "drop" not in (sft.on_long_sample, sft.on_bad_sample):
                # The example is cut before its answer, so the run would leave it out.
                unusable += 1
                if unusable > MOST_UNUSABLE:
                    raise ConfigError(
                        f"--seq-length {length}",
                        got="questions that fill a sample, with what the chat template adds",
                        expected="room for an answer",
                        do="raise --seq-length",
                    )
                continue
            unusable = 0
            talks.append(talk)
            examples += trainable
            tokens += len(talk.ids)
        lines = (json.dumps(_record(talk, style)) + "\n" for talk in talks)
        (self._folder / name).write_text("".join(lines))
        return tuple(talks)

    def _talk(self, style: str, length: int) -> Talk:
        """Return a conversation of one or two questions, of about ``length`` tokens."""
        if style in ("prompt", "text"):
            question = "" if style == "text" else self._words_of(length // 4)
            answer = self._words_of(length - length // 4)
            whole = [self._encoded(question), self._encoded(f" {answer}" if question else answer)]
            ids = (*whole[0], *whole[1], self._eod)
            answers = (0,) * len(whole[0]) + (1,) * (len(whole[1]) + 1)
            return Talk((("user", question), ("assistant", answer)), ids, answers)
        turns = 2 if style in ("messages", "sharegpt") and self._chance.random() < 0.4 else 1
        messages: list[tuple[str, str]] = []
        if style in ("messages", "sharegpt") and self._chance.random() < 0.3:
            messages.append(("system", self._words_of(2)))
        for _ in range(turns):
            turn_length = length // turns
            messages.append(("user", self._words_of(max(2, turn_length // 5))))
            messages.append(("assistant", self._words_of(max(2, turn_length - turn_length // 3))))
        tokens = [_id(self._library, BEGIN)]
        answers_of = [0]
        number = 0
        for role, content in messages:
            body = self._encoded(content)
            tokens.append(_id(self._library, HEADERS[role]))
            answers_of.append(0)
            if role == "assistant":
                number += 1
                body = [*body, self._eod]
            tokens += body
            answers_of += [number if role == "assistant" else 0] * len(body)
        return Talk(tuple(messages), tuple(tokens), tuple(answers_of))

    def _rendered(self, talk: Talk, render: Render | None) -> Talk:
        """Return the conversation with the tokens of a built-in template. An answer is the text
        that its message adds to the text before it, which ends with the beginning of an answer,
        without the final line end."""
        if render is None:
            return replace(talk, ids=(), answers=())
        spans = [
            (
                len(render(talk.messages[:place], True)),
                len(render(talk.messages[: place + 1], False).rstrip("\n")),
            )
            for place, (role, _) in enumerate(talk.messages)
            if role == "assistant"
        ]
        encoded = self._library.encode(render(talk.messages, False), add_special_tokens=False)
        answers = [
            sum(n for n, (first, end) in enumerate(spans, 1) if start < end and stop > first)
            for start, stop in encoded.offsets
        ]
        return replace(talk, ids=tuple(encoded.ids), answers=tuple(answers))

    def _encoded(self, text: str) -> list[int]:
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids

    def _words_of(self, tokens: int) -> str:
        """Return at least one word, with about ``tokens`` tokens."""
        words = list(islice(self._words, 1))
        while len(self._encoded(" ".join(words))) < tokens:
            words += islice(self._words, 1)
        return " ".join(words)

    def _take(self, words: int) -> str:
        return " ".join(islice(self._words, words))


def _record(talk: Talk, style: str) -> dict[str, object]:
    """Return an example as a record of the format ``style``."""
    if style == "messages":
        return {"messages": [{"role": role, "content": text} for role, text in talk.messages]}
    if style == "sharegpt":
        names = {"system": "system", "user": "human", "assistant": "gpt"}
        return {
            "conversations": [{"from": names[role], "value": text} for role, text in talk.messages]
        }
    question, answer = (text for _, text in talk.messages)
    if style == "alpaca":
        return {"instruction": question, "input": "", "output": answer}
    if style == "prompt":
        return {"prompt": question, "completion": f" {answer}"}
    return {"text": answer}
