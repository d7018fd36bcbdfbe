"""The tokenizer of a run: which one it is, and that datasets and weights of another one are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from megatron_llama.config.schema import CheckpointConfig, Config, DataConfig, ModelConfig
from megatron_llama.data.preprocess import preprocess
from megatron_llama.data.preprocess_config import PreprocessConfig
from megatron_llama.data.tokenizer.load import load_tokenizer
from megatron_llama.errors import DataError
from megatron_llama.train.setup.start import Start, named_start
from megatron_llama.train.setup.vocabulary import Vocabulary, find_vocabulary, with_vocabulary


def dataset(folder: Path, tokenizer: Path, name: str = "docs") -> Path:
    """A dataset of a few words; the folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.txt").write_text("a few words of text\n" * 20)
    options = PreprocessConfig(input=(str(folder / f"{name}.txt"),), output_prefix=str(folder / name), tokenizer_model=str(tokenizer))
    preprocess(options)
    return folder / name


def weights(folder: Path, tokenizer: Path) -> Path:
    """A HuggingFace folder as far as the tokenizer of a run is concerned."""
    shutil.copytree(tokenizer, folder)
    return folder


def found(*prefixes: Path, tokenizer: Path | None = None, model: ModelConfig | None = None, **checkpoint: Any) -> Vocabulary:
    named = {name: str(value) for name, value in checkpoint.items()}
    data = DataConfig(data_path=tuple(map(str, prefixes)), tokenizer_model=str(tokenizer) if tokenizer is not None else None)
    options = CheckpointConfig(**named)
    return find_vocabulary(Config(model=model or ModelConfig(), data=data, checkpoint=options), named_start(options))


def edit_meta(prefix: Path, **changes: Any) -> None:
    """Change fields of PREFIX.meta.json; None leaves one out."""
    path = Path(f"{prefix}.meta.json")
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def test_a_dataset_of_another_tokenizer(layouts: Path, tmp_path: Path) -> None:
    """Than --tokenizer-model, or than that of the initial weights: with the first token that differs, and what to do."""
    prefix = dataset(tmp_path, layouts / "llama2")
    with pytest.raises(DataError) as caught:
        found(prefix, tokenizer=layouts / "unigram")
    own = f"{prefix}-tokenizer/tokenizer.model"
    assert str(caught.value).startswith(f"--data-path {prefix}: got a dataset of another tokenizer (token 259 is '\u2581' here, '\u2581\u2581' there)")
    assert str(caught.value).endswith(f"or give --tokenizer-model {own}")
    model = weights(tmp_path / "model", layouts / "unigram")
    with pytest.raises(DataError, match=r"token 259 is .*; preprocess the text again with the tokenizer of the run$"):
        found(prefix, init_from_hf=model)


def test_sizes_and_end_tokens(layouts: Path, tmp_path: Path) -> None:
    """Also of a dataset that has no fingerprint, as all had before, and whose tokenizer is gone."""
    larger = dataset(tmp_path, layouts / "gpt2")
    shutil.rmtree(f"{larger}-tokenizer")
    edit_meta(larger, fingerprint=None)
    with pytest.raises(DataError, match=r"another tokenizer \(601 tokens there, 600 here\)"):
        found(larger, tokenizer=layouts / "llama2")
    with pytest.raises(DataError, match=r"another tokenizer \(the id that ends documents is 600 there, 602 here\)"):
        found(larger, tokenizer=layouts / "qwen")


def test_all_datasets_that_do_not_fit_are_named(layouts: Path, tmp_path: Path) -> None:
    prefixes = [dataset(tmp_path, layouts / "llama2", name) for name in ("a", "b")]
    with pytest.raises(DataError) as caught:
        found(*prefixes, tokenizer=layouts / "gpt2")
    title, *lines = str(caught.value).splitlines()
    assert title == "These datasets do not fit the tokenizer of the run:"
    assert [line.split(":")[0] for line in lines] == [f"  - --data-path {prefix}" for prefix in prefixes]


def test_parts_of_a_blend(layouts: Path, tmp_path: Path) -> None:
    """Equal sizes and end tokens do not make a tokenizer; other files of one do."""
    parts = [dataset(tmp_path, layouts / name, name) for name in ("llama2", "mistral", "unigram")]
    assert found(*parts[:2]).warnings == ()
    with pytest.raises(DataError) as caught:
        found(*parts)
    assert str(caught.value).startswith(f"{parts[2]}.meta.json tokenizer: got token 259 is ")
    assert str(caught.value).endswith(f"expected the tokenizer of {parts[0]}; preprocess all datasets of a blend with one tokenizer")


def test_more_tokens_behind_those_of_the_dataset_fit(layouts: Path, tmp_path: Path) -> None:
    prefix = dataset(tmp_path, layouts / "mistral")
    larger = weights(tmp_path / "model", layouts / "mistral")
    content = json.loads((larger / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][-1], "id": 600, "content": "[PAD]"})
    (larger / "tokenizer.json").write_text(json.dumps(content))
    vocabulary = found(prefix, init_from_hf=larger)
    assert (vocabulary.size, vocabulary.eod, vocabulary.warnings) == (601, 2, ())
    [warning] = found(prefix, tokenizer=layouts / "mistral", init_from_hf=larger).warnings
    assert warning == (
        f"the tokenizer {layouts}/mistral has 600 tokens and the end token 2; {larger}, which belongs to the weights, has 601 and 2"
    )

    other = weights(tmp_path / "other", layouts / "mistral")
    names = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps({**names, "eos_token": "<s>"}))
    [warning] = found(prefix, tokenizer=layouts / "mistral", init_from_hf=other).warnings
    assert warning.endswith(f"the end token 2; {other}, which belongs to the weights, has 600 and 1")


