"""Ten tokenizers as third parties ship them: really trained, on Python's own documentation, with the files and the settings that the
models of that name have beside their weights.

Nothing here comes from this package but the text: ``tokenizers`` and ``sentencepiece`` make what they make for everybody.
"""

from __future__ import annotations

import io
import json
from base64 import b64encode
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import sentencepiece
from megatron_llama.data.corpus import python_documentation
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.tokenization_utils_base import generate_merges

from tests.data.tokenizer.byte_level import learnt, split_by

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
LEARNT = 600
"""Tokens that are learnt; every layout adds its own special ones."""
GPT_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How LLaMA 3 (three digits at a time) and Qwen (one) cut a text."""

TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Mistral's tekken cuts a text: words in capitals apart."""

LLAMA2_CHAT = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3_CHAT = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL_CHAT = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
GEMMA_CHAT = (
    "{{ bos_token }}{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def llama2(folder: Path) -> None:
    """A sentencepiece BPE alone; begin tokens are a flag of tokenizer_config.json."""
    _sentencepiece(folder, "bpe")
    flags = {
        "add_bos_token": True, "add_eos_token": False, "legacy": False, "pad_token": None, "padding_side": "right",
        "sp_model_kwargs": {},
    }
    named = {name: _added(text, "__type") for name, text in _UNK_BOS_EOS.items()}
    _config(folder, "LlamaTokenizer", {**flags, **named, "chat_template": LLAMA2_CHAT, "clean_up_tokenization_spaces": False})
    _json(folder / "special_tokens_map.json", {name: _added(text) for name, text in _UNK_BOS_EOS.items()})
    _generation(folder, bos_token_id=1, eos_token_id=2, pad_token_id=0)


def mistral(folder: Path) -> None:
    """The same kind of model with its tokenizer.json, as transformers converted it for years."""
    pieces = [piece for piece, _ in _sentencepiece(folder, "bpe")]
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    bpe = models.BPE(vocab=vocabulary, merges=generate_merges(vocabulary), unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = _sentencepiece_decoder()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in _UNK_BOS_EOS.values()])
    tokenizer.post_processor = _template(tokenizer, "<s> $A", "<s> $A <s>:1 $B:1")
    tokenizer.save(str(folder / "tokenizer.json"))
    flags = {"add_bos_token": True, "add_eos_token": False, "legacy": True, "pad_token": None, "sp_model_kwargs": {}}
    named = {"spaces_between_special_tokens": False, "use_default_system_prompt": False, "additional_special_tokens": []}
    _config(folder, "LlamaTokenizer", {**flags, **named, **_UNK_BOS_EOS, "chat_template": MISTRAL_CHAT, **_decoder(tokenizer)})
    _json(folder / "special_tokens_map.json", _UNK_BOS_EOS)
    _generation(folder, bos_token_id=1, eos_token_id=2)


def llama3(folder: Path) -> None:
    """A byte-level BPE whose post-processor adds the begin token, and beside it the ranks from which Meta's own code reads it."""
    tokenizer = learnt(texts(), LEARNT, words=split_by(GPT_SPLIT % "{1,3}"))
    spelt = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    byte_of = {character: byte for byte, character in _byte_characters().items()}
    (folder / "original").mkdir()
    lines = (b"%s %d\n" % (b64encode(bytes(byte_of[character] for character in text)), rank) for rank, text in enumerate(spelt))
    (folder / "original" / "tokenizer.model").write_bytes(b"".join(lines))
    _json(folder / "original" / "params.json", {"use_scaled_rope": True, "vocab_size": len(spelt) + 256})
    tokenizer.model.ignore_merges = True
    named = {0: "begin_of_text", 1: "end_of_text", 4: "finetune_right_pad_id", 6: "start_header_id", 7: "end_header_id"}
    named |= {8: "eom_id", 9: "eot_id", 10: "python_tag"}
    numbers = iter(range(256))
    special = [f"<|{named[at]}|>" if at in named else f"<|reserved_special_token_{next(numbers)}|>" for at in range(256)]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    bos = special[0]
    template = _template(tokenizer, f"{bos} $A", f"{bos} $A {bos}:1 $B:1")
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": bos, "eos_token": "<|eot_id|>"}
    more = {"clean_up_tokenization_spaces": True, "model_input_names": ["input_ids", "attention_mask"], "model_max_length": 131072}
    _config(folder, "PreTrainedTokenizerFast", {**names, **more, "chat_template": LLAMA3_CHAT, **_decoder(tokenizer)})
    _json(folder / "special_tokens_map.json", {name: _added(text) for name, text in names.items()})
    ends = [tokenizer.token_to_id(f"<|{name}|>") for name in ("end_of_text", "eom_id", "eot_id")]
    _generation(folder, bos_token_id=tokenizer.token_to_id(bos), eos_token_id=ends, do_sample=True, temperature=0.6, top_p=0.9)


