"""HuggingFace folders as people have them, there and back: every file and field is the same again, or named in a line.

transformers says what a folder means: it reads both, and has to find the same model, the same tokenizer and the same way to write a text.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import megatron_llama as ml
import pytest
import torch
from megatron_llama.checkpoint.meta import parse_meta
from megatron_llama.cli import main
from megatron_llama.train.api.common.trained import load_trained, open_reader
from tokenizers import AddedToken, Tokenizer, processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.checkpoint.cases import renew_sums
from tests.converter.converting import listing
from tests.data.tokenizer.byte_level import learnt

Capture = pytest.CaptureFixture[str]
SPECIAL = ("<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>")
BEGIN, END, IM_START, IM_END = range(396, 400)
ROWS = 416
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "vocab_size": ROWS, "initializer_range": 0.1, "bos_token_id": BEGIN, "eos_token_id": END,
}
CHATML = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
STEP = ["--global-batch-size", 1, "--seq-length", 16, "--lr", 0, "--weight-decay", 0, "--split", "100,0,0"]
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin", "model.safetensors.index.json", "SHA256SUMS")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A byte-level BPE with the special tokens of a chat model behind its vocabulary."""
    found = learnt([topics[name] for name in sorted(topics)][:20], BEGIN)
    found.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    found.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", BEGIN)])
    return found