def test_a_tokenizer_of_other_weights(layouts: Path, tmp_path: Path) -> None:
    """Of a HuggingFace folder, without any dataset (as in SFT)."""
    model = weights(tmp_path / "model", layouts / "llama2")
    assert found(tokenizer=layouts / "mistral", init_from_hf=model).warnings == ()
    with pytest.raises(DataError) as caught:
        found(tokenizer=layouts / "unigram", init_from_hf=model)
    assert str(caught.value).startswith(f"tokenizer {layouts}/unigram: got a tokenizer in which token 259 is ")
    assert f"expected the ids of {model}; take the tokenizer with which the weights were trained;" in str(caught.value)


def test_a_tokenizer_that_has_changed_since(layouts: Path, tmp_path: Path) -> None:
    prefix = dataset(tmp_path, layouts / "llama2")
    shutil.copy(layouts / "unigram" / "tokenizer.model", f"{prefix}-tokenizer/tokenizer.model")
    with pytest.raises(DataError, match=r"its meta\.json has another fingerprint"):
        found(prefix)


def test_what_cannot_be_compared_is_said(layouts: Path, tmp_path: Path) -> None:
    """Older datasets whose tokenizer is there are compared with it, others work with a warning."""
    prefix = dataset(tmp_path, layouts / "llama2")
    edit_meta(prefix, fingerprint=None)
    assert found(prefix, tokenizer=layouts / "mistral").warnings == ()
    with pytest.raises(DataError, match="token 259 is "):
        found(prefix, tokenizer=layouts / "unigram")
    shutil.rmtree(f"{prefix}-tokenizer")
    [warning] = found(prefix, tokenizer=layouts / "unigram").warnings
    assert warning.startswith(f"--data-path {prefix}: ") and "cannot be checked (its 600 tokens and its end token may be)" in warning
    Path(f"{prefix}.meta.json").unlink()
    [warning] = found(prefix, tokenizer=layouts / "unigram").warnings
    assert "cannot be checked (nothing is known)" in warning


def test_a_moved_dataset_keeps_its_tokenizer(layouts: Path, tmp_path: Path) -> None:
    """Also when the one it was made with is gone."""
    given = weights(tmp_path / "tokenizer", layouts / "llama3" / "original")
    prefix = dataset(tmp_path / "here", given)
    made = load_tokenizer(given)
    shutil.rmtree(given)
    (tmp_path / "here").rename(tmp_path / "there")
    vocabulary = found(tmp_path / "there" / prefix.name, save=tmp_path / "run")
    assert vocabulary.tokenizer is not None and vocabulary.warnings == ()
    assert vocabulary.tokenizer.encode("some text") == made.encode("some text")
    assert (tmp_path / "there" / "docs-tokenizer" / "params.json").is_file()


def test_a_dataset_whose_tokenizer_is_missing(layouts: Path, tmp_path: Path) -> None:
    prefix = dataset(tmp_path, layouts / "llama2")
    shutil.rmtree(f"{prefix}-tokenizer")
    vocabulary = found(prefix)
    assert vocabulary.tokenizer is None and vocabulary.size == 600
    [warning] = vocabulary.warnings
    assert warning.startswith(f"no tokenizer is known ({prefix}-tokenizer/tokenizer.model, which {prefix}.meta.json names, is not there)")


def test_another_end_token_than_the_models(layouts: Path, tmp_path: Path) -> None:
    prefix = dataset(tmp_path, layouts / "llama2")
    assert found(prefix, model=ModelConfig(eos_token_id=2)).warnings == ()
    [warning] = found(prefix, model=ModelConfig(eos_token_id=5)).warnings
    assert warning.startswith(f"eos_token_id of the model is 5, the end token of {prefix}-tokenizer/tokenizer.model is 2: ")


def test_a_wrong_data_path_is_blamed_itself(tmp_path: Path) -> None:
    config = Config(data=DataConfig(data_path=(str(tmp_path / "nowhere"),)))
    with pytest.raises(DataError, match=rf"--data-path: {tmp_path}/nowhere\.idx: got no such file, expected PREFIX\.bin and PREFIX\.idx"):
        with_vocabulary(config, find_vocabulary(config, None))


def test_the_tokenizer_of_a_resumed_run_takes_no_look_at_its_indices(layouts: Path, tmp_path: Path) -> None:
    """It lies beside its checkpoints. Where one cannot be used, others say so."""
    newest = tmp_path / "run" / "iter_0000002"
    newest.mkdir(parents=True)
    shutil.copytree(layouts / "llama2", tmp_path / "run" / "tokenizer")
    for name in ("meta.json", ".metadata", "SHA256SUMS"):
        (newest / name).write_text("damaged")
    beside = find_vocabulary(Config(), Start(newest, None))
    assert beside.tokenizer is not None and beside.size == load_tokenizer(layouts / "llama2").vocab_size
    assert found(init_from_hf=tmp_path / "run" / "tokenizer").size == beside.size
