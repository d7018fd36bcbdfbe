"""Every command with eight tokenizers as third parties ship them: the ids are those of transformers from the first file to the export."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from megatron_llama.checkpoint.model_folders.hf.writer import export_hf
from megatron_llama.cli import main
from megatron_llama.config.schema import ModelConfig
from megatron_llama.data.indexed import IndexedDataset
from megatron_llama.data.tokenizer.load import load_tokenizer
from megatron_llama.data.tokenizer.stream import TextStream
from megatron_llama.model.init import InitialWeights
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.data.tokenizer.layouts import LAYOUTS
from tests.e2e.product import words

TEXTS = ("A statement is one line of the program. " * 3, "The value of 12 names is an object. " * 3)
PROMPT, NEW = "A statement is", 8
TRAIN = {"seq_length": 16, "micro_batch_size": 2, "global_batch_size": 2, "train_iters": 1, "lr": 1e-3, "split": "50,50,0"}


@pytest.mark.long
@pytest.mark.few(1, all=4)
@pytest.mark.parametrize("name", LAYOUTS)
def test_from_text_to_export(
    name: str, layouts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    auto, ours = AutoTokenizer.from_pretrained(layouts / name), load_tokenizer(layouts / name)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = ModelConfig(vocab_size=len(auto), head_dim=8, max_position_embeddings=256, **shape)
    export_hf(tmp_path / "hf", model, InitialWeights(3, 0.3), "float32", ours)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    eod = auto.eos_token_id is not None

    def run(command: str, **options: object) -> str:
        capsys.readouterr()
        assert main([command, *words(options)]) == 0
        return capsys.readouterr().out

    made = {"input": tmp_path / "texts.jsonl", "output_prefix": tmp_path / "data", "tokenizer_model": layouts / name, "workers": 1}
    run("preprocess", **made, append_eod=eod or None)
    data = IndexedDataset(tmp_path / "data")
    ids = [id for text in TEXTS for id in (*auto(text, add_special_tokens=False)["input_ids"], *[auto.eos_token_id] * eod)]
    assert data.tokens(0, len(ids)).tolist() == ids and data.num_documents == 2
    run("pretrain", **TRAIN, init_from_hf=tmp_path / "hf", data_path=tmp_path / "data", save=tmp_path / "run", export_hf=tmp_path / "out")
    sft = {**TRAIN, "seq_length": 128, "load": tmp_path / "run", "finetune": True, "train_data": tmp_path / "texts.jsonl"}
    run("sft", **sft, save=tmp_path / "tuned")
    assert "lm loss" in run("evaluate", load=tmp_path / "tuned", text=tmp_path / "texts.jsonl")
    run("export", load=tmp_path / "tuned", output=tmp_path / "last")
    for folder in ("out", "last"):
        exported = AutoTokenizer.from_pretrained(tmp_path / folder)
        assert [exported(text)["input_ids"] for text in (PROMPT, *TEXTS)] == [auto(text)["input_ids"] for text in (PROMPT, *TEXTS)]
    prompt = auto(PROMPT, return_tensors="pt")["input_ids"]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "last")
    with torch.no_grad():
        new = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False)[0].tolist()
    saved = load_tokenizer(tmp_path / "last")
    stream = TextStream(saved, prompt[0].tolist())  # an untrained model's bytes are no characters, which is seen when they come
    ends = theirs.generation_config.eos_token_id
    stops = set(ends if isinstance(ends, list) else [ends])
    answer = [stream.add(token) for token in new[prompt.shape[1] :] if token not in stops]
    expected = saved.decode(prompt[0].tolist()) + "".join(answer) + stream.rest() + "\n"
    for folder in ("tuned", "last"):
        assert run("generate", load=tmp_path / folder, prompt=PROMPT, max_new_tokens=NEW, temperature=0) == expected
    (tmp_path / "template").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    monkeypatch.setattr(sys, "stdin", io.StringIO("A statement\n"))
    assert run("chat", load=tmp_path / "tuned", chat_template=tmp_path / "template", max_new_tokens=2, temperature=0)