def model_folder(folder: Path, tokenizer: Tokenizer, kind: str = "llama", dtype: torch.dtype = torch.float32, **fields: Any) -> PreTrainedModel:
    """Write a small model of a family, and a tokenizer beside it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **fields})).to(dtype)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>", "eos_token": "<|end|>", "model_max_length": 128}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


def change(folder: Path, file: str = "config.json", **fields: Any) -> None:
    """Set fields of a JSON file; those that are ``...`` go."""
    path = folder / file
    content = {**(json.loads(path.read_text()) if path.exists() else {}), **fields}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))


def added_tokens(folder: Path, tokenizer: Tokenizer, model: PreTrainedModel) -> None:
    longer = Tokenizer.from_str(tokenizer.to_str())
    longer.add_tokens(["<one>", "<two>"])
    longer.save(str(folder / "tokenizer.json"))
    (folder / "added_tokens.json").write_text(json.dumps({"<one>": 400, "<two>": 401}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|im_end|>"}))


def stale_files(folder: Path, tokenizer: Tokenizer, old: PreTrainedModel) -> None:
    with torch.no_grad():
        old.lm_head.weight.add_(1)
    old.save_pretrained(folder / "old", max_shard_size="40KB")
    for path in (folder / "old").glob("model*"):
        path.rename(folder / path.name)
    shutil.rmtree(folder / "old")


def tied_and_sharded(folder: Path, tokenizer: Tokenizer, model: PreTrainedModel) -> None:
    model.save_pretrained(folder, max_shard_size="30KB")


def old_bin(folder: Path, tokenizer: Tokenizer, model: PreTrainedModel) -> None:
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def harmless_files(folder: Path, tokenizer: Tokenizer, model: PreTrainedModel) -> None:
    for name in ("README.md", "LICENSE", ".gitattributes", "modeling_own.py", "training_args.bin", "trainer_state.json"):
        (folder / name).write_text("{}")
    (folder / "runs").mkdir()


@dataclass(frozen=True)
class Folder:
    """A small model of a family, fields that are set in its files, files that go, and what else is done to it."""

    kind: str = "llama"
    dtype: torch.dtype = torch.float32
    model: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    without: str = ""
    more: Callable[[Path, Tokenizer, PreTrainedModel], None] = lambda folder, tokenizer, model: None

    def write(self, folder: Path, tokenizer: Tokenizer) -> None:
        model = model_folder(folder, tokenizer, self.kind, self.dtype, **self.model)
        for name, fields in (("config", self.config), ("generation_config", self.generation), ("tokenizer_config", self.tokenizer)):
            if fields:
                change(folder, f"{name}.json", **fields)
        if self.without:
            (folder / self.without).unlink()
        self.more(folder, tokenizer, model)


GENERATION, WEIGHTS_FILE = "generation_config.json", "model.safetensors"
YARN = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 128, "mscale": 1.0, "mscale_all_dim": 0, "finetuned": True}
TEMPLATES = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "{{ tools }}" + CHATML}]
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.05, "eos_token_id": [END, IM_END]}
HARMLESS = {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnModel"}, "use_cache": False, "pretraining_tp": 2, "unk_token_id": 0}
HARMLESS |= {"_name_or_path": "somebody/model", "id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}}
HARMLESS |= {"task_specific_params": {"summary": {"max_length": 20}}, "attention_dropout": None, "tokenizer_class": "PreTrainedTokenizerFast"}
FOLDERS: dict[str, Folder] = {
    "plain": Folder(),
    "ends_in_config": Folder(config={"eos_token_id": [END, IM_END]}, without=GENERATION),
    "sampling_in_config": Folder(config={"temperature": 0.7, "top_k": 20, "do_sample": True, "use_cache": True}, without=GENERATION),
    "ends_in_generation_config": Folder(generation={"eos_token_id": [IM_END, END]}),
    "ends_in_both": Folder(config={"eos_token_id": [END, IM_END, 7]}, generation={"eos_token_id": [IM_END, END]}),
    "named_templates": Folder(tokenizer={"chat_template": TEMPLATES}),
    "added_tokens": Folder(more=added_tokens),
    "sampling": Folder(model={"pad_token_id": IM_START}, generation=SAMPLING),
    "stale_files": Folder(more=stale_files),
    "tied_and_sharded": Folder(model={"tie_word_embeddings": True}, without=WEIGHTS_FILE, more=tied_and_sharded),
    "old_bin": Folder(
        dtype=torch.bfloat16,
        config={"dtype": ..., "torch_dtype": "bfloat16", "transformers_version": "4.31.0"},
        without=WEIGHTS_FILE,
        more=old_bin,
    ),
    "yarn": Folder(config={"rope_parameters": ..., "rope_theta": 5e5, "rope_scaling": YARN}),
    "no_begin_token": Folder(
        "qwen2",
        model={"bos_token_id": None, "eos_token_id": IM_END, "pad_token_id": END},
        config={"bos_token_id": None, "use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1, "layer_types": ...},
        generation={"bos_token_id": END, "pad_token_id": END, "eos_token_id": [IM_END, END], "top_k": 20, "do_sample": True},
        tokenizer={"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|end|>", "add_bos_token": False},
    ),
    "harmless_files": Folder(config=HARMLESS, more=harmless_files),
}
SHORT = ("ends_in_config", "no_begin_token", "harmless_files")
RUNS = [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in FOLDERS]


def command(*words: object) -> None:
    assert main(list(map(str, words))) == 0


@pytest.mark.few(4, all=14)
@pytest.mark.parametrize("form", ["native", "megatron", pytest.param("torch_dist", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", FOLDERS)
def test_a_conversion_there_and_back(name: str, form: str, tokenizer: Tokenizer, tmp_path: Path, capsys: Capture) -> None:
    FOLDERS[name].write(tmp_path / "hf", tokenizer)
    command("convert", tmp_path / "hf", tmp_path / "there", "--to", form)
    command("convert", tmp_path / "there", tmp_path / "back", "--to", "hf")
    assert list(losses(tmp_path / "hf", tmp_path / "back", capsys.readouterr().out)) == []


@pytest.fixture(scope="module")
def dataset(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus for all folders: documents end with a token that all of their tokenizers have."""
    folder = tmp_path_factory.mktemp("corpus")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "docs.jsonl").write_text("".join(json.dumps({"text": topics[name]}) + "\n" for name in sorted(topics)[:6]))
    command("preprocess", "--input", folder / "docs.jsonl", "--output-prefix", folder / "docs", "--tokenizer-model", folder)
    return folder / "docs"


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
def test_a_run_and_its_exports(name: str, tokenizer: Tokenizer, dataset: Path, tmp_path: Path, capsys: Capture) -> None:
    """A step at a learning rate of 0: what the run exports at its end, and what is exported and converted from its checkpoint."""
    original = tmp_path / "hf"
    FOLDERS[name].write(original, tokenizer)
    where = ["--save", tmp_path / "run", "--export-hf", tmp_path / "end"]
    command("pretrain", "--init-from-hf", original, "--data-path", dataset, "--train-iters", 1, *STEP, *where)
    said = capsys.readouterr().out
    command("export", "--load", tmp_path / "run", "--output", tmp_path / "export")
    command("convert", tmp_path / "run", tmp_path / "converted", "--to", "hf")
    for back in ("end", "converted"):
        assert (back, list(losses(original, tmp_path / back, said))) == (back, [])
    assert listing(tmp_path / "export") == listing(tmp_path / "end")
    ends = [load_trained(open_reader(folder), torch.float32).stops for folder in (original, tmp_path / "run", tmp_path / "export")]
    assert ends[1:] == ends[:1] * 2