def tekken(folder: Path) -> None:
    """Mistral's byte-level BPE as transformers converted it, its special tokens in front."""
    special = (*_UNK_BOS_EOS.values(), "[INST]", "[/INST]")
    tokenizer = learnt(texts(), LEARNT, words=split_by(TEKKEN_SPLIT), special=special)
    tokenizer.post_processor = _template(tokenizer, "<s> $A", "<s> $A <s>:1 $B:1")
    tokenizer.save(str(folder / "tokenizer.json"))
    more = {"add_bos_token": True, "add_eos_token": False, "model_max_length": 131072, "chat_template": MISTRAL_CHAT}
    _config(folder, "PreTrainedTokenizerFast", {**more, **_UNK_BOS_EOS, **_decoder(tokenizer)})
    _json(folder / "special_tokens_map.json", _UNK_BOS_EOS)
    _generation(folder, bos_token_id=1, eos_token_id=2)


def gemma(folder: Path) -> None:
    """A sentencepiece BPE that puts no space in front, whose begin and end tokens have other names."""
    pieces = [piece for piece, _ in _sentencepiece(folder, "bpe")]
    (folder / "tokenizer.model").unlink()
    learnt = {piece: id for id, piece in enumerate(pieces)}
    turns = ("<start_of_turn>", "<end_of_turn>")
    renamed = ["<pad>", "<eos>", "<bos>", *pieces[3:], "<unk>", *turns]
    bpe = models.BPE(
        vocab={piece: id for id, piece in enumerate(renamed)},
        merges=generate_merges(learnt),
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<pad>", "<eos>", "<bos>", "<unk>", *turns)])
    tokenizer.post_processor = _template(tokenizer, "<bos> $A", "<bos> $A <bos>:1 $B:1")
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    more = {"add_bos_token": True, "add_eos_token": False, "chat_template": GEMMA_CHAT, "clean_up_tokenization_spaces": False}
    _config(folder, "PreTrainedTokenizerFast", {**more, **names, **_decoder(tokenizer)})
    _json(folder / "special_tokens_map.json", names)
    _generation(folder, bos_token_id=2, eos_token_id=[1, tokenizer.token_to_id("<end_of_turn>")])


def gpt2(folder: Path) -> None:
    """A byte-level BPE with one special token for everything, which nothing adds."""
    tokenizer = learnt(texts(), LEARNT)
    tokenizer.add_special_tokens([AddedToken(_END, normalized=True)])
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=True, trim_offsets=False)
    _save_with_vocab(tokenizer, folder)
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END)
    flags = {"add_bos_token": False, "add_prefix_space": False, "errors": "replace", "model_max_length": 1024, "pad_token": None}
    _config(folder, "GPT2Tokenizer", {**flags, **names, **_decoder(tokenizer)})
    _json(folder / "special_tokens_map.json", names)
    _generation(folder, bos_token_id=tokenizer.token_to_id(_END), eos_token_id=tokenizer.token_to_id(_END))


def qwen(folder: Path) -> None:
    """A byte-level BPE without a begin token, whose documents and messages end differently."""
    tokenizer = learnt(texts(), LEARNT, words=split_by(GPT_SPLIT % ""))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in (_END, "<|im_start|>", "<|im_end|>")])
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    _save_with_vocab(tokenizer, folder)
    names = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": _END, "unk_token": None}
    flags = {
        "add_bos_token": False, "add_prefix_space": False, "errors": "replace", "split_special_tokens": False, "model_max_length": 32768,
    }
    more = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "chat_template": CHATML, "clean_up_tokenization_spaces": False}
    _config(folder, "Qwen2Tokenizer", {**flags, **names, **more, **_decoder(tokenizer)})
    end = tokenizer.token_to_id(_END)
    _generation(folder, bos_token_id=end, pad_token_id=end, do_sample=True, eos_token_id=[end + 2, end], top_p=0.8, temperature=0.7)


