"""Tokenizers as those of LLaMA 2 and 3, with the special tokens that their chat templates spell."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

import pytest
from megatron_llama.data.tokenizer.hf import HFTokenizer
from megatron_llama.data.tokenizer.spm import train_tokenizer
from megatron_llama.tune.sft.chat import ChatTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>")


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Python's language reference."""
    return [topics[name] for name in sorted(topics)]


@pytest.fixture(scope="session")
def llama2(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sentencepiece model as a HuggingFace tokenizer."""
    folder = tmp_path_factory.mktemp("llama2")
    train_tokenizer(texts[:20], 800, folder / "tokenizer.model").save_hf(folder)
    return folder


@pytest.fixture(scope="session")
def llama3(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level BPE."""
    folder = tmp_path_factory.mktemp("llama3")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts[:20], trainers.BpeTrainer(vocab_size=800, initial_alphabet=alphabet, show_progress=False))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}'
    )
    return folder


@pytest.fixture(scope="session")
def chat(llama3: Path) -> ChatTokenizer:
    """With LLaMA 3's template."""
    return ChatTokenizer(HFTokenizer(llama3 / "tokenizer.json"), "llama3")