def losses(original: Path, back: Path, said: str) -> Iterator[str]:
    """Yield what is another in ``back``, and not named in ``said``."""
    files, found = ({path.name: path for path in folder.iterdir()} for folder in (original, back))
    weights = {path.name for pattern in WEIGHTS for folder in (original, back) for path in folder.glob(pattern)}
    for name in files.keys() - weights - {"config.json", "generation_config.json"}:
        if name not in said and (name not in found or found[name].read_bytes() != files[name].read_bytes()):
            yield name
    for name in found.keys() - files.keys() - weights - {"generation_config.json"}:
        yield f"{name} is new"
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (original, back))
    named = {name for name in before if f"config.json {name} " in said}
    for name in before.keys() - named - {"dtype", "torch_dtype"}:
        if name not in after or after[name] != before[name]:
            yield f"config.json {name}: {before[name]} became {after.get(name)}"
    if (original / "generation_config.json").exists():
        before, after = (json.loads((folder / "generation_config.json").read_text()) for folder in (original, back))
        if before != after:
            yield f"generation_config.json: {before} became {after}"
    yield from meanings(original, back, named)


def meanings(original: Path, back: Path, named: set[str]) -> Iterator[str]:
    """Yield what transformers finds another."""
    first, second = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (original, back))
    before, after = (model.config.to_dict() for model in (first, second))
    # transformers derives it where it is not there, and where it is null.
    before["head_dim"] = before.get("head_dim") or before["hidden_size"] // before["num_attention_heads"]
    for name in before.keys() | after.keys():
        if name not in named | {"dtype", "torch_dtype", "_name_or_path"} and before.get(name) != after.get(name):
            yield f"transformers' {name}: {before.get(name)} became {after.get(name)}"
    fields = [model.generation_config.to_dict() for model in (first, second)]
    for content in fields:
        content.pop("_from_model_config", None)
        content.pop("transformers_version", None)
        content["use_cache"] = content["use_cache"] is not False
    for name in fields[0].keys() | fields[1].keys():
        if fields[0].get(name) != fields[1].get(name):
            yield f"the generation config's {name}: {fields[0].get(name)} became {fields[1].get(name)}"
    states = [model.state_dict() for model in (first, second)]
    if states[0].keys() != states[1].keys() or not all(torch.equal(states[0][name], states[1][name]) for name in states[0]):
        yield "the weights"
    old, new = (AutoTokenizer.from_pretrained(folder) for folder in (original, back))
    text = "Hello <|im_start|>world<one>"
    if old(text).input_ids != new(text).input_ids or old.chat_template != new.chat_template or old.special_tokens_map != new.special_tokens_map:
        yield "the tokenizer"


def generation_ends(folder: Path) -> list[int]:
    """The tokens at which transformers' generate() ends a text."""
    value = AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id
    return value if isinstance(value, list) else [value]


@pytest.mark.long
def test_runs_that_follow_a_run(tokenizer: Tokenizer, dataset: Path, tmp_path: Path) -> None:
    """A run that is resumed, and one that begins with the weights of another, know the files of the first."""
    original = tmp_path / "hf"
    FOLDERS["harmless_files"].write(original, tokenizer)
    change(original, eos_token_id=[END, IM_END])
    (original / "generation_config.json").unlink()
    run = [*STEP, "--data-path", dataset, "--save"]
    command("pretrain", "--init-from-hf", original, "--train-iters", 1, *run, tmp_path / "run")
    command("pretrain", "--load", tmp_path / "run", "--train-iters", 2, *run, tmp_path / "run")
    command("pretrain", "--load", tmp_path / "run", "--finetune", "--train-iters", 1, *run, tmp_path / "next", "--export-hf", tmp_path / "end")
    command("export", "--load", tmp_path / "run", "--output", tmp_path / "export")
    left_out = "README.md LICENSE .gitattributes modeling_own.py training_args.bin trainer_state.json runs config.json auto_map "
    for back in ("end", "export"):
        assert list(losses(original, tmp_path / back, f"{left_out} config.json attention_dropout ")) == []