def smollm2(folder: Path) -> None:
    """A byte-level BPE with its special tokens in front. It names a begin token, which nothing adds."""
    special = [_END, "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>", "<gh_stars>"]
    special += ["<issue_start>", "<issue_comment>", "<issue_closed>", "<jupyter_start>", "<jupyter_text>", "<jupyter_code>"]
    special += ["<jupyter_output>", "<jupyter_script>", "<empty_output>"]
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer = learnt(texts(), LEARNT, words=pre_tokenizers.Sequence(steps), special=special)
    _save_with_vocab(tokenizer, folder)
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": _END, "pad_token": "<|im_end|>"}
    more = {"add_prefix_space": False, "additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "chat_template": CHATML}
    _config(folder, "GPT2Tokenizer", {**more, **names, "model_max_length": 8192, **_decoder(tokenizer)})
    _json(folder / "special_tokens_map.json", {name: _added(text) for name, text in names.items()})
    _generation(folder, bos_token_id=1, eos_token_id=2, pad_token_id=2)


def wordpiece(folder: Path) -> None:
    """BERT's: words in lower case, between two special tokens; no token that begins or ends documents."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(texts(), trainers.WordPieceTrainer(vocab_size=LEARNT, special_tokens=special, show_progress=False))
    tokenizer.post_processor = _template(tokenizer, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")
    tokenizer.save(str(folder / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab()
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in sorted(vocabulary, key=vocabulary.__getitem__)), encoding="utf-8")
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    flags = {"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True, "model_max_length": 512}
    _config(folder, "BertTokenizer", {**flags, **names, "clean_up_tokenization_spaces": True, **_decoder(tokenizer)})
    _json(folder / "special_tokens_map.json", names)


def unigram(folder: Path) -> None:
    """A sentencepiece unigram model with its tokenizer.json, whose post-processor adds the begin token."""
    tokenizer = Tokenizer(models.Unigram(_sentencepiece(folder, "unigram"), unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="always", split=False)
    tokenizer.decoder = _sentencepiece_decoder()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in _UNK_BOS_EOS.values()])
    tokenizer.post_processor = _template(tokenizer, "<s> $A", "<s> $A <s>:1 $B:1")
    tokenizer.save(str(folder / "tokenizer.json"))
    more = {"clean_up_tokenization_spaces": False, "model_max_length": 4096}
    _config(folder, "PreTrainedTokenizerFast", {**_UNK_BOS_EOS, **more, **_decoder(tokenizer)})
    _json(folder / "special_tokens_map.json", {name: _added(text) for name, text in _UNK_BOS_EOS.items()})
    _generation(folder, bos_token_id=1, eos_token_id=2)


LAYOUTS: Mapping[str, Callable[[Path], None]] = {
    made.__name__: made for made in (llama2, llama3, gpt2, qwen, smollm2, mistral, tekken, gemma, wordpiece, unigram)
}
"""Each writes its files into an empty folder."""
TIKTOKEN = "llama3/original"
"""Where ``write_layouts`` leaves the ranks of LLaMA 3, whose ids are those of its tokenizer.json."""

_UNK_BOS_EOS: Mapping[str, str] = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_END = "<|endoftext|>"


def write_layouts(folder: Path) -> None:
    """Write all of them, each into a folder of its name."""
    for name, write in LAYOUTS.items():
        (folder / name).mkdir(parents=True)
        write(folder / name)


def texts() -> list[str]:
    """What they learn from: 40 chapters of Python's language reference."""
    return list(islice(python_documentation(), 40))


def _sentencepiece(folder: Path, kind: str) -> list[tuple[str, float]]:
    """Train a model with the settings of LLaMA's, write it, and return its pieces with their scores."""
    model = io.BytesIO()
    options = {"byte_fallback": True, "split_digits": True, "allow_whitespace_only_pieces": True, "character_coverage": 0.99995}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts() for line in text.split("\n") if line),
        model_writer=model,
        model_type=kind,
        vocab_size=LEARNT,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
        **options,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return [(processor.id_to_piece(id), processor.get_score(id)) for id in range(processor.get_piece_size())]


def _sentencepiece_decoder() -> decoders.Decoder:
    return decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])


def _byte_characters() -> dict[int, str]:
    """The character for each byte in a byte-level vocabulary, as GPT-2's ``bytes_to_unicode`` has them."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printed]
    return {byte: chr(byte) for byte in printed} | {byte: chr(256 + at) for at, byte in enumerate(others)}


def _template(tokenizer: Tokenizer, single: str, pair: str) -> processors.PostProcessor:
    words = {word for word in single.split() if not word.startswith("$")}
    return processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(word, tokenizer.token_to_id(word)) for word in sorted(words)]
    )


def _save_with_vocab(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.model.save(str(folder))


def _added(text: str, *types: str) -> dict[str, Any]:
    """A special token as the files of transformers before its fifth version write it."""
    token = {"content": text, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {**dict.fromkeys(types, "AddedToken"), **token}


def _decoder(tokenizer: Tokenizer) -> dict[str, Any]:
    tokens = tokenizer.get_added_tokens_decoder()
    return {
        "added_tokens_decoder": {
            str(id): {**_added(token.content), "normalized": token.normalized, "special": True} for id, token in tokens.items()
        }
    }


def _config(folder: Path, kind: str, fields: Mapping[str, Any]) -> None:
    _json(folder / "tokenizer_config.json", {"model_max_length": 10**30, **fields, "tokenizer_class": kind})


def _generation(folder: Path, **fields: Any) -> None:
    _json(folder / "generation_config.json", {"_from_model_config": True, **fields, "transformers_version": "4.46.0"})


def _json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