@pytest.mark.long
def test_a_chat_templates_end_joins_those_of_the_model(tokenizer: Tokenizer, tmp_path: Path) -> None:
    original = tmp_path / "hf"
    model_folder(original, tokenizer)
    change(original, eos_token_id=[END, 7])
    (original / "generation_config.json").unlink()
    change(original, "tokenizer_config.json", chat_template=CHATML + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    where = ["--save", tmp_path / "run", "--export-hf", tmp_path / "end"]
    command("sft", "--init-from-hf", original, "--train-data", tmp_path / "chats.jsonl", "--train-iters", 1, *STEP[:2], "--seq-length", 64, *STEP[4:], *where)
    command("export", "--load", tmp_path / "run", "--output", tmp_path / "export")
    command("convert", tmp_path / "run", tmp_path / "converted", "--to", "hf")
    for back in ("end", "export", "converted"):
        assert generation_ends(tmp_path / back) == [END, 7, IM_END]
        assert json.loads((tmp_path / back / "config.json").read_text())["eos_token_id"] == [END, 7]
    assert load_trained(open_reader(tmp_path / "run"), torch.float32).stops == {END, 7, IM_END}


def test_an_end_token_of_the_options(tokenizer: Tokenizer, dataset: Path, tmp_path: Path, capsys: Capture) -> None:
    """It takes the place of the model's in config.json, ends texts as well, and a line says both."""
    original = tmp_path / "hf"
    FOLDERS["ends_in_both"].write(original, tokenizer)
    run = [*STEP, "--train-iters", 1, "--eos-token-id", 9]
    command("pretrain", "--init-from-hf", original, "--data-path", dataset, *run, "--export-hf", tmp_path / "end")
    said = capsys.readouterr().out
    assert f"exports: {original}/config.json eos_token_id [{END}, {IM_END}, 7]: written as 9" in said
    assert f"exports: {original}/generation_config.json eos_token_id [{IM_END}, {END}]: written as [{IM_END}, {END}, 9]" in said
    assert json.loads((tmp_path / "end" / "config.json").read_text())["eos_token_id"] == 9
    assert generation_ends(tmp_path / "end") == [IM_END, END, 9]


def test_a_state_dict_with_the_folder_that_it_came_from(tokenizer: Tokenizer, tmp_path: Path) -> None:
    original = tmp_path / "hf"
    FOLDERS["ends_in_both"].write(original, tokenizer)
    ml.save_hf(ml.load(original), tmp_path / "out", config=original, tokenizer_model=original)
    assert list(losses(original, tmp_path / "out", "")) == []


def test_a_field_that_the_user_ignores_is_left_out(tokenizer: Tokenizer, tmp_path: Path, capsys: Capture) -> None:
    original = tmp_path / "hf"
    FOLDERS["plain"].write(original, tokenizer)
    change(original, own_note="x")
    ignored = ["--ignore-hf-config-fields", "own_note"]
    command("convert", original, tmp_path / "there", "--to", "native", *ignored)
    assert 'note: config.json own_note "x": left out\n' in capsys.readouterr().out
    command("convert", tmp_path / "there", tmp_path / "back", "--to", "hf")
    assert "own_note" not in json.loads((tmp_path / "back" / "config.json").read_text())


def test_a_conversion_by_an_earlier_version(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """It has a list of end tokens among the fields of the model, and no config.json."""
    FOLDERS["ends_in_config"].write(tmp_path / "hf", tokenizer)
    command("convert", tmp_path / "hf", tmp_path / "there", "--to", "native")
    folder = tmp_path / "there" / "iter_0000000"
    content = json.loads((folder / "meta.json").read_text())
    del content["hf_config"]
    content["model"]["eos_token_id"] = [END, IM_END]
    (folder / "meta.json").write_text(json.dumps(content))
    renew_sums(folder)
    assert parse_meta(folder).state.hf_config == {"eos_token_id": [END, IM_END]}
    assert load_trained(open_reader(folder), torch.float32).stops == {END, IM_END}
